"""Prompts that begin alike: what the caches hold of them is not computed again, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.decode import Decoder, SamplingParams, TreeShape
from dspark.models import DSparkDrafter, Target
from tests.decode.pairs import golden_drafter, golden_target

SYSTEM = list(range(40, 75))


class Counted:
    """A target that counts the rows that it runs."""

    def __init__(self, target: Target) -> None:
        self._target, self.rows = target, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, token_ids: torch.Tensor, *arguments: Any) -> Any:
        self.rows += len(token_ids)
        return self._target.forward(token_ids, *arguments)


def decoder(target: Any, drafter: DSparkDrafter | None = None, **options: Any) -> Decoder:
    return Decoder(target, drafter, page_size=8, num_pages=64, **options)


@pytest.mark.parametrize("tree", [None, TreeShape(9)])
def test_p09_a_known_prefix_is_not_run_again_and_drafts_stay_good(tree: TreeShape | None) -> None:
    """The drafter's context is found with the target's: the rounds are those of a decoder that knows nothing."""
    prompts = [[*SYSTEM, 7, 9], [*SYSTEM, 200], SYSTEM[:20]]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=24) for i, t in enumerate((0.0, 0.8, 0.0))]
    drafter = golden_drafter("vanilla")
    apart = [
        decoder(golden_target(), drafter, tree=tree).generate([p], s)[0] for p, s in zip(prompts, params, strict=True)
    ]
    target = Counted(golden_target())
    shared = decoder(target, drafter, tree=tree)
    for prompt, sampling, expected in zip(prompts, params, apart, strict=True):
        target.rows = 0
        [completion] = shared.generate([prompt], sampling)
        verified = sum(1 + r.verified for r in completion.rounds)
        known = 0 if prompt is prompts[0] else (len(prompt) - 1) // 8 * 8
        if prompt is prompts[1]:
            known = len(SYSTEM) // 8 * 8
        assert target.rows == len(prompt) - known + verified
        assert completion.token_ids == expected.token_ids
        assert [r.accepted for r in completion.rounds] == [r.accepted for r in expected.rounds]
    assert shared.free_pages == 64


def test_the_output_of_an_earlier_request_is_a_prefix_too() -> None:
    target = Counted(golden_target())
    shared = decoder(target, golden_drafter("vanilla"))
    [first] = shared.generate([SYSTEM], SamplingParams(temperature=0, max_tokens=30))
    target.rows = 0
    [second] = shared.generate([SYSTEM + first.token_ids[:20]], SamplingParams(temperature=0, max_tokens=10))
    assert second.token_ids == first.token_ids[20:30]
    assert target.rows == len(SYSTEM) + 20 - (len(SYSTEM) + 19) // 8 * 8 + sum(1 + r.verified for r in second.rounds)


def test_it_can_be_turned_off() -> None:
    target = Counted(golden_target())
    alone = decoder(target, prefix_caching=False)
    for _ in range(2):
        target.rows = 0
        alone.generate([SYSTEM], SamplingParams(temperature=0, max_tokens=1))
        assert target.rows == len(SYSTEM)
