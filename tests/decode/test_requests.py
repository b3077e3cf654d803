"""Requests that join, leave, wait, stop, fail: the decoder's bookkeeping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dspark.decode
from dspark.cli.lossless import replay_logits
from dspark.decode import Decoder, SamplingParams
from dspark.measure import measure_cost
from dspark.models import Target
from dspark.policy import ConfidenceScheduled, FixedK, Oracle, Signals
from tests.decode.pairs import STEEP, golden_drafter, golden_target
from tests.tolerances import LOGITS

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = [[5, 17, 200], [9], list(range(40, 75))]


def decoder(**options: Any) -> Decoder:
    return Decoder(golden_target(), golden_drafter("vanilla"), **options)


@pytest.fixture(scope="module")
def plain_outputs() -> list[list[int]]:
    return [c.token_ids for c in Decoder(golden_target()).generate(PROMPTS, GREEDY)]


def test_a_completion_counts_every_token_once(plain_outputs: list[list[int]]) -> None:
    for completion in decoder().generate(PROMPTS, GREEDY):
        assert len(completion.token_ids) == len(completion.logprobs) == 1 + sum(r.emitted for r in completion.rounds)
        for r in completion.rounds:
            assert r.proposed in (0, 7)
            assert 0 <= r.accepted <= r.verified <= 7
            assert r.emitted == r.accepted + 1


def test_plain_decoding_is_a_round_without_drafts() -> None:
    [completion] = Decoder(golden_target()).generate([[5]], GREEDY)
    assert len(completion.rounds) == 23
    assert {(r.proposed, r.verified, r.accepted, r.emitted) for r in completion.rounds} == {(0, 0, 0, 1)}


def test_requests_join_between_rounds(plain_outputs: list[list[int]]) -> None:
    running = decoder()
    completions = [running.add_request(PROMPTS[0], GREEDY)]
    for prompt in PROMPTS[1:]:
        running.step()
        completions.append(running.add_request(prompt, GREEDY))
    while running.unfinished:
        running.step()
    assert [c.token_ids for c in completions] == plain_outputs
    assert [c.request_id for c in completions] == [0, 1, 2]


def test_stream_yields_every_token_in_order(plain_outputs: list[list[int]]) -> None:
    running = decoder()
    completions = [running.add_request(prompt, GREEDY) for prompt in PROMPTS]
    streamed: dict[int, list[int]] = {c.request_id: [] for c in completions}
    finished = []
    for output in running.stream():
        assert output.request_id not in finished
        streamed[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            finished.append(output.request_id)
    assert list(streamed.values()) == plain_outputs
    assert sorted(finished) == [0, 1, 2]


def test_a_request_waits_while_the_cache_is_full(plain_outputs: list[list[int]]) -> None:
    # Each needs up to (35 + 24 + 7) / 4 = 17 pages, so that two never fit, nor does the longest beside another.
    running = decoder(num_pages=18, page_size=4)
    completions = [running.add_request(prompt, GREEDY) for prompt in PROMPTS]
    running.step()
    assert [bool(c.token_ids) for c in completions] == [True, True, False]
    while running.unfinished:
        running.step()
    assert [c.token_ids for c in completions] == plain_outputs


def test_max_batch_limits_how_many_run(plain_outputs: list[list[int]]) -> None:
    running = decoder(max_batch=2)
    completions = [running.add_request(prompt, GREEDY) for prompt in PROMPTS]
    running.step()
    assert [bool(c.token_ids) for c in completions] == [True, True, False]
    assert [c.token_ids for c in running.generate(PROMPTS, GREEDY)] == plain_outputs
    assert [c.token_ids for c in completions] == plain_outputs


def test_pages_come_back_when_requests_end() -> None:
    running = decoder(num_pages=18, page_size=4)
    for _ in range(3):
        running.generate(PROMPTS, GREEDY)
    assert running.free_pages == 18


@pytest.mark.parametrize("index", range(24))
def test_p16_a_stop_token_ends_the_request_at_any_block_position(index: int, plain_outputs: list[list[int]]) -> None:
    for prompt, output in zip(PROMPTS, plain_outputs, strict=True):
        stop = output[index]
        expected = output[: output.index(stop) + 1]
        params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(stop,))
        running = decoder()
        [completion] = running.generate([prompt], params)
        assert completion.token_ids == expected
        assert completion.finish_reason == "stop"
        assert running.free_pages == 256
        assert len(completion.token_ids) == 1 + sum(r.emitted for r in completion.rounds)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 9])
def test_p08_never_more_tokens_than_asked_for(max_tokens: int, plain_outputs: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for completion, output in zip(decoder().generate(PROMPTS, params), plain_outputs, strict=True):
        assert completion.token_ids == output[:max_tokens]
        assert completion.finish_reason == "length"
        assert all(r.verified < max_tokens for r in completion.rounds)


@pytest.mark.parametrize("spare", range(1, 10))
def test_p13_the_models_context_ends_a_request(spare: int) -> None:
    limit = golden_target().config.max_position_embeddings
    prompt = [(7 * i) % 300 for i in range(limit - spare)]
    params = SamplingParams(temperature=0, max_tokens=64)
    [completion] = decoder().generate([prompt], params)
    [plain] = Decoder(golden_target()).generate([prompt], params)
    assert completion.token_ids == plain.token_ids
    assert len(completion.token_ids) == spare
    assert completion.finish_reason == "length"


def poisoned_target(token: int) -> Target:
    """The golden target, giving NaN logits at every row whose own or earlier token is ``token``."""
    network = copy.deepcopy(golden_target().network)
    network.model.embed_tokens.weight.data[token] = float("nan")
    return Target(network)


@pytest.mark.parametrize("rule", ["coupled", "ratio", "match"])  # block looks at rows past the first rejection
def test_p05_bad_logits_end_their_request_and_no_other(rule: Any) -> None:
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=24) for i in range(3)]
    healthy = [c.token_ids for c in decoder(rule=rule).generate(PROMPTS, params)]
    token = next(t for t in healthy[0][3:20] if t not in healthy[1] + healthy[2] + PROMPTS[2])
    running = Decoder(poisoned_target(token), golden_drafter("vanilla"), rule=rule)
    completions = running.generate(PROMPTS, params)
    assert completions[0].finish_reason == "error"
    assert completions[0].token_ids == healthy[0][: healthy[0].index(token) + 1]
    assert [c.token_ids for c in completions[1:]] == healthy[1:]
    assert [c.finish_reason for c in completions[1:]] == ["length", "length"]
    assert running.free_pages == 256


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block", "match"])
def test_p05_a_prompt_with_bad_logits_ends_at_once(rule: Any) -> None:
    [completion] = Decoder(poisoned_target(5), golden_drafter("vanilla"), rule=rule).generate([[5, 17]], GREEDY)
    assert completion.finish_reason == "error"
    assert completion.token_ids == []
    assert completion.rounds == []


def test_p22_a_policy_changes_how_many_tokens_are_verified() -> None:
    verified = {}
    for name, policy in {"all": FixedK(7), "two": FixedK(2), "scheduled": ConfidenceScheduled(STEEP)}.items():
        completions = decoder(policy=policy).generate(PROMPTS, GREEDY)
        verified[name] = sum(r.verified for c in completions for r in c.rounds) / sum(
            len(c.rounds) for c in completions
        )
    assert verified["two"] <= 2 < verified["all"]
    assert 0 < verified["scheduled"] < verified["all"]


def test_p24_a_cost_curve_is_required() -> None:
    with pytest.raises(TypeError, match="profile: expected a CostProfile"):
        ConfidenceScheduled(None)  # type: ignore[arg-type]


def test_cost_is_measured_at_powers_of_two() -> None:
    profile = measure_cost(golden_target(), golden_drafter("vanilla"), max_rows=16, context_len=32, repeats=2)
    assert profile.rows == (1, 2, 4, 8, 16)
    assert all(s > 0 for s in profile.seconds)
    assert profile.draft_requests == (1, 2, 4, 8)
    assert profile.context_tokens == 32
    plain = measure_cost(golden_target(), max_rows=2, context_len=8, repeats=1)
    assert (plain.rows, plain.draft_requests) == ((1, 2), ())


def test_measured_cost_needs_room() -> None:
    with pytest.raises(ValueError, match=r"context_len \+ max_rows: expected at most 512"):
        measure_cost(golden_target(), context_len=500, max_rows=64)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: expected at least one token id, got none"),
        ([3, 320], "prompt: expected token ids from 0 to 319, got 320"),
        ([-1], "prompt: expected token ids from 0 to 319, got -1"),
        ([3] * 512, r"prompt: expected fewer than 512 tokens \(the model's context\), got 512"),
    ],
)
def test_p07_bad_prompts(prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder().add_request(prompt)


def test_a_request_that_never_fits() -> None:
    with pytest.raises(ValueError, match="100 tokens and 24 to emit need 9 pages of 16, and the cache has 8"):
        decoder(num_pages=8).add_request([3] * 100, GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "typical"}, "rule: expected one of coupled, ratio, block, match, recursive, got 'typical'"),
        ({"draft_len": 8}, "draft_len: expected 0 to the drafter's block size 7, got 8"),
        ({"draft_len": -1}, "draft_len: expected 0 to the drafter's block size 7, got -1"),
        ({"max_batch": 0}, "max_batch: expected at least 1, got 0"),
        ({"num_pages": 0}, "num_pages"),
    ],
)
def test_p11_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder(**options)


def test_a_policy_needs_a_drafter() -> None:
    with pytest.raises(ValueError, match="drafter: a policy or a draft_len needs a drafter"):
        Decoder(golden_target(), policy=FixedK(2))


def test_p11_fixed_k_above_the_draft_length() -> None:
    with pytest.raises(ValueError, match="k: expected at most the draft length 3, got 5"):
        decoder(policy=FixedK(5), draft_len=3).generate([[5]], GREEDY)


@pytest.mark.parametrize("length", [-1, 99])
def test_a_policy_that_breaks_its_bounds_is_named(length: int) -> None:
    class Wild(FixedK):
        def plan(self, signals: Signals) -> torch.Tensor:
            return torch.full_like(signals.max_lengths, length)

    with pytest.raises(ValueError, match=r"policy: expected lengths from 0 to \[7\].*from FixedK\(1\)"):
        decoder(policy=Wild(1)).generate([[5]], GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": 2**63},
        {"max_tokens": 0},
    ],
)
def test_sampling_parameters_out_of_range(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ValueError, match=f"{name}: out of range"):
        SamplingParams(**options)


def test_p20_seeds_are_apart_unless_given() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=24)
    first, second = decoder().generate([[5], [5]], params)
    assert first.token_ids != second.token_ids
    again = decoder().generate([[5], [5]], params)
    assert [c.token_ids for c in again] == [first.token_ids, second.token_ids]


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_p01_a_seed_is_used_once_where_drafts_must_not_be_known(rule: Any) -> None:
    params = SamplingParams(seed=3, max_tokens=4)
    running = decoder(rule=rule)
    running.add_request([5], params)
    with pytest.raises(ValueError, match="seed: 3 was used before"):
        running.add_request([6], params)
    list(running.stream())
    # A policy may still remember the first one's confidences.
    with pytest.raises(ValueError, match="seed: 3 was used before"):
        running.add_request([6], params)
    decoder(rule="coupled").generate([[5], [6]], params)
    decoder(rule="match").generate([[5], [6]], params)


def test_an_oracle_is_refused_under_block() -> None:
    with pytest.raises(ValueError, match="policy: Oracle under rule 'block' would bias the output"):
        decoder(rule="block", policy=Oracle({0: [1]}))


def test_generate_queues_all_or_nothing() -> None:
    running = decoder()
    with pytest.raises(ValueError, match="prompt: expected at least one token id"):
        running.generate([[5], []], GREEDY)
    assert not running.unfinished
    assert [c.request_id for c in running.generate([[5]], GREEDY)] == [0]


@pytest.mark.parametrize("rule", ["ratio", "block", "match"])
def test_p15_logprobs_are_the_targets(rule: Any) -> None:
    params = [SamplingParams(temperature=0.7, top_p=0.9, seed=i, max_tokens=24) for i in range(3)]
    for prompt, completion in zip(PROMPTS, decoder(rule=rule).generate(PROMPTS, params), strict=True):
        logits = replay_logits(golden_target(), prompt, completion.token_ids)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=LOGITS, rtol=0)


def test_as_many_sampling_parameters_as_prompts() -> None:
    with pytest.raises(ValueError, match="sampling: expected one for each of 2 prompts, got 1"):
        decoder().generate([[5], [6]], [GREEDY])


def test_everything_is_exported() -> None:
    assert all(hasattr(dspark.decode, name) for name in dspark.decode.__all__)
