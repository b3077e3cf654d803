"""Requests of a simulated service: when they come, how long their prompts and outputs are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival.

    Attributes:
        name: of the arrival process, for tables.
        arrival: ``[N]`` float64 seconds, not decreasing; None is a closed loop, in which a request arrives when there
            is room for it.
        prompt: ``[N]`` int64, tokens of the prompts.
        output: ``[N]`` int64, tokens to emit.

    Raises:
        ValueError: a shape differs, a length is below 1, or a time is not finite, negative, or before the last.
    """

    name: str
    arrival: NDArray[np.float64] | None
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]

    def __post_init__(self) -> None:
        shape = self.prompt.shape
        if len(shape) != 1 or not self.prompt.size:
            raise ValueError(f'prompt: expected shape "N" with N >= 1, got {list(shape)}')
        for name, array in (("output", self.output), ("arrival", self.arrival)):
            if array is not None and array.shape != shape:
                raise ValueError(f'{name}: expected shape "N" = {list(shape)}, got {list(array.shape)}')
        for name, array in (("prompt", self.prompt), ("output", self.output)):
            if array.min() < 1:
                raise ValueError(f"{name}: expected at least 1 token, got {array.min()}")
        if self.arrival is not None and not (
            np.isfinite(self.arrival).all() and self.arrival[0] >= 0 and (np.diff(self.arrival) >= 0).all()
        ):
            raise ValueError("arrival: expected finite times from 0 up that do not decrease")

    def __len__(self) -> int:
        return len(self.prompt)

    @classmethod
    def closed(cls, requests: int, **lengths: int | float) -> Workload:
        """As many requests in flight as the engine takes: one that ends makes room for the next.

        Args:
            requests: N.
            lengths: see :func:`draw_lengths`.
        """
        return cls("closed", None, *draw_lengths(requests, **lengths))

    @classmethod
    def poisson(cls, requests: int, rate: float, **lengths: int | float) -> Workload:
        """Independent arrivals at ``rate`` requests per second.

        Args:
            requests: N.
            rate: positive.
            lengths: see :func:`draw_lengths`, whose seed is that of the arrivals, too.
        """
        if not 0 < rate < float("inf"):
            raise ValueError(f"rate: expected a positive finite number, got {rate}")
        rng = np.random.default_rng([int(lengths.get("seed", 0)), 1])
        arrival = rng.exponential(1 / rate, requests).cumsum()
        return cls(f"poisson {rate:g}/s", arrival, *draw_lengths(requests, **lengths))

    @classmethod
    def replay(cls, arrival: Sequence[float], **lengths: int | float) -> Workload:
        """Arrivals at given seconds, for instance of a production log.

        Args:
            arrival: N times, not decreasing.
            lengths: see :func:`draw_lengths`.
        """
        return cls("replay", np.array(arrival, dtype=np.float64), *draw_lengths(len(arrival), **lengths))


def draw_lengths(
    requests: int, *, prompt_tokens: float = 256, output_tokens: float = 256, spread: float = 0.5, seed: float = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths of prompts and outputs, log-normal.

    Args:
        requests: N.
        prompt_tokens, output_tokens: their means.
        spread: standard deviation of the logarithm; 0 is the mean for all. Lengths are cut at 8 times the mean.
        seed: of the draws.

    Returns:
        Two ``[N]`` int64 arrays of at least 1.

    Raises:
        ValueError: a count or a mean is below 1, or the spread is negative.
    """
    for name, value in (("requests", requests), ("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= value < float("inf"):
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if not 0 <= spread < float("inf"):
        raise ValueError(f"spread: expected at least 0, got {spread}")
    rng = np.random.default_rng(int(seed))

    def draw(mean: float) -> NDArray[np.int64]:
        lengths = mean * np.exp(spread * rng.standard_normal(requests) - spread**2 / 2)
        cut: NDArray[np.int64] = lengths.round().clip(1, 8 * mean).astype(np.int64)
        return cut

    return draw(prompt_tokens), draw(output_tokens)
