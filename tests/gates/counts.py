"""What a call asks of memory, counted in Triton's interpreter, and the committed table of such counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dspark.testing.traffic import Traffic, counted_traffic

TABLE = Path(__file__).parent / "traffic.json"

Made = tuple[Callable[[], Any], Callable[[Any], int]]
"""What runs a call, and the lower bound of its bytes, given what it returned."""


class Counted(NamedTuple):
    """A call to count; its inputs are made when it is. Those of the stated shapes take seconds."""

    name: str
    make: Callable[[], Made]


class Count(NamedTuple):
    """A line of the table: bytes asked for, launches, and the fewest bytes that the op must move."""

    read: int
    written: int
    launches: int
    bound: int

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def over(self) -> float:
        """Bytes over the lower bound."""
        return self.total / self.bound


def count(call: Counted) -> tuple[Count, Traffic]:
    """Run a call in the interpreter."""
    run, bound = call.make()
    with counted_traffic() as traffic:
        result = run()
    return Count(traffic.read, traffic.written, traffic.launches, bound(result)), traffic


def committed() -> dict[str, Count]:
    """The table as it is committed."""
    return {name: Count(*numbers) for name, numbers in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def commit(table: Mapping[str, Count]) -> None:
    """Write the table that is to be committed: one line for each call."""
    lines = (f" {json.dumps(name)}: {json.dumps(list(row))}" for name, row in table.items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def differences(counted: Mapping[str, Count], table: Mapping[str, Count]) -> list[str]:
    """What a table says otherwise, or not at all, of calls that were counted."""
    return [
        f"{name}: counted {tuple(row)}, committed {tuple(table[name]) if name in table else None}"
        for name, row in counted.items()
        if table.get(name) != row
    ]
