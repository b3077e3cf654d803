"""Whether an engine, anybody's, emits what its target alone would have: token for token, or in law.

>>> chances = torch.tensor([[0.7, 0.3], [0.2, 0.8]])  # of the next token, by the last one
>>> def engine(prompt, sampling, seed):
...     generator, tokens = torch.Generator().manual_seed(seed), list(prompt)
...     for _ in range(sampling.max_tokens):
...         tokens.append(int(torch.multinomial(chances[tokens[-1]], 1, generator=generator)))
...     return tokens[len(prompt):]
>>> def target(tokens):
...     return chances[tokens[-1]]
>>> certificate = assert_lossless(
...     engine, target, [[0]], SamplingParams(max_tokens=3), gives="probabilities", samples=500
... )
>>> certificate.outputs, sorted(certificate.p_values), round(certificate.detectable, 2)
(500, ['first tokens', 'pairs', 'tokens'], 0.18)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dspark.ops.sample.reference import transform
from dspark.requests import SamplingParams, batch_sampling
from dspark.testing.statistics import (
    LEAST_EXPECTED,
    Tokens,
    chi_square_p_value,
    detectable_variation,
    joint_fit,
    probability_integral,
    uniformity_p_value,
)

Engine = Callable[[Sequence[int], SamplingParams, int], Sequence[int]]
"""(prompt, sampling parameters, seed) -> the tokens emitted after the prompt."""

NextToken = Callable[[Sequence[int]], "Tensor | Sequence[float]"]
"""All tokens so far, the prompt included -> logits or probabilities ``[V]`` of the next one."""

Gives = Literal["logits", "probabilities"]

_TESTS = 3
_LEAST_BINS = 4
_ROWS = 256  # of a wide vocabulary, compared at a time


@dataclass(frozen=True)
class Certificate:
    """What a check that passed has looked at.

    Attributes:
        outputs, tokens: how many.
        near_ties: at temperature 0: tokens that were not the best, but within rounding of it.
        p_values: at other temperatures, by test; the smallest is above its share of the false-alarm rate. A test is
            missing where there were too few tokens, or where all is certain.
        detectable: total variation, of the law of an output's first tokens, that the test of these misses with a chance
            of 1 %, wherever it lies; None at temperature 0, or where that test is missing.
    """

    outputs: int
    tokens: int
    near_ties: int
    p_values: Mapping[str, float]
    detectable: float | None


def assert_lossless(
    engine: Engine,
    next_token: NextToken,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    gives: Gives = "logits",
    samples: int = 4000,
    first: int = 3,
    false_alarm: float = 1e-4,
    near_tie: float = 1e-4,
) -> Certificate:
    """Run an engine and judge what it emits by its target; see :func:`assert_lossless_outputs` for the tests.

    Args:
        engine: is called with the seeds 0, 1, ..., each once. A faulty one may do as it likes.
        next_token: the target.
        prompts: at temperature 0 each is decoded once, otherwise all equally often.
        sampling: with a small ``max_tokens``; no logits processors, unless ``next_token`` gives probabilities.
        samples: outputs at other temperatures than 0, over all prompts.
        gives, first, false_alarm, near_tie: as of :func:`assert_lossless_outputs`.

    Raises:
        AssertionError: the engine is not lossless; or it is, with a chance of at most ``false_alarm``.
        ValueError: an argument is out of range.
    """
    if not prompts or samples < len(prompts):
        raise ValueError(f"prompts, samples: expected one or more of each, got {len(prompts)} and {samples}")
    rounds = 1 if sampling.temperature == 0 else samples // len(prompts)
    asked = [tuple(prompt) for _ in range(rounds) for prompt in prompts]
    outputs = [engine(prompt, sampling, seed) for seed, prompt in enumerate(asked)]
    return assert_lossless_outputs(
        asked, outputs, next_token, sampling, gives=gives, first=first, false_alarm=false_alarm, near_tie=near_tie
    )


def assert_lossless_outputs(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    next_token: NextToken,
    sampling: SamplingParams,
    *,
    gives: Gives = "logits",
    first: int = 3,
    false_alarm: float = 1e-4,
    near_tie: float = 1e-4,
) -> Certificate:
    """Judge outputs that an engine has given, in batches say, each drawn with a seed of its own.

    At any temperature an output ends with the first stop token or has ``max_tokens``, and each of its tokens is a
    possible one. At temperature 0 each token has the best score after those before it, or one within ``near_tie``.
    Otherwise three chi-square tests share the false-alarm rate: each token against its distribution (by its randomised
    probability integral), these integrals in pairs of neighbours, which are independent, and the first tokens of
    outputs of one prompt jointly.

    Args:
        prompts: of each output; the same one many times for the joint test.
        outputs: tokens emitted.
        next_token: the target. It is asked once for each sequence that came up, and for few more.
        sampling: what the outputs were asked for with.
        gives: whether ``next_token`` gives logits, to which temperature, top-k, top-p and min-p of ``sampling`` are
            applied, or the probabilities that remain after everything. An engine that rounds otherwise may keep another
            token on the edge of a top-p or min-p cut; then give its own probabilities.
        first: tokens of an output that are looked at jointly.
        false_alarm: chance that a lossless engine fails, over all tests.
        near_tie: at temperature 0, how far a token's logit may be from the best (or its log-probability).

    Raises:
        AssertionError: the outputs are not what the target alone would have emitted; the message says in what.
        ValueError: an argument is out of range, the target gives numbers that are no distribution, or there are too few
            outputs for any test.
    """
    if not outputs or len(prompts) != len(outputs):
        raise ValueError(f"prompts, outputs: expected as many of each, got {len(prompts)} and {len(outputs)}")
    if gives not in ("logits", "probabilities"):
        raise ValueError(f"gives: expected 'logits' or 'probabilities', got {gives!r}")
    if gives == "logits" and sampling.processes:
        raise ValueError("sampling: with logits processors, let next_token give the probabilities after them")
    if first < 1 or not 0 < false_alarm < 1:
        raise ValueError(f"first, false_alarm: expected at least 1 and in (0, 1), got {first} and {false_alarm}")
    target = _Target(next_token, sampling, gives)
    pairs = [(tuple(prompt), tuple(tokens)) for prompt, tokens in zip(prompts, outputs, strict=True)]
    for prompt, tokens in pairs:
        _check_end(prompt, tokens, sampling)
    count = sum(map(len, outputs))
    if sampling.temperature == 0:
        return Certificate(len(outputs), count, sum(_near_ties(*pair, target, near_tie) for pair in pairs), {}, None)
    p_values = _token_tests(_integrals(pairs, target))
    by_prompt: dict[Tokens, list[Tokens]] = {}
    for prompt, tokens in pairs:
        by_prompt.setdefault(prompt, []).append(tokens)
    length = min(first, sampling.max_tokens)
    fits = [
        joint_fit(own, partial(target.law_after, prompt), length, sampling.stop_token_ids)
        for prompt, own in by_prompt.items()
    ]
    detectable = None
    if degrees := sum(fit.degrees for fit in fits):
        p_values["first tokens"] = chi_square_p_value(sum(fit.statistic for fit in fits), degrees)
        detectable = detectable_variation(len(outputs), degrees, false_alarm / _TESTS)
    if not p_values:
        raise ValueError(f"outputs: {len(outputs)} with {count} tokens are too few for any test, or all is certain")
    name, p_value = min(p_values.items(), key=lambda item: item[1])
    if p_value < false_alarm / _TESTS:
        worst = max(fits, key=lambda fit: fit.statistic / max(fit.degrees, 1)).worst
        detail = f": {worst}" if name == "first tokens" else ""
        raise AssertionError(f"{name} do not follow the target (p = {p_value:.1e}, {len(outputs)} outputs){detail}")
    return Certificate(len(outputs), count, 0, p_values, detectable)


class _Target:
    """The target's distributions. Those that are kept are asked for once."""

    def __init__(self, next_token: NextToken, sampling: SamplingParams, gives: Gives) -> None:
        self._next_token, self._gives = next_token, gives
        self._sampling = batch_sampling([sampling], [0])
        self._kept: dict[Tokens, Tensor] = {}

    def scores(self, prefix: Tokens) -> Tensor:
        """``[V]`` float64: logits, or log-probabilities where that is what is given."""
        given = torch.as_tensor(self._next_token(prefix)).detach().cpu().double()
        if self._gives == "probabilities":
            if given.ndim != 1 or not bool((given >= 0).all()) or not abs(float(given.sum()) - 1) < 1e-3:
                raise ValueError(
                    f'next_token: expected probabilities "V" that sum to 1, got {given} after {list(prefix)}'
                )
            return given.log()
        if given.ndim != 1 or not bool(given.amax().isfinite()):
            raise ValueError(f'next_token: expected logits "V" without NaN, got {given} after {list(prefix)}')
        return given

    def law(self, prefix: Tokens, keep: bool = True) -> Tensor:
        """``[V]`` float64, the probabilities that are drawn from."""
        if prefix in self._kept:
            return self._kept[prefix]
        scores = self.scores(prefix)
        if self._gives == "logits":
            scores = transform(scores.float()[None], self._sampling)[0].double()
        law = scores.softmax(0)
        if keep:
            self._kept[prefix] = law
        return law

    def law_after(self, prompt: Tokens, tokens: Tokens) -> Tensor:
        return self.law(prompt + tokens)


def _check_end(prompt: Tokens, tokens: Tokens, sampling: SamplingParams) -> None:
    stops = [n for n, token in enumerate(tokens) if token in sampling.stop_token_ids]
    if len(tokens) != (stops[0] + 1 if stops else sampling.max_tokens):
        end = f"with its first stop token (place {stops[0]})" if stops else f"after {sampling.max_tokens} tokens"
        raise AssertionError(f"after {list(prompt)}: expected the output to end {end}, got {list(tokens)}")


def _check_inside(prefix: Tokens, tokens: Sequence[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise AssertionError(f"after {list(prefix)}: token {token} is outside the vocabulary of {vocab_size}")


def _near_ties(prompt: Tokens, tokens: Tokens, target: _Target, near_tie: float) -> int:
    ties = 0
    for n, token in enumerate(tokens):
        prefix = prompt + tokens[:n]
        scores = target.scores(prefix)
        _check_inside(prefix, [token], len(scores))
        best, gap = int(scores.argmax()), float(scores.amax() - scores[token])
        if gap > near_tie:
            raise AssertionError(
                f"after {list(prefix)}: expected token {best}, got {token}, whose score is {gap:.3g} lower"
            )
        ties += token != best
    return ties


def _token_tests(integrals: Tensor) -> dict[str, float]:
    """P-values of the tests of tokens one by one and in pairs, where there are enough of them."""
    p_values = {}
    bins = min(20, len(integrals) // 10)
    if bins >= _LEAST_BINS:
        p_values["tokens"] = uniformity_p_value(integrals, bins)
    # Across the ends of outputs, too: a stop token is no chance event, and leaving it without a partner would be felt.
    pairs = integrals[: len(integrals) // 2 * 2].view(-1, 2)
    side = min(5, int((len(pairs) / 10) ** 0.5))
    if side > 1:
        cell = (pairs * side).long().clamp(max=side - 1)
        p_values["pairs"] = uniformity_p_value((cell[:, 0] * side + cell[:, 1] + 0.5) / side**2, side**2)
    return p_values


def _integrals(pairs: Sequence[tuple[Tokens, Tokens]], target: _Target) -> Tensor:
    """Probability integrals of all tokens in order, uniform and independent if they follow the target.

    Tokens go prefix by prefix, and only laws that the joint test will want are kept: a wide vocabulary's are large.
    """
    places: dict[Tokens, list[int]] = {}
    for place, prefix in enumerate(prompt + own[:n] for prompt, own in pairs for n in range(len(own))):
        places.setdefault(prefix, []).append(place)
    drawn = torch.tensor([token for _, own in pairs for token in own])
    uniforms = torch.rand(len(drawn), generator=torch.Generator().manual_seed(0))
    integrals = torch.empty(len(drawn), dtype=torch.float64)
    for prefix, where in places.items():
        law = target.law(prefix, keep=len(where) >= LEAST_EXPECTED)
        _check_inside(prefix, drawn[where].tolist(), len(law))
        for i in range(0, len(where), _ROWS):
            some = where[i : i + _ROWS]
            tokens = drawn[some]
            if bool((law[tokens] == 0).any()):
                token = int(tokens[law[tokens] == 0][0])
                raise AssertionError(f"after {list(prefix)}: token {token} has probability 0")
            integrals[some] = probability_integral(law.expand(len(some), -1), tokens, uniforms[some])
    return integrals
