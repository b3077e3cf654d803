"""What a caller hands to the decoder and gets back: parameters, rounds, outputs, completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dspark.ops.types import Sampling

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of tokens with at least this probability; 1 is off.
        min_p: keep tokens with at least this fraction of the largest probability; 0 is off.
        seed: 64-bit key of the request's random numbers; None is a key of its own for each request of a decoder, the
            same in every run.
        max_tokens: most tokens to emit.
        stop_token_ids: emitting one of these ends the request; it is the last token of the output.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ranges = {
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "seed": self.seed is None or -(2**63) <= self.seed < 2**63,
            "max_tokens": self.max_tokens >= 1,
        }
        for name, within in ranges.items():
            if not within:
                raise ValueError(f"{name}: out of range, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Round:
    """One round of one request: drafts proposed, drafts verified, drafts accepted, tokens emitted.

    ``emitted`` is ``accepted + 1`` except where a stop token or bad logits cut the round short.
    """

    proposed: int
    verified: int
    accepted: int
    emitted: int


def mean_emitted(rounds: Sequence[Round]) -> float:
    """τ, the mean of tokens emitted per round, the bonus included; NaN without rounds.

    >>> mean_emitted([Round(3, 3, 2, 3), Round(3, 3, 0, 1)])
    2.0
    """
    return sum(r.emitted for r in rounds) / len(rounds) if rounds else float("nan")


@dataclass(frozen=True)
class Output:
    """What a step gave one request: new tokens and, when it ended, why."""

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass
class Completion:
    """A request's result so far.

    The first token comes from the prompt's own forward pass; every later one from a round, so
    ``len(token_ids) == 1 + sum(r.emitted for r in rounds)``.

    Attributes:
        logprobs: log-probability of each token under the untransformed target distribution.
        finish_reason: ``"stop"``, ``"length"`` (``max_tokens`` or the model's context), ``"error"`` (the target gave
            NaN, +inf or nothing but -inf; the tokens before it stand), or None while the request runs.
    """

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class Request:
    """A request as the decoder keeps it."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    completion: Completion
    pages: list[int] = field(default_factory=list)

    @property
    def seed(self) -> int:
        """The key of its random numbers."""
        return -1 - self.completion.request_id if self.params.seed is None else self.params.seed

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        return self.max_tokens - len(self.completion.token_ids)

    def take(self, tokens: list[int], logprobs: list[float], ok: bool, proposed: int, verified: int | None) -> Output:
        """Add a round's tokens to the completion, cut at a stop token, and mark it if it has ended.

        Args:
            tokens, logprobs: what the round emitted.
            ok: False when it met bad logits after these tokens.
            proposed, verified: drafts of the round; ``verified`` None is a prefill, which is no round.
        """
        stop = next((i for i, token in enumerate(tokens) if token in self.params.stop_token_ids), None)
        kept = tokens if stop is None else tokens[: stop + 1]
        done = self.completion
        done.token_ids += kept
        done.logprobs += logprobs[: len(kept)]
        if verified is not None:
            done.rounds.append(Round(proposed, verified, accepted=len(tokens) - ok, emitted=len(kept)))
        if stop is not None:
            done.finish_reason = "stop"
        elif not ok:
            done.finish_reason = "error"
        elif self.remaining == 0:
            done.finish_reason = "length"
        return Output(done.request_id, kept, done.finish_reason)


def batch_sampling(
    params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str = "cpu"
) -> Sampling:
    """Collect parameters and seeds of requests into the tensors that ops take."""
    return Sampling(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        seed=torch.tensor(seeds, device=device),
        all_greedy=all(p.temperature == 0 for p in params),
        any_truncation=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
    )
