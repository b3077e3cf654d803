"""What a round costs on a given machine, as a curve over the number of rows verified."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Source = Literal["measured", "modelled"]


@dataclass(frozen=True)
class CostProfile:
    """Seconds of a round: a curve over the rows verified, one over the requests drafted for, and a slope over context.

    Both curves are linear between their points, level below the first, and extrapolated by the last slope. Where an
    engine replays captured graphs, a batch is padded to the next captured size: the curve over rows is a step function
    up to the largest of them.

    Attributes:
        rows: increasing numbers of rows (anchors included).
        seconds: seconds at each: of the verification, or of the whole round where nothing is said of drafting.
        draft_requests: increasing numbers of requests; empty if ``seconds`` include drafting.
        draft_seconds: seconds that drafting for so many requests takes.
        captured: increasing numbers of rows that graphs are captured for; empty if none.
        context_tokens: tokens of context, over all requests, behind which ``seconds`` are.
        seconds_per_context_token: what each further one adds.
        source: whether somebody timed it or it comes from arithmetic.
        device: what it is of, in words.

    Raises:
        ValueError: points differ in number, are missing, or are not increasing and positive.

    >>> CostProfile(rows=(1, 3), seconds=(0.5, 1.0)).steps_per_second(4).tolist()[1:]
    [2.0, 1.3333333333333333, 1.0, 0.8]
    >>> CostProfile(rows=(1, 4), seconds=(0.5, 1.0), captured=(2, 4)).steps_per_second(4).tolist()[1:]
    [1.5, 1.5, 1.0, 1.0]
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_requests: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    captured: tuple[int, ...] = ()
    context_tokens: int = 0
    seconds_per_context_token: float = 0.0
    source: Source = "measured"
    device: str = ""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows, seconds: expected the same length >= 1, got 0 and 0")
        _check_curve("rows", self.rows, "seconds", self.seconds)
        _check_curve("draft_requests", self.draft_requests, "draft_seconds", self.draft_seconds)
        _check_increasing("captured", self.captured)
        if self.context_tokens < 0 or not 0 <= self.seconds_per_context_token < float("inf"):
            raise ValueError(
                "context_tokens, seconds_per_context_token: expected at least 0, got "
                f"{self.context_tokens} and {self.seconds_per_context_token}"
            )
        if self.source not in get_args(Source):
            raise ValueError(f"source: expected 'measured' or 'modelled', got {self.source!r}")

    @classmethod
    def measure(
        cls,
        run_round: Callable[[int], None],
        rows: Sequence[int],
        repeats: int = 5,
        *,
        run_draft: Callable[[int], None] | None = None,
        requests: Sequence[int] = (),
        captured: Sequence[int] = (),
        context_tokens: int = 0,
        device: str = "",
    ) -> CostProfile:
        """Time an engine: one warm-up of each size, then the median of interleaved repeats.

        The curves are made non-decreasing (a round with more rows is never modelled as cheaper than one with fewer), so
        that noise in the measurement does not invite the scheduler to verify more than it should.

        Args:
            run_round: runs a verification of n rows (without ``run_draft``: a whole round) and waits until it is done.
            rows: the n to time, increasing.
            repeats: timings of each.
            run_draft: drafts for n requests and waits until it is done.
            requests: the n to time it with.
            captured: sizes that the engine's graphs are captured for; they have to be among ``rows``.
            context_tokens: tokens of context behind the rows timed.
            device: what is timed, in words.

        Raises:
            ValueError: a captured size is not timed, or only one of ``run_draft`` and ``requests`` is given.
        """
        if not set(captured) <= set(rows):
            raise ValueError(f"captured: expected some of rows {list(rows)}, which are timed, got {list(captured)}")
        if (run_draft is None) == bool(requests):
            raise ValueError("run_draft, requests: expected both or neither")
        calls = [(run_round, n) for n in rows]
        if run_draft is not None:
            calls += [(run_draft, n) for n in requests]
        seconds = _medians(calls, repeats)
        return cls(
            rows=tuple(rows),
            seconds=_envelope(seconds[: len(rows)]),
            draft_requests=tuple(requests),
            draft_seconds=_envelope(seconds[len(rows) :]),
            captured=tuple(captured),
            context_tokens=context_tokens,
            device=device,
        )

    def steps_per_second(
        self,
        max_rows: int,
        device: torch.device | str = "cpu",
        *,
        requests: int | None = None,
        context_tokens: int | None = None,
    ) -> Tensor:
        """The curve as a table ``[max_rows + 1]`` float64 indexed by the number of rows; entry 0 repeats entry 1.

        Args:
            max_rows: last entry.
            device: where the table is wanted.
            requests: requests that are drafted for.
            context_tokens: tokens of context over all requests; None is what the profile was made with.

        Raises:
            ValueError: drafting has a curve of its own and ``requests`` is None.
        """
        extra = 0.0
        if self.draft_requests:
            if requests is None:
                raise ValueError("requests: this profile knows what drafting costs by their number, got None")
            drafted = torch.tensor([requests], dtype=torch.float64)
            extra += float(_interpolate(drafted, self.draft_requests, self.draft_seconds))
        if context_tokens is not None:
            extra += self.seconds_per_context_token * (context_tokens - self.context_tokens)
        seconds = self._table(max_rows, torch.device(device))
        # Less context than was measured with never makes a round free.
        return 1 / (seconds if extra == 0 else (seconds + extra).clamp(min=min(self.seconds) / 100))

    def round_seconds(self, rows: int, requests: int | None = None, context_tokens: int | None = None) -> float:
        """Seconds of one round; arguments as of :meth:`steps_per_second`."""
        return 1 / float(self.steps_per_second(rows, requests=requests, context_tokens=context_tokens)[rows])

    @functools.lru_cache(maxsize=16)  # noqa: B019 (a profile is a few numbers, and policies keep it anyway)
    def _table(self, max_rows: int, device: torch.device) -> Tensor:
        """Seconds of verification by the number of rows."""
        n = torch.arange(max_rows + 1, dtype=torch.float64).clamp(min=1)
        if self.captured:
            sizes = torch.tensor(self.captured, dtype=torch.float64)
            n = torch.where(n <= sizes[-1], sizes[torch.searchsorted(sizes, n).clamp(max=len(sizes) - 1)], n)
        return _interpolate(n, self.rows, self.seconds).to(device)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostProfile:
        """Read a profile that :meth:`save` wrote; what a file does not say is as by default.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a profile.
        """
        try:
            data = json.loads(Path(path).read_text())
            if unknown := data.keys() - _READ.keys():
                raise ValueError(f"unknown fields {sorted(unknown)}")
            return cls(**{name: _READ[name](value) for name, value in {"rows": None, "seconds": None, **data}.items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a cost profile (expected JSON with rows and seconds): {error!r}") from error


class StepCost:
    """Seconds of a step, looked up as often as a simulation does.

    Args:
        profile: of rounds. Where it has a curve for drafting, a step without drafts does not pay it.
        plain: of steps without drafts, for a profile that has no such curve; None charges them like rounds.

    Raises:
        ValueError: ``plain`` is given beside a profile with a curve for drafting.
    """

    def __init__(self, profile: CostProfile, plain: CostProfile | None = None) -> None:
        if plain is not None and profile.draft_requests:
            raise ValueError("plain: expected None, since the profile itself says what drafting costs")
        self.profile = profile
        verify = replace(profile, draft_requests=(), draft_seconds=())
        self._verify = {True: _Curve(verify), False: _Curve(verify if plain is None else plain)}
        self._draft = (
            _Curve(CostProfile(profile.draft_requests, profile.draft_seconds)) if profile.draft_requests else None
        )

    def seconds(self, rows: int, requests: int, context_tokens: int, drafting: bool) -> float:
        """How long a step takes.

        Args:
            rows: that the target processes: anchors, drafts to verify, prompt tokens.
            requests: that decode.
            context_tokens: their tokens of context, all together.
            drafting: whether drafts are made for them.
        """
        curve = self._verify[drafting]
        extra = curve.profile.seconds_per_context_token * (context_tokens - curve.profile.context_tokens)
        if drafting and self._draft is not None:
            extra += self._draft.at(requests)
        return max(curve.at(rows) + extra, curve.least)


class _Curve:
    """A profile's seconds by rows as a list, as long as was needed so far."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.least = min(profile.seconds) / 100  # as the profile itself has it
        self._seconds: list[float] = []

    def at(self, rows: int) -> float:
        if rows >= len(self._seconds):
            self._seconds = (1 / self.profile.steps_per_second(2 * rows)).tolist()
        return self._seconds[rows]


_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("rows", "draft_requests", "captured"), lambda values: tuple(map(int, values))),
    **dict.fromkeys(("seconds", "draft_seconds"), lambda values: tuple(map(float, values))),
    **{"context_tokens": int, "seconds_per_context_token": float, "source": str, "device": str},
}


def _check_curve(x_name: str, x: Sequence[int], y_name: str, y: Sequence[float]) -> None:
    if len(x) != len(y):
        raise ValueError(f"{x_name}, {y_name}: expected the same length >= 1, got {len(x)} and {len(y)}")
    _check_increasing(x_name, x)
    if any(not 0 < s < float("inf") for s in y):
        raise ValueError(f"{y_name}: expected positive finite numbers, got {tuple(y)}")


def _check_increasing(name: str, numbers: Sequence[int]) -> None:
    if numbers and (numbers[0] < 1 or any(b <= a for a, b in itertools.pairwise(numbers))):
        raise ValueError(f"{name}: expected increasing numbers from 1 up, got {tuple(numbers)}")


def _medians(calls: Sequence[tuple[Callable[[int], None], int]], repeats: int) -> list[float]:
    for run, n in calls:
        run(n)
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for (run, n), own in zip(calls, samples, strict=True):
            start = time.perf_counter()
            run(n)
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in samples]


def _envelope(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(seconds[: i + 1]) for i in range(len(seconds)))


def _interpolate(n: Tensor, x: Sequence[int], y: Sequence[float]) -> Tensor:
    """Piecewise linear through the points, level below the first, never below the least."""
    if len(x) == 1:
        return torch.full_like(n, y[0])
    points, values = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    left = (torch.searchsorted(points, n, right=True) - 1).clamp(0, len(x) - 2)
    slope = (values[left + 1] - values[left]) / (points[left + 1] - points[left])
    return (values[left] + slope * (n - points[left]).clamp(min=0)).clamp(min=min(y))
