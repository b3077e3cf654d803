"""What the decoder asks of a policy and tells it, and a recorder."""

from __future__ import annotations

import pytest
import torch

from dspark.decode import Decoder, SamplingParams, TreeShape
from dspark.policy import NoSpeculation, Outcome, Signals
from dspark.policy.traces import TraceRecorder
from tests.decode.pairs import golden_drafter, golden_target
from tests.decode.plain import plain

PROMPT = list(range(40, 75))


class Watchful:
    """Verifies everything, drafts in every other round, and keeps what it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.signals: list[Signals] = []
        self.outcomes: list[Outcome] = []

    def drafts(self, requests: int, context_tokens: int) -> bool:
        self.asked.append((requests, context_tokens))
        return len(self.asked) % 2 == 0

    def plan(self, signals: Signals) -> torch.Tensor:
        self.signals.append(signals)
        return signals.max_lengths

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_a_policy_is_asked_whether_to_draft_and_told_what_came_of_it() -> None:
    policy = Watchful()
    run = Decoder(golden_target(), golden_drafter("vanilla"), policy, margins=True)
    params = SamplingParams(temperature=0, max_tokens=24)
    [completion] = run.generate([PROMPT], params)
    assert completion.token_ids == plain(golden_target(), PROMPT, params).token_ids
    context, expected = len(PROMPT), []
    for r in completion.rounds:
        expected.append((1, context))
        context += r.emitted
    assert policy.asked == expected[: len(policy.asked)]
    assert len(policy.asked) >= len(expected) - 1, "the last round may have had no room for a draft"
    assert [r.proposed for r in completion.rounds][: len(policy.asked)] == [
        7 * (i % 2) for i in range(len(policy.asked))
    ]
    assert len(policy.signals) == sum(r.proposed > 0 for r in completion.rounds)
    assert len(policy.outcomes) == len(completion.rounds)
    assert [o.context_tokens for o in policy.outcomes] == [c for _, c in expected]
    assert all(o.seconds is not None and o.seconds > 0 for o in policy.outcomes)
    for signals in policy.signals:
        assert signals.margin is not None
        assert signals.margin.shape == (1, 7)
        assert signals.context_tokens in [c for _, c in expected]


def test_p23_without_speculation_the_drafter_does_not_run() -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12)
    [completion] = Decoder(golden_target(), golden_drafter("vanilla"), NoSpeculation()).generate([PROMPT], params)
    assert completion.token_ids == plain(golden_target(), PROMPT, params).token_ids
    assert all(r.proposed == 0 for r in completion.rounds)


def test_a_recorder_hears_of_every_round() -> None:
    recorder = TraceRecorder("code")
    prompts, params = [PROMPT, [9]], [SamplingParams(temperature=1.0, seed=i, max_tokens=40) for i in range(2)]
    run = Decoder(golden_target(), golden_drafter("vanilla"), rule="ratio", recorder=recorder, margins=True)
    completions = run.generate(prompts, params)
    trace = recorder.trace()
    whole = [[(r.accepted) for r in c.rounds if r.verified == 7] for c in completions]
    assert [trace.accepted[trace.request == i].tolist() for i in range(2)] == whole
    assert trace.context[0] == len(PROMPT)
    assert trace.confidence is not None
    assert trace.margin is not None
    assert trace.logprob is not None
    assert ((trace.margin >= 0) & (trace.margin <= 1)).all()
    assert (trace.logprob <= 0).all()
    with pytest.raises(ValueError, match="recorder: a trace is of chains"):
        Decoder(golden_target(), golden_drafter("vanilla"), recorder=recorder, tree=TreeShape(4))
