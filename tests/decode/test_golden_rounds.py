"""Whole generations against traces of DeepSpec's own code."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from dspark.decode import Decoder, SamplingParams
from tests.decode.pairs import GOLDEN, GOLDEN_DRAFTERS, golden_drafter, golden_target


@pytest.mark.parametrize("kind", GOLDEN_DRAFTERS)
def test_p10_outputs_and_accepted_lengths_equal_deepspecs(kind: str) -> None:
    trace = load_file(GOLDEN / f"trace_{kind}.safetensors")
    prompts = [trace[f"{i}.prompt"].tolist() for i in range(3)]
    decoder = Decoder(golden_target(), golden_drafter(kind))
    # The trace's last round is not cut at its limit of 40 tokens, so ours may not be either.
    completions = decoder.generate(prompts, SamplingParams(temperature=0, max_tokens=40 + 8))
    for i, completion in enumerate(completions):
        accepted = trace[f"{i}.accepted"].tolist()
        assert [r.accepted for r in completion.rounds][: len(accepted)] == accepted
        output = trace[f"{i}.output_ids"].tolist()
        assert (prompts[i] + completion.token_ids)[: len(output)] == output
        anchors = trace[f"{i}.anchor"].tolist()
        starts = [0]
        for r in completion.rounds[: len(anchors) - 1]:
            starts.append(starts[-1] + r.emitted)
        assert [completion.token_ids[s] for s in starts] == anchors
        assert [len(prompts[i]) + s for s in starts] == trace[f"{i}.start"].tolist()
