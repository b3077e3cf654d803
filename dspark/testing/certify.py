"""Certify a policy or a rule: both checks of causality and of exact laws, on requests that come with the package.

>>> from dspark.policy import ConfidenceThreshold
>>> certify_policy(ConfidenceThreshold(0.5))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dspark.testing.causality import PolicyOrFactory, assert_non_anticipating, fresh_policy
from dspark.testing.law import exact_law, plain_law, total_variation
from dspark.testing.rules import RatioToy, Tokens, ToyRequest, ToyRule, stepwise

_LEVELS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)


def toy_request(
    seed: int, *, vocab_size: int = 2, max_tokens: int = 3, confidence: bool = True, stop: frozenset[int] = frozenset()
) -> ToyRequest:
    """A request with random models of the last two tokens, and confidences that depend on these and are often tied.

    Args:
        seed: of everything.
        vocab_size: keep it at 4 or below, and ``max_tokens`` too, for :func:`~dspark.testing.exact_law`.
        max_tokens: tokens to emit.
        confidence: whether the drafter has a confidence head.
        stop: tokens that end it.

    >>> request = toy_request(0)
    >>> len(request.target(request.prompt)), request.confidence(request.prompt, (0, 1))
    (2, [0.0, 0.7])
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (vocab_size,) * 3
    target = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    drafter = target + torch.randn(shape, generator=generator, dtype=torch.float64)
    level = torch.randint(len(_LEVELS), shape[:2], generator=generator).tolist()
    return ToyRequest(
        target=_of_last_two(target.softmax(-1).tolist()),
        drafter=_of_last_two(drafter.softmax(-1).tolist()),
        max_tokens=max_tokens,
        confidence=stepwise(lambda tokens: _LEVELS[level[tokens[-2]][tokens[-1]]]) if confidence else None,
        prompt=(0, 1),
        stop=stop,
    )


def _of_last_two(table: Sequence[Sequence[Sequence[float]]]) -> Callable[[Tokens], Sequence[float]]:
    return lambda tokens: table[tokens[-2]][tokens[-1]]


def assert_exact_law(
    rule: ToyRule,
    policy: PolicyOrFactory,
    batches: Sequence[Sequence[ToyRequest]] | None = None,
    *,
    draft_len: int = 2,
    tolerance: float = 1e-9,
) -> None:
    """Check that batches of requests come out with the law of plain decoding.

    Args:
        rule: such as ``RatioToy()``.
        policy: one, or what makes a fresh one.
        batches: requests that run together; by default six of one :func:`toy_request` each, and one of two.
        draft_len: drafts per round.
        tolerance: total variation that float64 may leave.

    Raises:
        AssertionError: the laws differ; the message says by how much, and where most.
        ValueError: as :func:`~dspark.testing.exact_law`.
    """
    if batches is None:
        singles = [[toy_request(seed)] for seed in range(6)]
        batches = [*singles, [toy_request(6, max_tokens=2), toy_request(7)]]
    for number, batch in enumerate(batches):
        own = fresh_policy(policy)
        law, plain = exact_law(batch, rule, own, draft_len=draft_len), plain_law(batch)
        distance = total_variation(law, plain)
        if distance > tolerance:
            worst = max(law.keys() | plain.keys(), key=lambda key: abs(law.get(key, 0.0) - plain.get(key, 0.0)))
            raise AssertionError(
                f"{own}, batch {number}: total variation {distance:.3g} from plain decoding; {worst} has probability "
                f"{law.get(worst, 0.0):.4g} instead of {plain.get(worst, 0.0):.4g}"
            )


def certify_policy(policy: PolicyOrFactory, *, draft_len: int = 2) -> None:
    """Check that a policy does not anticipate, and that under the ``ratio`` rule it leaves the exact law as it is.

    The first check sees every policy that decides from later signals; the second one, over several rounds with all that
    the policy remembers, that this is enough, for requests alone and together. What neither can see is a policy that
    learns of the draws behind the signals' back; see :func:`~dspark.testing.assert_lossless` for whole engines.

    Args:
        policy: one, or what makes a fresh one. It has to allow ``copy.deepcopy``.
        draft_len: drafts per round of the exact laws, 3 at most unless you have time.

    Raises:
        AssertionError: it fails; the message says where.
    """
    assert_non_anticipating(policy)
    assert_exact_law(RatioToy(), policy, draft_len=draft_len)
