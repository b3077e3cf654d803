"""What a compiled kernel uses, read from its assembly: registers, spills, instructions, widths of accesses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_AMD = re.compile(r"^\s+([a-z]+_[a-z]\w*)", re.MULTILINE)
_SASS_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_AMD_BITS = {"ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32}
_AMD_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:lds_)?(dword|[us]?byte|[us]?short)(?:x(\d))?")
_SASS_MATRIX = re.compile(r"[A-Z]*(?:HG|IG|QG|BG|H|I|D|B|Q|OM|UTCH|UTCI|UTCQ|UTCOM)MMA")


@dataclass(frozen=True)
class Reading:
    """What one compiled kernel uses.

    Attributes:
        registers: per thread.
        spills: bytes per thread of stack (NVIDIA), or spilled vector registers and bytes of scratch (AMD); 0 is none.
        scalar_spills: scalar registers of AMD that live in lanes of vector registers; they do not reach memory.
        load_bits, store_bits: widths of the accesses to global memory, widest first.
        matrix: matrix instructions, each name with its count.
        instructions: every opcode.
    """

    registers: int
    spills: int
    scalar_spills: int
    load_bits: tuple[int, ...]
    store_bits: tuple[int, ...]
    matrix: dict[str, int]
    instructions: frozenset[str]


def read_nvidia(sass: str, resources: str) -> Reading:
    """Read ``cuobjdump -sass`` and ``cuobjdump --dump-resource-usage`` of one kernel.

    Raises:
        ValueError: a text does not hold what it should.
    """
    opcodes = _SASS.findall(sass)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", resources))
    if not opcodes or not usage.keys() >= {"REG", "STACK", "LOCAL"}:
        raise ValueError("not the output of cuobjdump for one kernel")
    loads, stores = set(), set()
    for opcode in opcodes:
        name, *modifiers = opcode.split(".")
        if name in ("LDG", "LDGSTS"):
            loads.add(_sass_bits(modifiers))
        elif name == "STG":
            stores.add(_sass_bits(modifiers))
    local = sum(opcode.split(".")[0] in ("LDL", "STL") for opcode in opcodes)
    return Reading(
        registers=int(usage["REG"]),
        spills=int(usage["STACK"]) + int(usage["LOCAL"]) or local,
        scalar_spills=0,
        load_bits=_widest_first(loads),
        store_bits=_widest_first(stores),
        matrix=_count(opcode.split(".")[0] for opcode in opcodes if _SASS_MATRIX.fullmatch(opcode.split(".")[0])),
        instructions=frozenset(opcodes),
    )


def read_amd(assembly: str) -> Reading:
    """Read AMD assembly with its metadata.

    Raises:
        ValueError: the metadata is missing.
    """
    usage = {name: int(value) for name, value in re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    spills = ("vgpr_spill_count", "private_segment_fixed_size")
    if not usage.keys() >= {"vgpr_count", "sgpr_spill_count", *spills}:
        raise ValueError("not AMD assembly with metadata of one kernel")
    opcodes = _AMD.findall(assembly.partition(".section\t.rodata")[0])
    accesses: dict[str, set[int]] = {"load": set(), "store": set()}
    for opcode in opcodes:
        if access := _AMD_ACCESS.match(opcode):
            accesses[access[1]].add(_AMD_BITS[access[2]] * int(access[3] or 1))
    return Reading(
        registers=usage["vgpr_count"],
        spills=sum(usage[name] for name in spills),
        scalar_spills=usage["sgpr_spill_count"],
        load_bits=_widest_first(accesses["load"]),
        store_bits=_widest_first(accesses["store"]),
        matrix=_count(opcode for opcode in opcodes if opcode.startswith(("v_mfma", "v_smfmac"))),
        instructions=frozenset(opcodes),
    )


def _sass_bits(modifiers: Iterable[str]) -> int:
    return next((_SASS_BITS[m] for m in modifiers if m in _SASS_BITS), 32)


def _widest_first(widths: set[int]) -> tuple[int, ...]:
    return tuple(sorted(widths, reverse=True))


def _count(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))
