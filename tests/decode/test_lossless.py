"""The decoder's output is plain decoding's: token for token, or in law, as the rule promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.decode import Decoder, SamplingParams
from dspark.ops.types import Rule
from dspark.policy import ConfidenceScheduled, FixedK, Oracle, Outcome, Signals, VerifyPolicy
from tests.decode.pairs import CROWDED, GOLDEN_DRAFTERS, STEEP, golden_drafter, golden_target, narrow_pair
from tests.decode.plain import REQUESTS, assert_plain_law, plain
from tests.tolerances import LOGITS


class Erratic:
    """Any lengths at all: what the coupled rule must withstand."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def plan(self, signals: Signals) -> torch.Tensor:
        draws = torch.rand(signals.max_lengths.shape, generator=self._generator)
        return (draws * (signals.max_lengths + 1)).long()

    def observe(self, outcome: Outcome) -> None:
        pass


POLICIES: dict[str, Callable[[int], VerifyPolicy]] = {
    "fixed 0": lambda draft_len: FixedK(0),
    "fixed 2": lambda draft_len: FixedK(min(2, draft_len)),
    "all": lambda draft_len: FixedK(draft_len),
    "scheduled": lambda draft_len: ConfidenceScheduled(STEEP),
    "scheduled, lag 2": lambda draft_len: ConfidenceScheduled(STEEP, lag=2),
    "erratic": lambda draft_len: Erratic(),
}


@given(
    requests=REQUESTS,
    kind=st.sampled_from(GOLDEN_DRAFTERS),
    policy=st.sampled_from(sorted(POLICIES)),
    draft_len=st.integers(1, 7),
    page_size=st.sampled_from([1, 4, 16]),
    max_batch=st.integers(1, 4),
    rule=st.sampled_from(["coupled", "match"]),
)
def test_p20_output_equals_plain_decoding_where_it_depends_on_the_seed_alone(
    requests: list[tuple[list[int], SamplingParams]],
    kind: str,
    policy: str,
    draft_len: int,
    page_size: int,
    max_batch: int,
    rule: Rule,
) -> None:
    if kind == "dflash" and policy.startswith("scheduled"):
        policy = "erratic"  # no confidence head
    decoder = Decoder(
        golden_target(),
        golden_drafter(kind),
        POLICIES[policy](draft_len),
        rule,
        draft_len=draft_len,
        page_size=page_size,
        num_pages=400 // page_size,
        max_batch=max_batch,
    )
    completions = decoder.generate([p for p, _ in requests], [s for _, s in requests])
    for (prompt, params), completion in zip(requests, completions, strict=True):
        expected = plain(golden_target(), prompt, params, rule)
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == expected.finish_reason == "length"
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(expected.logprobs), atol=LOGITS, rtol=0
        )


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block", "match"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_p19_greedy_output_equals_plain_decoding(rule: Any, policy: str, kind: str) -> None:
    prompts = [[5, 17, 200], [9], list(range(40, 75))]
    params = SamplingParams(temperature=0, max_tokens=32)
    decoder = Decoder(golden_target(), golden_drafter(kind), POLICIES[policy](7), rule)
    for prompt, completion in zip(prompts, decoder.generate(prompts, params), strict=True):
        assert completion.token_ids == plain(golden_target(), prompt, params).token_ids


@pytest.mark.parametrize("rule", ["coupled", "ratio", "match"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_oracle_replays_the_recorded_pass(rule: Any, temperature: float) -> None:
    prompts = [[5, 17, 200], [9], list(range(40, 75))]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=32) for i in range(3)]
    full = Decoder(golden_target(), golden_drafter("vanilla"), rule=rule).generate(prompts, params)
    oracle = Oracle({c.request_id: [r.accepted for r in c.rounds] for c in full})
    replay = Decoder(golden_target(), golden_drafter("vanilla"), oracle, rule).generate(prompts, params)
    for first, second in zip(full, replay, strict=True):
        assert first.token_ids == second.token_ids
        assert [r.accepted for r in first.rounds] == [r.accepted for r in second.rounds]
        assert all(
            b.verified == min(a.accepted + 1, a.verified) for a, b in zip(first.rounds, second.rounds, strict=True)
        )
    verified = [sum(r.verified for c in run for r in c.rounds) for run in (full, replay)]
    assert verified[1] < verified[0]


@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        ("ratio", FixedK(3)),
        ("ratio", ConfidenceScheduled(CROWDED)),
        ("ratio", ConfidenceScheduled(CROWDED, lag=2)),
        ("block", FixedK(3)),
        ("block", ConfidenceScheduled(CROWDED, lag=2)),
    ],
    ids=["ratio, all", "ratio, scheduled", "ratio, scheduled, lag 2", "block, all", "block, scheduled, lag 2"],
)
def test_output_has_the_plain_law(rule: Rule, policy: VerifyPolicy) -> None:
    """Chi-square of four tokens, 256 outcomes, over 16,000 seeds; a bias of a few per cent in one token fails it."""
    target, drafter = narrow_pair(4)
    decoder = Decoder(target, drafter, policy, rule, num_pages=500, page_size=16, max_batch=500)
    completions = assert_plain_law(decoder, seeds=16_000)
    verified = [r.verified for c in completions for r in c.rounds]
    assert len(set(verified)) > 1, "the policy never chose; the test would show nothing"
