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
