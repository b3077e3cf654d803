"""Compile kernels ahead of time, with no GPU, and hold the result to what the registry says of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.testing.assembly import Reading, read_amd, read_nvidia
from dspark.testing.pointers import narrow_pointer_products
from dspark.testing.registry import AMD_TARGETS, TARGETS, KernelEntry

_WORKER = Path(__file__).with_name("codegen_worker.py")
_TRITON_TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Datasheet:
    """What the compiler made of one entry for one target.

    Attributes:
        entry, target: names.
        reading: what its assembly says.
        shared: bytes of shared memory per program.
        occupancy: the most warps that a multiprocessor (AMD: a compute unit) can hold, over what it has room for.
        narrow_products: 32-bit products that become pointer offsets.
        seconds: compile time; less when triton's cache held it.
    """

    entry: str
    target: str
    reading: Reading
    shared: int
    occupancy: float
    narrow_products: tuple[str, ...]
    seconds: float


def datasheets(
    entries: Sequence[KernelEntry], targets: Sequence[str] = TARGETS, *, processes: int = 2, timeout: float = 600.0
) -> list[Datasheet]:
    """Compile every entry for every target, in other processes.

    Args:
        entries: those of :mod:`tests.ops.shipped`, or your own.
        targets: of :data:`dspark.testing.registry.TARGETS`.
        processes: how many compile at a time.
        timeout: seconds that one of them may take.

    Returns:
        One datasheet for each pair, by entry and then target.

    Raises:
        RuntimeError: a kernel does not compile; the message holds the compiler's.
        ValueError: an entry or a target is not known.
    """
    jobs = [_job(entry, target) for entry in entries for target in targets]
    shares = [share for i in range(processes) if (share := jobs[i::processes])]
    with ThreadPoolExecutor(processes) as pool:
        answers = {a["key"]: a for found in pool.map(lambda share: _run(share, timeout), shares) for a in found}
    return [_datasheet(entry, target, answers[_key(entry, target)]) for entry in entries for target in targets]


def faults(entry: KernelEntry, sheet: Datasheet) -> list[str]:
    """What a datasheet shows that its entry does not allow, in words; empty when all is well."""
    reading, budget = sheet.reading, entry.budgets.get(sheet.target)
    found = [f"32-bit pointer product at {product}" for product in sheet.narrow_products]
    if reading.spills:
        found.append(f"spills: {reading.spills}")
    if budget is None:
        found.append("no budget is declared")
    elif reading.registers > budget.registers:
        found.append(f"registers: {reading.registers}, budget {budget.registers}")
    if budget and sheet.shared > budget.shared:
        found.append(f"shared memory: {sheet.shared} bytes, budget {budget.shared}")
    for claim in entry.claims.get(sheet.target, ()):
        if not any(re.search(claim, instruction) for instruction in reading.instructions):
            found.append(f"claimed instruction: nothing matches {claim!r}")
    return [f"{sheet.entry} on {sheet.target}: {fault}" for fault in found]


def occupancy(target: str, registers: int, shared: int, num_warps: int) -> float:
    """Upper bound on the warps that a multiprocessor holds at a time, over the most that it can hold.

    NVIDIA: 64 warps, 32 programs, 65,536 registers given out in 256s per warp, and shared memory with 1 KiB per program
    for the system (CUDA C++ Programming Guide, technical specifications per compute capability). AMD gfx942: four
    units of 8 waves and 512 vector registers given out in 8s, 64 KiB of LDS (CDNA 3 instruction set architecture).
    """
    if target in AMD_TARGETS:
        units = -(-max(registers, 1) // 8)
        by_registers = 4 * min(8, 64 // units)
        by_shared = 65_536 // shared if shared else 32
        return min(by_registers // num_warps, by_shared) * num_warps / 32
    capacity = {"sm_80": 167_936}.get(target, 233_472)
    units = -(-registers * 32 // 256)
    by_registers = 256 // units // num_warps
    return min(by_registers, capacity // (shared + 1024), 64 // num_warps, 32) * num_warps / 64


def _key(entry: KernelEntry, target: str) -> str:
    return f"{entry.name} {target}"


def _job(entry: KernelEntry, target: str) -> dict[str, Any]:
    if target not in _TRITON_TARGETS:
        raise ValueError(f"targets: expected some of {', '.join(_TRITON_TARGETS)}, got {target!r}")
    if unknown := set(entry.aligned) - entry.signature.keys():
        raise ValueError(f"{entry.name}: aligned names {sorted(unknown)}, which the signature lacks")
    return {**asdict(entry), "key": _key(entry, target), "target": _TRITON_TARGETS[target]}


def _run(jobs: Sequence[Mapping[str, Any]], timeout: float) -> list[dict[str, Any]]:
    """Hand jobs to a worker. It is isolated (-I): the folder of its script holds modules named as the library's."""
    request = {"path": [path or os.getcwd() for path in sys.path], "jobs": jobs}
    done = subprocess.run(
        [sys.executable, "-I", str(_WORKER)],
        input=json.dumps(request),
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"the compiler process ended with {done.returncode}:\n{done.stderr}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if failed := next((answer for answer in answers if "error" in answer), None):
        raise RuntimeError(f"{failed['key']}: {failed['error']}")
    return answers


def _datasheet(entry: KernelEntry, target: str, answer: Mapping[str, Any]) -> Datasheet:
    amd = target in AMD_TARGETS
    reading = read_amd(answer["assembly"]) if amd else read_nvidia(answer["assembly"], answer["resources"])
    return Datasheet(
        entry=entry.name,
        target=target,
        reading=reading,
        shared=answer["shared"],
        occupancy=occupancy(target, reading.registers, answer["shared"], entry.num_warps),
        narrow_products=tuple(narrow_pointer_products(answer["ttir"])),
        seconds=answer["seconds"],
    )
