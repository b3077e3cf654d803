"""The ablation script's functions, on a small part of what it does."""

from __future__ import annotations

from benchmarks.policy_ablation import decoded, record, simulated
from dspark.models import tiny_pair
from dspark.models.tiny import held_out_prompts, load_tokenizer


def test_decoded_recorded_and_simulated() -> None:
    target, drafter = tiny_pair()
    tokenizer = load_tokenizer()
    prompts = held_out_prompts()[:2]
    tokens = [tokenizer.encode(p.text).ids for p in prompts]
    rows = decoded(
        target, drafter, prompts, tokens, policies=["fixed:3", "dspark.policy:NoSpeculation"], rules=["coupled"],
        temperatures=[0.0], draft_lens=[3], repeats=1, max_tokens=12,
    )  # fmt: skip
    domains = ["all", *sorted({p.domain for p in prompts})] if len({p.domain for p in prompts}) > 1 else ["all"]
    names = ["plain", "fixed:3", "dspark.policy:NoSpeculation"]
    assert sorted((r.policy, r.domain) for r in rows) == sorted((n, d) for n in names for d in domains)
    assert all(r.lossless for r in rows)
    trace = record(target, drafter, prompts, tokens, max_tokens=40)
    assert trace.num_requests == 2
    results = simulated(trace, policies=["scheduled"], concurrency=(4,), requests=16)
    assert [r.policy for r in results] == ["plain", "scheduled", "oracle-sound", "oracle"]
    assert results[1].tokens_per_s > results[0].tokens_per_s
