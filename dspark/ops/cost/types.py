"""What a cost model says of a call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Bytes read and written, launches, and the fewest bytes that the rule allows."""

    read: int
    written: int
    launches: int
    lower_bound: int

    @property
    def total(self) -> int:
        """Bytes moved."""
        return self.read + self.written


@dataclass
class Tally:
    """A cost that is being added up, in the order of the launches."""

    read: int = 0
    written: int = 0
    launches: int = 0

    def cost(self, lower_bound: int) -> Cost:
        """The sum, beside the lower bound."""
        return Cost(self.read, self.written, self.launches, lower_bound)
