"""Logits processors in the decoder: what speculative decoding emits is what plain decoding emits under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dspark.processing
from dspark.cli.lossless import replay_logits
from dspark.decode import Completion, Decoder, SamplingParams
from dspark.ops import process_logits
from tests.decode.pairs import golden_drafter, golden_target
from tests.decode.test_lossless import POLICIES
from tests.tolerances import LOGITS

VOCAB = 320
PROMPTS = [[5, 17, 200], [9], list(range(40, 75))]


def parity(tokens: Sequence[int]) -> list[int]:
    """A grammar with a state: after an even token comes a multiple of 3, after an odd one an id below 200."""
    return list(range(0, VOCAB, 3)) if tokens[-1] % 2 == 0 else list(range(200))


def counting(tokens: Sequence[int]) -> list[int]:
    """A grammar of the length: which third of the vocabulary, by how many tokens there are."""
    return [token for token in range(VOCAB) if token % 3 == len(tokens) % 3]


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_new_tokens": 5,
    "banned_tokens": (3, 12, 150),
    "stop_token_ids": tuple(range(0, VOCAB, 9)),
}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.5},
    "discount": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.5},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bans": {"banned_tokens": tuple(range(0, VOCAB, 2))},
    "minimum": {"min_new_tokens": 6, "stop_token_ids": tuple(range(100, VOCAB))},
    "grammar": {"allowed_tokens": parity},
    "all": {**EVERYTHING, "allowed_tokens": counting},
}


def plain(prompt: list[int], params: SamplingParams) -> Completion:
    return Decoder(golden_target()).generate([prompt], params)[0]


def speculative(policy: str = "all", rule: Any = "coupled", draft_len: int = 7, **options: Any) -> Decoder:
    drafter = golden_drafter("vanilla")
    return Decoder(golden_target(), drafter, POLICIES[policy](draft_len), rule, draft_len=draft_len, **options)


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        st.sampled_from(sorted(ASKED)),
        st.sampled_from([0.0, 1.0]),
        st.integers(6, 16),
    ),
    min_size=1,
    max_size=3,
)


@given(
    requests=requests,
    policy=st.sampled_from(sorted(POLICIES)),
    rule=st.sampled_from(["coupled", "match"]),
    draft_len=st.integers(1, 7),
    max_batch=st.integers(1, 4),
)
def test_p14_output_equals_plain_decoding_in_any_company(
    requests: list[tuple[list[int], str, float, int]], policy: str, rule: Any, draft_len: int, max_batch: int
) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=length, **ASKED[asked])
        for i, (_, asked, temperature, length) in enumerate(requests)
    ]
    decoder = speculative(policy, rule, draft_len, max_batch=max_batch)
    completions = decoder.generate([prompt for prompt, *_ in requests], params)
    for (prompt, *_), each, completion in zip(requests, params, completions, strict=True):
        expected = Decoder(golden_target(), rule=rule).generate([prompt], each)[0]
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == expected.finish_reason
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(expected.logprobs), atol=LOGITS, rtol=0
        )


@pytest.mark.parametrize("asked", ["penalties", "all"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_p14_every_policy_with_every_processor(policy: str, temperature: float, asked: str) -> None:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=32, **ASKED[asked]) for i in range(3)]
    for prompt, each, completion in zip(PROMPTS, params, speculative(policy).generate(PROMPTS, params), strict=True):
        expected = plain(prompt, each)
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == expected.finish_reason


@pytest.mark.parametrize("asked", sorted(set(ASKED) - {"nothing"}))
def test_each_processor_changes_the_text(asked: str) -> None:
    """Otherwise the tests above would show nothing."""
    without = [plain(prompt, SamplingParams(temperature=0, max_tokens=32)).token_ids for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=32, **ASKED[asked])
    outputs = speculative().generate(PROMPTS, params)
    assert any(c.token_ids != w[: len(c.token_ids)] for c, w in zip(outputs, without, strict=True))
    if asked not in ("grammar", "all"):
        assert sum(r.accepted for c in outputs for r in c.rounds) > 0


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("asked", sorted(ASKED))
def test_p19_greedy_rules_of_q_equal_plain_decoding(asked: str, rule: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, **ASKED[asked])
    for prompt, completion in zip(PROMPTS, speculative(rule=rule).generate(PROMPTS, params), strict=True):
        assert completion.token_ids == plain(prompt, params).token_ids


@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), min_size=1, max_size=3),
    policy=st.sampled_from(sorted(POLICIES)),
    temperature=st.sampled_from([0.0, 1.0]),
    stops=st.sampled_from([(), tuple(range(0, VOCAB, 5))]),
)
def test_p14_a_grammar_sees_the_prefixes_of_plain_decoding(
    prompts: list[list[int]], policy: str, temperature: float, stops: tuple[int, ...]
) -> None:
    """Every prefix that leads to an emitted token is shown, and none that plain decoding could never reach."""
    seen: dict[int, set[tuple[int, ...]]] = {i: set() for i in range(len(prompts))}

    def watched(i: int) -> SamplingParams:
        def allowed(tokens: Sequence[int]) -> list[int]:
            seen[i].add(tuple(tokens))
            return parity(tokens)

        return SamplingParams(
            temperature=temperature, seed=i, max_tokens=16, stop_token_ids=stops, allowed_tokens=allowed
        )

    completions = speculative(policy).generate(prompts, [watched(i) for i in range(len(prompts))])
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        output = completion.token_ids
        assert {(*prompt, *output[:n]) for n in range(len(output))} <= seen[i]
        for prefix in seen[i]:
            assert list(prefix[: len(prompt)]) == prompt
            assert len(prefix) < len(prompt) + 16
            for n in range(len(prompt), len(prefix)):
                assert prefix[n] in parity(prefix[:n])
                assert prefix[n] not in stops


@pytest.mark.parametrize("policy", ["fixed 0", "all", "erratic"])
@pytest.mark.parametrize("minimum", [1, 2, 3, 7, 8, 9, 20])
def test_p14_min_new_tokens_counts_tokens_not_rounds(minimum: int, policy: str) -> None:
    """With every token a stop token but a few, text ends at the first chance after the minimum."""
    few = (11, 12, 13, 14)
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        min_new_tokens=minimum,
        stop_token_ids=tuple(t for t in range(VOCAB) if t not in few),
    )
    rounds = 0
    for prompt, completion in zip(PROMPTS, speculative(policy).generate(PROMPTS, params), strict=True):
        assert set(completion.token_ids[:minimum]) <= set(few)
        assert completion.token_ids == plain(prompt, params).token_ids
        rounds += len(completion.rounds)
        if completion.finish_reason == "stop":
            assert len(completion.token_ids) > minimum
    assert rounds > 0 or minimum == 1


@pytest.mark.parametrize("prompt", PROMPTS)
def test_p16_an_end_token_comes_after_the_minimum_and_no_earlier(prompt: list[int]) -> None:
    """At each block position: when that many tokens were asked for the text ends there, with one more it does not."""
    free = plain(prompt, SamplingParams(temperature=0, max_tokens=24)).token_ids
    accepted = 0
    for index, stop in enumerate(free):
        if stop in free[:index]:
            continue
        for minimum in (index, index + 1):
            params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(stop,), min_new_tokens=minimum)
            [completion] = speculative().generate([prompt], params)
            if minimum == index:
                assert completion.token_ids == free[: index + 1]
                assert completion.finish_reason == "stop"
            else:
                assert completion.token_ids[:index] == free[:index]
                assert completion.token_ids[index] != stop
            accepted += sum(r.accepted for r in completion.rounds)
    assert accepted > 0, "one token a round; the test would show nothing"


def test_p18_a_grammar_mask_over_ragged_lengths() -> None:
    """Requests of different verify lengths, each with a grammar of its own and one with none."""

    def multiples_of(n: int) -> SamplingParams:
        return SamplingParams(
            temperature=1.0, seed=n, max_tokens=30, allowed_tokens=lambda tokens: range(n * (len(tokens) % 2), VOCAB, n)
        )

    params = [multiples_of(7), SamplingParams(temperature=1.0, seed=1, max_tokens=30), multiples_of(4)]
    decoder = speculative("erratic")
    completions = decoder.generate(PROMPTS, params)
    for n, completion in ((7, completions[0]), (4, completions[2])):
        assert all(token % n == 0 for token in completion.token_ids)
    for prompt, each, completion in zip(PROMPTS, params, completions, strict=True):
        assert completion.token_ids == plain(prompt, each).token_ids
    assert len({r.verified for c in completions for r in c.rounds}) > 2, "the lengths were never ragged"


def test_banned_tokens_are_never_emitted() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=40, banned_tokens=tuple(range(0, VOCAB - 20)))
    for completion in speculative().generate(PROMPTS, params):
        assert min(completion.token_ids) >= VOCAB - 20


def test_p05_a_grammar_that_allows_nothing_ends_its_request_alone() -> None:
    def three_tokens(tokens: Sequence[int]) -> list[int]:
        return parity(tokens) if len(tokens) < len(PROMPTS[0]) + 3 else []

    params = [
        SamplingParams(temperature=0, max_tokens=24, allowed_tokens=three_tokens),
        SamplingParams(temperature=0, max_tokens=24),
    ]
    first, second = speculative().generate(PROMPTS[:2], params)
    assert first.finish_reason == "error"
    assert len(first.token_ids) == 3
    assert second.token_ids == plain(PROMPTS[1], params[1]).token_ids


def test_p15_logprobs_are_the_targets_own() -> None:
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=24, **ASKED["all"]) for i in range(3)]
    for prompt, completion in zip(PROMPTS, speculative().generate(PROMPTS, params), strict=True):
        logits = replay_logits(golden_target(), prompt, completion.token_ids)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=LOGITS, rtol=0)


def test_nothing_is_processed_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return process_logits(*args, **kwargs)

    monkeypatch.setattr(dspark.processing, "process_logits", watched)
    speculative().generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(1,)))
    assert not calls
    speculative().generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, banned_tokens=(1,)))
    assert calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty: out of range, got 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: out of range"),
        ({"presence_penalty": 2.5}, "presence_penalty: out of range, got 2.5"),
        ({"frequency_penalty": -3.0}, "frequency_penalty: out of range"),
        ({"min_new_tokens": -1}, "min_new_tokens: out of range, got -1"),
        ({"min_new_tokens": 9, "max_tokens": 8}, "min_new_tokens: expected at most max_tokens = 8, got 9"),
        ({"banned_tokens": (4, -1)}, r"banned_tokens: out of range, got \(4, -1\)"),
    ],
)
def test_parameters_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=f"banned_tokens: expected token ids from 0 to {VOCAB - 1}, got {VOCAB}"):
        speculative().add_request([5], SamplingParams(banned_tokens=(VOCAB,)))
    with pytest.raises(TypeError, match="allowed_tokens: expected a function or None, got list"):
        SamplingParams(allowed_tokens=[1, 2])  # type: ignore[arg-type]
    running = speculative()
    running.add_request([5], SamplingParams(allowed_tokens=lambda tokens: [3, VOCAB]))
    with pytest.raises(ValueError, match=f"allowed_tokens: expected token ids from 0 to {VOCAB - 1}, got {VOCAB}"):
        running.step()
