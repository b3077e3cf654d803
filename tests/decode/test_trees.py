"""Decoding with draft trees: the output is plain decoding's, and a round uses more of its drafts than of a chain's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decode import Decoder, SamplingParams, TreeShape, mean_emitted
from dspark.models import tiny_pair
from dspark.models.tiny import held_out_prompts, load_tokenizer
from dspark.ops.types import Rule
from dspark.policy import FixedK, Oracle
from tests.decode.pairs import GOLDEN_DRAFTERS, golden_drafter, golden_target, narrow_pair
from tests.decode.plain import REQUESTS, assert_plain_law, plain
from tests.tolerances import LOGITS


@settings(max_examples=12)
@given(
    requests=REQUESTS,
    kind=st.sampled_from(GOLDEN_DRAFTERS),
    shape=st.builds(TreeShape, nodes=st.sampled_from([1, 3, 7, 12, 70]), branching=st.integers(1, 4)),
    verified=st.sampled_from([0, 2, 70]),
    draft_len=st.integers(1, 7),
    page_size=st.sampled_from([1, 4, 16]),
    rule=st.sampled_from(["coupled", "match"]),
)
def test_p20_the_output_is_plain_decodings(
    requests: list[tuple[list[int], SamplingParams]],
    kind: str,
    shape: TreeShape,
    verified: int,
    draft_len: int,
    page_size: int,
    rule: Rule,
) -> None:
    decoder = Decoder(
        golden_target(),
        golden_drafter(kind),
        FixedK(min(verified, shape.nodes)),
        rule,
        draft_len=draft_len,
        tree=shape,
        page_size=page_size,
        num_pages=600 // page_size,
        max_batch=3,
    )
    completions = decoder.generate([p for p, _ in requests], [s for _, s in requests])
    for (prompt, params), completion in zip(requests, completions, strict=True):
        expected = plain(golden_target(), prompt, params, rule)
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == expected.finish_reason == "length"
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(expected.logprobs), atol=LOGITS, rtol=0
        )
    assert decoder.free_pages == 600 // page_size


@pytest.mark.parametrize("rule", ["coupled", "match", "recursive"])
def test_p19_greedy_output_equals_plain_decoding(rule: Any) -> None:
    prompts = [[5, 17, 200], [9], list(range(40, 75))]
    params = SamplingParams(temperature=0, max_tokens=32)
    decoder = Decoder(golden_target(), golden_drafter("vanilla"), rule=rule, tree=TreeShape(16))
    for prompt, completion in zip(prompts, decoder.generate(prompts, params), strict=True):
        assert completion.token_ids == plain(golden_target(), prompt, params).token_ids


@pytest.mark.parametrize("policy", [None, FixedK(4)], ids=["all", "4 of 9"])
def test_recursive_output_has_the_plain_law(policy: FixedK | None) -> None:
    target, drafter = narrow_pair(4)
    decoder = Decoder(
        target, drafter, policy, "recursive", tree=TreeShape(9, 3), num_pages=800, page_size=16, max_batch=500
    )
    completions = assert_plain_law(decoder, seeds=6_000)
    assert len({r.accepted for c in completions for r in c.rounds}) > 2, "too little was accepted to show anything"


def test_a_chain_shaped_tree_is_the_chain() -> None:
    prompts = [[5, 17, 200], list(range(40, 75))]
    params = [SamplingParams(temperature=t, seed=3 + i, max_tokens=24) for i, t in enumerate((0.8, 0.0))]
    for rule, like in (("coupled", "coupled"), ("recursive", "ratio")):
        runs = [
            Decoder(golden_target(), golden_drafter("vanilla"), rule=each, tree=shape).generate(prompts, params)  # type: ignore[arg-type]
            for each, shape in ((rule, TreeShape(7, 1)), (like, None))
        ]
        assert [c.token_ids for c in runs[0]] == [c.token_ids for c in runs[1]]
        assert [[r.emitted for r in c.rounds] for c in runs[0]] == [[r.emitted for r in c.rounds] for c in runs[1]]


def test_a_tree_accepts_more_than_a_chain_of_as_many_drafts() -> None:
    target, drafter = tiny_pair()
    tokenizer = load_tokenizer()
    prompts = [tokenizer.encode(p.text).ids for p in held_out_prompts()[:3]]
    params = SamplingParams(temperature=0, max_tokens=40)
    taus = [
        mean_emitted([r for c in Decoder(target, drafter, tree=shape).generate(prompts, params) for r in c.rounds])
        for shape in (None, TreeShape(7))
    ]
    assert taus[1] > taus[0]


def test_p16_a_round_ends_at_the_limit_and_at_the_stop_token() -> None:
    """A path may be longer than what is left to emit."""
    expected = plain(golden_target(), [5, 17, 200], SamplingParams(temperature=0, max_tokens=30)).token_ids
    for limit in range(1, 12):
        params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=(expected[8],))
        decoder = Decoder(golden_target(), golden_drafter("vanilla"), tree=TreeShape(12))
        [completion] = decoder.generate([[5, 17, 200]], params)
        assert completion.token_ids == expected[: min(limit, expected.index(expected[8]) + 1)]
        assert len(completion.token_ids) == 1 + sum(r.emitted for r in completion.rounds)


def test_what_trees_cannot_do_is_refused() -> None:
    target, drafter = golden_target(), golden_drafter("vanilla")
    with pytest.raises(ValueError, match="nodes: expected 1 to 255, got 0"):
        TreeShape(0)
    with pytest.raises(ValueError, match="branching: expected 1 to 16, got 17"):
        TreeShape(8, 17)
    with pytest.raises(ValueError, match="tree: needs a drafter, got None"):
        Decoder(target, tree=TreeShape(8))
    with pytest.raises(ValueError, match="tree: expected a rule of coupled, match, recursive, got 'ratio'"):
        Decoder(target, drafter, rule="ratio", tree=TreeShape(8))
    with pytest.raises(ValueError, match="policy: Oracle counts the drafts of a chain"):
        Decoder(target, drafter, Oracle({}), tree=TreeShape(8))
    with pytest.raises(ValueError, match="this decoder drafts trees"):
        Decoder(target, drafter, tree=TreeShape(8)).add_request([1], SamplingParams(presence_penalty=0.5))
