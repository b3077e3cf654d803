"""Traces with known properties: acceptance by token and distance, and confidences, calibrated or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.policy.traces import Trace


@dataclass(frozen=True)
class Domain:
    """How well a kind of text is drafted.

    Attributes:
        name: of the domain in the trace.
        acceptance: mean chance of a draft at each position, given its predecessors; the last holds for later ones.
        concentration: a + b of the Beta law of that chance. Small: chances near 0 or 1, known to the confidences.
        persistence: correlation between the difficulty of one token and the next, from 0 up to but excluding 1.

    Raises:
        ValueError: a value is outside its range.
    """

    name: str
    acceptance: tuple[float, ...]
    concentration: float = 2.5
    persistence: float = 0.3

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 < a < 1 for a in self.acceptance):
            raise ValueError(f"acceptance: expected chances between 0 and 1, got {self.acceptance}")
        if not 0 < self.concentration < float("inf"):
            raise ValueError(f"concentration: expected a positive finite number, got {self.concentration}")
        if not 0 <= self.persistence < 1:
            raise ValueError(f"persistence: expected 0 <= persistence < 1, got {self.persistence}")


DOMAINS = (
    Domain("math", (0.95, 0.945, 0.94, 0.935, 0.93, 0.925, 0.92)),
    Domain("code", (0.93, 0.92, 0.915, 0.91, 0.905, 0.90, 0.895)),
    Domain("chat", (0.83, 0.815, 0.80, 0.79, 0.78, 0.77, 0.76)),
)
"""Three kinds of text, after the shape of the paper's figures 2 and 5."""


def synthetic_trace(
    domains: Sequence[Domain] = DOMAINS,
    *,
    requests: int = 32,
    tokens: int = 512,
    draft_len: int = 7,
    temperature: float = 1.0,
    seed: int = 0,
) -> Trace:
    """A dense trace: one row at each position of each request.

    A token has a difficulty, which drifts along the text, and one uniform number. Drafted at slot k, it has a chance of
    acceptance that is the difficulty's quantile of a Beta law with the mean of slot k, and it is accepted if its
    uniform number lies below. So rows that begin at different positions agree about the tokens that they share, a token
    that is accepted far from the anchor is accepted nearer to it where ``acceptance`` falls, and the chances, which are
    the confidences, are calibrated exactly, as are their running products.

    Acceptance given the predecessors comes out a little above ``acceptance``, since easy tokens follow easy ones.

    Args:
        domains: what kinds of text.
        requests: per domain.
        tokens: positions per request.
        draft_len: G.
        temperature: of the confidences' logits; 1 is calibrated, less is over-confident, more is under-confident.
        seed: of all draws.

    Raises:
        ValueError: a count is not positive, or ``temperature`` is not.

    >>> trace = synthetic_trace(requests=4, tokens=100)
    >>> len(trace), trace.domains
    (1200, ('math', 'code', 'chat'))
    """
    sizes = {"requests": requests, "tokens": tokens, "draft_len": draft_len, "domains": len(domains)}
    for name, count in sizes.items():
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected a positive finite number, got {temperature}")
    rng = np.random.default_rng(seed)
    token = np.arange(tokens)[:, None] + np.arange(draft_len)  # [tokens, G], which token each slot drafts
    accepted, confidence = [], []
    for domain in domains:
        difficulty = _drifting_quantiles(rng, requests, tokens + draft_len, domain.persistence)
        uniform = rng.random((requests, tokens + draft_len))
        chance = np.empty((requests, tokens, draft_len))
        for slot in range(draft_len):
            mean = domain.acceptance[min(slot, len(domain.acceptance) - 1)]
            chance[:, :, slot] = _beta_quantile(difficulty[:, token[:, slot]], mean, domain.concentration)
        passed = uniform[:, token] < chance
        accepted.append(np.cumprod(passed, axis=-1).sum(-1).reshape(-1))
        confidence.append(_tempered(chance, temperature).reshape(-1, draft_len))
    each = len(domains) * requests
    place = np.tile(np.arange(tokens), each)
    return Trace(
        domains=tuple(domain.name for domain in domains),
        request=np.repeat(np.arange(each), tokens),
        round=place,
        position=place + 1,  # the prompt gives the first token
        context=place,
        domain=np.repeat(np.arange(len(domains)), requests * tokens),
        accepted=np.concatenate(accepted).astype(np.int64),
        draft_len=draft_len,
        confidence=np.concatenate(confidence).astype(np.float32),
    )


def _drifting_quantiles(
    rng: np.random.Generator, requests: int, tokens: int, persistence: float
) -> NDArray[np.float64]:
    """``[requests, tokens]`` uniform numbers whose normal scores follow a first-order autoregression."""
    noise = rng.standard_normal((requests, tokens))
    score = np.empty_like(noise)
    score[:, 0] = noise[:, 0]
    for t in range(1, tokens):
        score[:, t] = persistence * score[:, t - 1] + np.sqrt(1 - persistence**2) * noise[:, t]
    quantiles: NDArray[np.float64] = torch.special.ndtr(torch.from_numpy(score)).numpy()
    return quantiles


def _beta_quantile(quantile: NDArray[np.float64], mean: float, concentration: float) -> NDArray[np.float64]:
    """The Beta law's quantile function, by its integral on a grid of logits, where it has no singularity."""
    a, b = mean * concentration, (1 - mean) * concentration
    logit = np.linspace(-30, 30, 6001) / min(1.0, a, b)
    log_density = -a * np.logaddexp(0, -logit) - b * np.logaddexp(0, logit)
    mass = np.exp(log_density - log_density.max()).cumsum()
    return _sigmoid(np.interp(quantile, mass / mass[-1], logit))


def _tempered(chance: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    if temperature == 1:
        return chance
    inside = chance.clip(1e-12, 1 - 1e-12)
    return _sigmoid(np.log(inside / (1 - inside)) / temperature)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-np.logaddexp(0, -x))
