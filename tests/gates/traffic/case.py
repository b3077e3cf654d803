"""A call whose memory traffic is counted in Triton's interpreter, beside the model of ``dspark.ops.cost``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dspark.ops.cost import Cost
from dspark.testing.traffic import Traffic, counted_traffic


@dataclass(frozen=True)
class Case:
    """A call to count: its op, shape and rule in words, and what runs it and returns what the model says of it."""

    op: str
    shape: str
    rule: str
    run: Callable[[], Cost]


@dataclass(frozen=True)
class Row:
    """A line of the table; bytes."""

    op: str
    shape: str
    rule: str
    read: int
    written: int
    modelled_read: int
    modelled_written: int
    lower_bound: int
    launches: int
    modelled_launches: int

    @property
    def over_bound(self) -> float:
        """Bytes modelled over the lower bound."""
        return (self.modelled_read + self.modelled_written) / self.lower_bound

    @property
    def agrees(self) -> bool:
        """Whether what was counted is exactly what the model says."""
        return (self.read, self.written, self.launches) == (
            self.modelled_read,
            self.modelled_written,
            self.modelled_launches,
        )


def measure(case: Case) -> tuple[Row, Traffic]:
    """Run a case in the interpreter."""
    with counted_traffic() as traffic:
        cost = case.run()
    row = Row(
        case.op, case.shape, case.rule, traffic.read, traffic.written, cost.read, cost.written, cost.lower_bound,
        traffic.launches, cost.launches,
    )  # fmt: skip
    return row, traffic
