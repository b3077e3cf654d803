"""What a caller hands to the decoder and gets back: parameters, rounds, outputs, completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        repetition_penalty: scores of tokens in the prompt or the output are divided by this when positive, multiplied
            when negative; 1 is off.
        presence_penalty: taken from the score of each token in the output, from -2 to 2; 0 is off.
        frequency_penalty: taken from a token's score as often as the output has it, from -2 to 2; 0 is off.
        min_new_tokens: a stop token is impossible before this many tokens are emitted, so it comes after them at the
            earliest.
        banned_tokens: ids that are never emitted.
        allowed_tokens: for a grammar: the ids that may come next, as a pure function of all tokens so far, the prompt
            included (``prefix_allowed_tokens_fn`` of transformers without the batch index). It is called once per
            verified token, and never on a prefix that breaks its own earlier answers or holds a stop token. Where it
            allows nothing, the request ends with ``"error"``.

    The processors from ``repetition_penalty`` on change the scores before temperature and truncation do, see
    :func:`dspark.ops.process_logits`.

    Raises:
        TypeError: ``allowed_tokens`` cannot be called.
        ValueError: a value is outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    banned_tokens: tuple[int, ...] = ()
    allowed_tokens: Callable[[Sequence[int]], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        ranges = {
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "seed": self.seed is None or -(2**63) <= self.seed < 2**63,
            "max_tokens": self.max_tokens >= 1,
            "repetition_penalty": 0 < self.repetition_penalty < float("inf"),
            "presence_penalty": -2 <= self.presence_penalty <= 2,
            "frequency_penalty": -2 <= self.frequency_penalty <= 2,
            "min_new_tokens": self.min_new_tokens >= 0,
            "banned_tokens": min(self.banned_tokens, default=0) >= 0,
        }
        for name, within in ranges.items():
            if not within:
                raise ValueError(f"{name}: out of range, got {getattr(self, name)!r}")
        if self.min_new_tokens > self.max_tokens:
            raise ValueError(
                f"min_new_tokens: expected at most max_tokens = {self.max_tokens}, got {self.min_new_tokens}"
            )
        if self.allowed_tokens is not None and not callable(self.allowed_tokens):
            raise TypeError(f"allowed_tokens: expected a function or None, got {type(self.allowed_tokens).__name__}")

    @property
    def processes(self) -> bool:
        """Whether any logits processor is on."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_new_tokens > 0
            or bool(self.banned_tokens)
            or self.allowed_tokens is not None
        )


@dataclass(frozen=True)
class Round:
    """One round of one request: drafts proposed, drafts verified, drafts accepted, tokens emitted.

    ``emitted`` is ``accepted + 1`` except where a stop token, bad logits or the limit cut the round short (a path of a
    tree may be longer than what is left to emit).
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
    """A request as the decoder keeps it.

    Attributes:
        max_tokens: to emit; no more than the model's context allows.
        pages: its row of the block table.
        num_cached: tokens of the prompt that the caches held before it was admitted.
    """

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    completion: Completion
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0

    @classmethod
    def checked(
        cls, prompt: Sequence[int], params: SamplingParams, request_id: int, vocab_size: int, context_len: int
    ) -> Request:
        """A request that a model with this vocabulary and context can take.

        Raises:
            ValueError: an empty or too long prompt, or a token id outside the vocabulary.
        """
        if not prompt:
            raise ValueError("prompt: expected at least one token id, got none")
        for name, tokens in (("prompt", prompt), ("banned_tokens", params.banned_tokens)):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name}: expected token ids from 0 to {vocab_size - 1}, got {token}")
        if len(prompt) >= context_len:
            raise ValueError(
                f"prompt: expected fewer than {context_len} tokens (the model's context), got {len(prompt)}"
            )
        max_tokens = min(params.max_tokens, context_len - len(prompt))
        return cls(list(prompt), params, max_tokens, Completion(request_id))

    @property
    def seed(self) -> int:
        """The key of its random numbers."""
        return -1 - self.completion.request_id if self.params.seed is None else self.params.seed

    @property
    def context_len(self) -> int:
        """Tokens whose keys and values are in the cache once the prompt is: all but the last."""
        return len(self.prompt) + len(self.completion.token_ids) - 1

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        return self.max_tokens - len(self.completion.token_ids)

    def take(self, tokens: list[int], logprobs: list[float], ok: bool, proposed: int, verified: int | None) -> Output:
        """Add a round's tokens to the completion, cut at a stop token or the limit, and mark it if it has ended.

        Args:
            tokens, logprobs: what the round emitted.
            ok: False when it met bad logits after these tokens.
            proposed, verified: drafts of the round; ``verified`` None is a prefill, which is no round.
        """
        within = tokens[: self.remaining]
        stop = next((i for i, token in enumerate(within) if token in self.params.stop_token_ids), None)
        kept = within if stop is None else within[: stop + 1]
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
