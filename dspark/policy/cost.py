"""What a round costs on a given machine, as a curve over the number of rows verified."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class CostProfile:
    """Seconds per round at some numbers of verified rows; linear in between, level below the first, and extrapolated by
    the last slope.

    Attributes:
        rows: increasing numbers of rows (anchors included).
        seconds: seconds of a whole round (drafting and verification) at each.

    Raises:
        ValueError: the two differ in length, are empty, or are not increasing and positive.

    >>> CostProfile(rows=(1, 3), seconds=(0.5, 1.0)).steps_per_second(4).tolist()[1:]
    [2.0, 1.3333333333333333, 1.0, 0.8]
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise ValueError(
                f"rows, seconds: expected the same length >= 1, got {len(self.rows)} and {len(self.seconds)}"
            )
        if self.rows[0] < 1 or any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows: expected increasing numbers from 1 up, got {self.rows}")
        if any(not 0 < s < float("inf") for s in self.seconds):
            raise ValueError(f"seconds: expected positive finite numbers, got {self.seconds}")

    @classmethod
    def measure(cls, run_round: Callable[[int], None], rows: Sequence[int], repeats: int = 5) -> CostProfile:
        """Time ``run_round(n)`` for each n in ``rows``: one warm-up, then the median of interleaved repeats.

        The result is made non-decreasing (a round with more rows is never modelled as cheaper than one with fewer), so
        that noise in the measurement does not invite the scheduler to verify more than it should.
        """
        for n in rows:
            run_round(n)
        samples: dict[int, list[float]] = {n: [] for n in rows}
        for _ in range(repeats):
            for n in rows:
                start = time.perf_counter()
                run_round(n)
                samples[n].append(time.perf_counter() - start)
        seconds, floor = [], 0.0
        for n in rows:
            floor = max(floor, statistics.median(samples[n]))
            seconds.append(floor)
        return cls(tuple(rows), tuple(seconds))

    def steps_per_second(self, max_rows: int, device: torch.device | str = "cpu") -> Tensor:
        """The curve as a table ``[max_rows + 1]`` float64 indexed by the number of rows; entry 0 repeats entry 1."""
        return self._table(max_rows, torch.device(device)).clone()

    @functools.lru_cache(maxsize=16)  # noqa: B019 (a profile is a few numbers, and policies keep it anyway)
    def _table(self, max_rows: int, device: torch.device) -> Tensor:
        n = torch.arange(max_rows + 1, dtype=torch.float64, device=device).clamp(min=1)
        if len(self.rows) == 1:
            return torch.full_like(n, 1 / self.seconds[0])
        x = torch.tensor(self.rows, dtype=torch.float64, device=device)
        y = torch.tensor(self.seconds, dtype=torch.float64, device=device)
        left = (torch.searchsorted(x, n, right=True) - 1).clamp(0, len(self.rows) - 2)
        slope = (y[left + 1] - y[left]) / (x[left + 1] - x[left])
        return 1 / (y[left] + slope * (n - x[left])).clamp(min=y.min())

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostProfile:
        """Read a profile that :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a profile.
        """
        try:
            data = json.loads(Path(path).read_text())
            return cls(tuple(int(n) for n in data["rows"]), tuple(float(s) for s in data["seconds"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a cost profile (expected JSON with rows and seconds): {error!r}") from error
