"""Pointer arithmetic of a kernel, read from Triton's IR: which 32-bit products become offsets."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

SMALL_FACTOR = 2**15
"""A product of a 32-bit value and a constant up to this one is safe: what it multiplies (a program's index along an
axis, an index in a tile) stays below 2^16, which is also a CUDA grid's limit on its second and third axis."""

_VALUE = r"%[\w$.-]+(?:#\d+)?"
_DEFINITION = re.compile(r"(%[\w$.-]+)(?::\d+)? = \"?([\w.]+)\"?(.*)$")
_LOCATION = re.compile(r" loc\((#loc\d*)\)$")
_LOCATION_LINE = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_STOPS = {
    "arith.andi", "arith.cmpf", "arith.cmpi", "arith.constant", "arith.fptosi", "arith.fptoui", "arith.ori",
    "arith.remui", "arith.shrsi", "arith.shrui", "arith.xori", "tt.atomic_cas", "tt.atomic_rmw", "tt.call",
    "tt.get_num_programs", "tt.get_program_id", "tt.histogram", "tt.load", "tt.make_range",
}  # fmt: skip
"""Operations that an offset is not followed through: their results are data, bounded, or wrapped on purpose."""


def narrow_pointer_products(ttir: str) -> list[str]:
    """The 32-bit products that become pointer offsets, each as a line ``file:line: what is multiplied``.

    A product of two 32-bit values wraps at 2^31, whatever the sum or the extension to 64 bit that follows; one of them
    should be extended first. A product with a small constant passes (:data:`SMALL_FACTOR`). The offsets of
    ``tt.addptr`` are followed back to what they are computed from, through loops and branches too.

    Args:
        ttir: Triton IR of a kernel, as ``compiled.asm["ttir"]``.

    Raises:
        ValueError: the text holds no Triton function.
    """
    if "tt.func" not in ttir:
        raise ValueError("not Triton IR: no tt.func")
    graph = _Graph()
    for line in ttir.splitlines():
        graph.add_line(line)
    locations = dict(_LOCATION_LINE.findall(ttir))
    waiting = [operation.operands[1] for operation in graph.operations.values() if operation.name == "tt.addptr"]
    seen: set[str] = set()
    found: set[str] = set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        waiting += graph.sources[value]
        operation = graph.operations.get(value)
        if operation and operation.is_narrow_product() and not graph.has_small_factor(operation):
            what = " * ".join(name.partition("@")[0] for name in operation.operands)
            found.add(f"{_source_line(locations, operation.location)}: {what} in 32 bits")
    return sorted(found)


class _Operation(NamedTuple):
    name: str
    operands: list[str]
    text: str
    location: str

    def is_narrow_product(self) -> bool:
        """Whether this multiplies (or shifts) integers of at most 32 bits, scalars or tensors."""
        is_product = self.name in ("arith.muli", "arith.shli")
        return is_product and re.search(r"(?:: |x)i(?:8|16|32)>?$", self.text) is not None


@dataclass
class _Region:
    """A region that is being read: the operation that it belongs to, and the names that it defines.

    The IR uses a name again in the next region, so each value is known as ``name@number``.
    """

    operation: str = ""
    result: str = ""
    arguments: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)


class _Graph:
    """Operations by the value that they define, and of each value those that an offset in it may come from."""

    def __init__(self) -> None:
        self.operations: dict[str, _Operation] = {}
        self.sources: dict[str, list[str]] = defaultdict(list)
        self._regions = [_Region()]
        self._count = 0

    def has_small_factor(self, product: _Operation) -> bool:
        """Whether a factor is a small constant; of a shift: the amount."""
        is_shift = product.name == "arith.shli"
        limit = SMALL_FACTOR.bit_length() - 1 if is_shift else SMALL_FACTOR
        factors = [self.operations.get(factor) for factor in product.operands[is_shift:]]
        texts = [factor.text for factor in factors if factor and factor.name == "arith.constant"]
        constants = [re.match(r" (?:dense<)?(-?\d+)>? :", text) for text in texts]
        return any(abs(int(constant[1])) <= limit for constant in constants if constant)

    def add_line(self, line: str) -> None:
        location = _LOCATION.search(line)
        code = (line[: location.start()] if location else line).strip()
        opens = code.endswith("{")
        if code.startswith("}"):
            closed = self._regions.pop()
            if opens:  # the other branch, or the body of a while loop
                self._regions.append(_Region(closed.operation, closed.result, closed.arguments))
        elif (definition := _DEFINITION.match(code)) or opens:
            name, operator, text = (
                definition.groups() if definition else ("", code.split(maxsplit=1)[0].strip('"'), code)
            )
            operands = [self._resolve(operand) for operand in re.findall(_VALUE, text)]
            result = self._define(name)
            if operator not in _STOPS and not operator.startswith("scf."):
                self.sources[result] += operands
            self.operations[result] = _Operation(operator, operands, text, location[1] if location else "")
            if opens:
                self._open(operator, result, text)
        elif code.startswith(("scf.yield", "scf.condition")):
            self._pass_on(code)
        elif code.startswith("^bb") and self._regions[-1].operation == "scf.while":
            # The body starts from what the condition passed on, which are the loop's results too.
            for i, argument in enumerate(re.findall(_VALUE, code)):
                self.sources[self._define(argument)].append(f"{self._regions[-1].result}#{i}")

    def _define(self, name: str) -> str:
        self._count += 1
        value = f"{name}@{self._count}"
        self._regions[-1].names[name] = value
        return value

    def _resolve(self, name: str) -> str:
        """The value that a name stands for here; result ``i`` of several is ``value#i``."""
        base, mark, index = name.partition("#")
        return next(
            (region.names[base] + mark + index for region in reversed(self._regions) if base in region.names), name
        )

    def _open(self, operator: str, result: str, text: str) -> None:
        """Begin an operation's region; what a loop starts from flows into the arguments of its body."""
        region = _Region(operator, result)
        self.sources[result].append(f"{result}#0")  # a single result is written without its number
        pairs = [(name, [self._resolve(start)]) for name, start in re.findall(rf"({_VALUE}) = ({_VALUE})", text)]
        step = re.search(rf" to {_VALUE} step ({_VALUE})", text)
        if step:
            pairs[0][1].append(self._resolve(step[1]))
        self._regions.append(region)
        if operator in ("scf.for", "scf.while"):
            arguments = [self._define(name) for name, _ in pairs]
            for argument, (_, starts) in zip(arguments, pairs, strict=True):
                self.sources[argument] += starts
            region.arguments += arguments[1:] if step else arguments  # without the counter
            if operator == "scf.for":
                for i, argument in enumerate(region.arguments):
                    self.sources[f"{result}#{i}"].append(argument)

    def _pass_on(self, code: str) -> None:
        """What a yield or a loop's condition hands on, one by one."""
        region = self._regions[-1]
        values = [self._resolve(name) for name in re.findall(_VALUE, code.partition(" : ")[0])]
        if code.startswith("scf.condition"):
            values = values[1:]
        back = region.operation == "scf.for" or (region.operation == "scf.while" and code.startswith("scf.yield"))
        for i, value in enumerate(values):
            self.sources[region.arguments[i] if back else f"{region.result}#{i}"].append(value)


def _source_line(locations: dict[str, str], location: str) -> str:
    """``file.py:12`` of a location, through the names and call sites around it."""
    for _ in range(len(locations)):
        text = locations.get(location, "")
        if place := re.match(r'"([^"]+)":(\d+):\d+$', text):
            return f"{PurePath(place[1]).name}:{place[2]}"
        inner = re.search(r"#loc\d*", text)
        if inner is None:
            break
        location = inner[0]
    return "unknown place"
