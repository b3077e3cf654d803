"""Small speculative engines with constant models, sound and with planted faults."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dspark.requests import SamplingParams

P, Q = (0.6, 0.25, 0.15), (0.3, 0.4, 0.3)


def target(tokens: Sequence[int]) -> tuple[float, ...]:
    """What every engine here is to be judged by."""
    return P


class Engine:
    """The ratio rule over drafts of two, one draft sampled after another. A subclass spoils a part of it."""

    def __call__(self, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> list[int]:
        self.rng = random.Random(seed)
        out: list[int] = []
        while len(out) < sampling.max_tokens:
            draft = [self.draw(Q, self.rng.random()) for _ in range(2)]
            out += self.verify(draft[: self.plan(draft)])
        return self.end(out, sampling)

    def plan(self, draft: list[int]) -> int:
        """Drafts to verify."""
        return 2

    def verify(self, draft: list[int]) -> list[int]:
        for n, token in enumerate(draft):
            if self.rng.random() * Q[token] >= P[token]:
                return [*draft[:n], self.draw(self.residual(), self.rng.random())]
        return [*draft, self.draw(P, self.rng.random())]

    def residual(self) -> Sequence[float]:
        return [max(p - q, 0.0) for p, q in zip(P, Q, strict=True)]

    def end(self, out: list[int], sampling: SamplingParams) -> list[int]:
        stops = [n for n, token in enumerate(out) if token in sampling.stop_token_ids]
        return out[: min([sampling.max_tokens, *(n + 1 for n in stops)])]

    @staticmethod
    def draw(weights: Sequence[float], uniform: float) -> int:
        left = uniform * sum(weights)
        for token, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return token
        return max(token for token, weight in enumerate(weights) if weight > 0)


class GateOnOwnProbability(Engine):
    """Verifies drafts while the drafter found the very token likely."""

    def plan(self, draft: list[int]) -> int:
        likely = [Q[token] > 0.35 for token in draft]
        return 0 if not likely[0] else 1 + likely[1]


class GlobalSearch(Engine):
    """Appendix A: whether anything is verified depends on a confidence that depends on the first draft."""

    def plan(self, draft: list[int]) -> int:
        return 2 if draft[0] == 0 else 0


class SharedNoise(Engine):
    """Draws the replacement from the number that the first draft was drawn from."""

    def __call__(self, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> list[int]:
        self.rng = random.Random(seed)
        out: list[int] = []
        while len(out) < sampling.max_tokens:
            self.number = self.rng.random()
            out += self.verify([self.draw(Q, self.number)])
        return self.end(out, sampling)

    def verify(self, draft: list[int]) -> list[int]:
        if self.rng.random() * Q[draft[0]] >= P[draft[0]]:
            return [self.draw((0.5, 0.3, 0.2), self.number)]
        return [*draft, self.draw(P, self.rng.random())]


class Unclamped(Engine):
    """A residual of |p - q|."""

    def residual(self) -> Sequence[float]:
        return [abs(p - q) for p, q in zip(P, Q, strict=True)]


class BonusAfterTruncation(Engine):
    """Leaves out the draft that would be rejected, and draws a bonus after those before it."""

    def residual(self) -> Sequence[float]:
        return P


class OneNumberTwice(Engine):
    """Plain sampling that draws tokens in pairs from one number: each is right, the two together are not."""

    def __call__(self, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> list[int]:
        rng = random.Random(seed)
        numbers = [rng.random() for _ in range(sampling.max_tokens)]
        return [self.draw(P, numbers[n // 2]) for n in range(sampling.max_tokens)]
