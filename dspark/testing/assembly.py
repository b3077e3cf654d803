"""What a compiled kernel uses, read from its assembly: registers, spills, instructions, widths of accesses."""

from __future__ import annotations

import re
from collections import Counter
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
    parts = [opcode.split(".") for opcode in opcodes]  # [name, modifiers...]
    names = [name for name, *_ in parts]
    bits = [(name, next((_SASS_BITS[m] for m in modifiers if m in _SASS_BITS), 32)) for name, *modifiers in parts]
    return Reading(
        registers=int(usage["REG"]),
        spills=int(usage["STACK"]) + int(usage["LOCAL"]) or sum(name in ("LDL", "STL") for name in names),
        scalar_spills=0,
        load_bits=_widest_first(width for name, width in bits if name in ("LDG", "LDGSTS")),
        store_bits=_widest_first(width for name, width in bits if name == "STG"),
        matrix=_counted(name for name in names if _SASS_MATRIX.fullmatch(name)),
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
    accesses = [access for opcode in opcodes if (access := _AMD_ACCESS.match(opcode))]
    bits = [(access[1], _AMD_BITS[access[2]] * int(access[3] or 1)) for access in accesses]
    return Reading(
        registers=usage["vgpr_count"],
        spills=sum(usage[name] for name in spills),
        scalar_spills=usage["sgpr_spill_count"],
        load_bits=_widest_first(width for kind, width in bits if kind == "load"),
        store_bits=_widest_first(width for kind, width in bits if kind == "store"),
        matrix=_counted(opcode for opcode in opcodes if opcode.startswith(("v_mfma", "v_smfmac"))),
        instructions=frozenset(opcodes),
    )


def _widest_first(widths: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(widths), reverse=True))


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
