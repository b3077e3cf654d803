"""``ablate`` on the embedded pair, and the checks behind its lossless column."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from dspark.cli.ablate import Plan, run_ablation
from dspark.cli.evaluate import draft_quality
from dspark.cli.lossless import NEAR_TIE, is_lossless_by_law, is_lossless_by_tokens, replay_logits
from dspark.cli.report import PLAIN, Row, comparison, markdown, read_rows, speedups, write_results
from dspark.cli.setup import check_policy
from dspark.decode import Decoder, SamplingParams
from dspark.models import DSparkDrafter, Target, held_out_prompts, load_tokenizer, tiny_pair
from dspark.policy import CostProfile
from dspark.policy.reliability import area_under_curve
from dspark.testing.statistics import probability_integral, uniformity_p_value
from tests.cli.helpers import run

Pair = tuple[Target, DSparkDrafter]
Prompts = list[list[int]]

KEYS = {
    "policy", "rule", "temperature", "draft_len", "domain", "tokens_per_s", "speedup", "speedup_ci", "tau",
    "verified_per_round", "accept_by_position", "lossless", "prompts", "tokens", "near_ties",
}  # fmt: skip
PROFILE = CostProfile(rows=(1, 8), seconds=(1.0, 1.5))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return tiny_pair()


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    tokenizer = load_tokenizer()
    return [tokenizer.encode(p.text).ids for p in held_out_prompts()]


def test_what_a_rule_does_not_go_with_is_left_out() -> None:
    plan = Plan([[1]], ["fixed:3", "oracle", "tree:7"], ["coupled", "ratio", "block"], [0.0], repeats=2, max_tokens=4)
    assert plan.policies_under("coupled") == ["fixed:3", "oracle", "tree:7"]
    assert plan.policies_under("recursive") == ["fixed:3", "oracle", "tree:7"]
    assert plan.policies_under("ratio") == ["fixed:3", "oracle"]
    assert plan.policies_under("block") == ["fixed:3"]
    assert plan.runs == (1 + 2 * 4) + (1 + 2 * 3) + (1 + 2 * 2)


def test_a_tree_is_a_policy_of_the_table(pair: Pair, prompts: Prompts) -> None:
    plan = Plan(prompts[:1], ["fixed:7", "tree:7"], ["coupled"], [0.0], repeats=1, max_tokens=24)
    _, chain, tree = run_ablation(*pair, plan, PROFILE)
    assert tree.policy == "tree:7"
    assert tree.lossless
    assert 0 < tree.verified_per_round <= 7
    assert chain.verified_per_round <= 7


@pytest.mark.parametrize("name", ["tree", "tree:", "tree:x", "tree:3:2:1", "tree:0", "tree:8:17"])
def test_a_tree_needs_its_numbers(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected tree:NODES|expected 1 to"):
        check_policy(name, draft_len=7)


def test_the_command_writes_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "new" / "ablate.json"
    options = ["--prompts", "2", "--repeats", "1", "--max-tokens", "24", "--policy", "fixed:4", "--policy", "oracle"]
    run("ablate", *options, "--out", str(out))
    content = json.loads(out.read_text())
    assert content.keys() == {"environment", "rows"}
    assert {"torch", "python", "threads", "processor"} <= content["environment"].keys()
    settings = [(r["policy"], r["rule"], r["temperature"]) for r in content["rows"]]
    assert settings == [
        (policy, rule, t)
        for rule in ("coupled", "ratio")
        for t in (0.0, 1.0)
        for policy in ("plain", "fixed:4", "oracle")
    ]
    for row in content["rows"]:
        assert row.keys() == KEYS
        assert row["lossless"]
        assert row["prompts"] == 2
        assert row["tokens"] == 48
        assert row["speedup_ci"][0] <= row["speedup"] <= row["speedup_ci"][1]
        if row["policy"] == PLAIN:
            assert (row["speedup"], row["tau"], row["verified_per_round"]) == (1.0, 1.0, 0.0)
        else:
            assert row["tau"] > 1
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    lines = out.with_suffix(".md").read_text().splitlines()
    assert lines[0].startswith("| policy | rule | T | tokens/s | speed-up |")
    assert len(lines) == 2 + len(content["rows"])
    with out.with_suffix(".csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    assert [float(r["tau"]) for r in records] == [r["tau"] for r in content["rows"]]

    assert len(run("ablate", "--compare", str(out), str(out)).splitlines()) == 2 + len(content["rows"])


def row_of(policy: str, speedup: float, **changes: object) -> Row:
    row = Row(policy, "coupled", 0.0, 7, "all", 100.0, speedup, (speedup - 0.1, speedup + 0.1), 3.0, 5.0, [0.8, None],
              True, 4, 320, 0)  # fmt: skip
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def test_two_runs_are_compared_where_they_measured_the_same(tmp_path: Path) -> None:
    before = [row_of("fixed:7", 1.2), row_of("scheduled", 1.3), row_of("tree:7", 1.5), row_of("oracle", 1.6)]
    after = [row_of("fixed:7", 1.25), row_of("scheduled", 1.6), row_of("tree:7", 1.1), row_of("fixed:3", 1.0)]
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, rows in zip(paths, (before, after), strict=True):
        write_results(path, rows)
        assert read_rows(path) == rows
    lines = comparison(before, after).splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == ["fixed:7", "scheduled", "tree:7"]
    assert [line.split("|")[-2].strip() for line in lines] == ["", "faster", "slower"]
    with pytest.raises(ValueError, match="no setting in common"):
        comparison(before, [row_of("fixed:7", 1.2, draft_len=3)])
    paths[0].write_text("{}")
    with pytest.raises(ValueError, match=r"before.json: expected the JSON results of ablate"):
        read_rows(paths[0])


def test_columns_appear_where_rows_differ_in_them() -> None:
    rows = [row_of("fixed:7", 1.2), row_of("fixed:7", 1.3, domain="code"), row_of("fixed:3", 1.1, draft_len=3)]
    assert "| γ | domain |" in markdown(rows)
    assert "domain" not in markdown(rows[:1])


def test_the_interval_is_of_prompts_not_of_repeats() -> None:
    """Many repeats of two prompts that differ say nothing more about prompts."""
    own = [[1.0] * 50, [2.0] * 50]
    plain = [[2.0] * 50, [6.0] * 50]
    median, interval = speedups(own, plain)
    assert interval == (2.0, 3.0)
    assert 2.0 <= median <= 3.0


def test_domains_and_draft_lengths_have_rows_of_their_own(pair: Pair, prompts: Prompts) -> None:
    plan = Plan(
        [prompts[0], prompts[1]], ["fixed:2", "fixed:4"], ["coupled"], [0.0], repeats=1, max_tokens=8,
        draft_lens=[3, 4], domains=["code", "prose"],
    )  # fmt: skip
    seen: list[str] = []
    rows = run_ablation(*pair, plan, PROFILE, seen.append)
    assert len(seen) == plan.runs
    assert [(r.policy, r.draft_len, r.domain) for r in rows] == [
        (policy, length, domain)
        for length in (3, 4)
        for domain in ("all", "code", "prose")
        for policy in (PLAIN, "fixed:2", *(["fixed:4"] if length == 4 else []))
    ]
    assert all(r.lossless for r in rows)


def test_the_oracle_verifies_less_for_the_same_rounds(pair: Pair, prompts: Prompts) -> None:
    plan = Plan(prompts[:2], ["fixed:7", "oracle"], ["ratio"], [1.0], repeats=1, max_tokens=60)
    seen: list[str] = []
    rows = {row.policy: row for row in run_ablation(*pair, plan, PROFILE, seen.append)}
    assert len(seen) == plan.runs
    assert rows["oracle"].tau == rows["fixed:7"].tau
    assert rows["oracle"].verified_per_round < rows["fixed:7"].verified_per_round
    assert all(isinstance(row, Row) and row.lossless for row in rows.values())


def test_another_token_is_not_lossless(pair: Pair, prompts: Prompts) -> None:
    target, _ = pair
    params = [SamplingParams(temperature=0.8, seed=3, max_tokens=12)]
    plain = Decoder(target).generate(prompts[:1], params)
    tampered = [dataclasses.replace(plain[0], token_ids=[*plain[0].token_ids])]
    assert is_lossless_by_tokens(target, prompts[:1], tampered, plain, params) == (True, 0)
    tampered[0].token_ids[5] = (tampered[0].token_ids[5] + 1) % target.vocab_size
    assert is_lossless_by_tokens(target, prompts[:1], tampered, plain, params) == (False, 0)
    tampered[0].token_ids[5:] = []
    assert is_lossless_by_tokens(target, prompts[:1], tampered, plain, params) == (False, 0)


@pytest.mark.parametrize("gap", [2e-5, 2e-3])
def test_p19_a_near_tie_passes_and_is_counted(gap: float, pair: Pair, prompts: Prompts) -> None:
    target = Target(copy.deepcopy(pair[0].network))
    params = [SamplingParams(temperature=0, max_tokens=1)]
    [plain] = Decoder(target).generate(prompts[:1], params)
    first = plain.token_ids[0]
    twin = (first + 1) % target.vocab_size
    # Both tokens' logits come from one row of the head; the twin's is smaller by the gap.
    head = target.network.lm_head
    head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
    logit = float(replay_logits(target, prompts[0], [first])[0, first])
    head.weight[twin] = head.weight[first] * (1 - gap / logit)
    other = dataclasses.replace(plain, token_ids=[twin])
    near = gap < NEAR_TIE
    assert is_lossless_by_tokens(target, prompts[:1], [other], [plain], params) == (near, int(near))
    # What follows a near tie is held to the same standard.
    worst = int(replay_logits(target, prompts[0], [twin, 0])[1].argmin())
    longer = [dataclasses.replace(plain, token_ids=ids) for ids in ([twin, worst], [first, worst])]
    assert is_lossless_by_tokens(target, prompts[:1], longer[:1], longer[1:], params) == (False, 0)


def test_output_at_another_temperature_fails_the_law(pair: Pair, prompts: Prompts) -> None:
    target, _ = pair
    few = [SamplingParams(temperature=1.0, seed=0, max_tokens=30)]
    assert is_lossless_by_law(target, prompts[:1], Decoder(target).generate(prompts[:1], few), few) is None
    honest = [SamplingParams(temperature=1.0, seed=i, max_tokens=60) for i in range(8)]
    outputs = Decoder(target, num_pages=1024).generate(prompts[:8], honest)
    assert is_lossless_by_law(target, prompts[:8], outputs, honest)
    colder = [dataclasses.replace(p, temperature=0.7) for p in honest]
    assert not is_lossless_by_law(target, prompts[:8], outputs, colder)


def test_the_probability_integral_is_uniform_for_the_right_law_only() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05]).expand(4000, -1)
    tokens = torch.multinomial(p, 1, generator=generator).squeeze(1)
    uniforms = torch.rand(4000, generator=generator)
    assert uniformity_p_value(probability_integral(p, tokens, uniforms)) > 0.01
    q = torch.tensor([0.45, 0.35, 0.15, 0.05]).expand(4000, -1)
    assert uniformity_p_value(probability_integral(q, tokens, uniforms)) < 1e-6


def test_uniformity_needs_enough_values() -> None:
    with pytest.raises(ValueError, match="values: expected at least 100 for 20 bins, got 99"):
        uniformity_p_value(torch.zeros(99))


def test_draft_quality_counts_what_the_decoder_did(pair: Pair, prompts: Prompts) -> None:
    quality = draft_quality(*pair, prompts[:2], temperature=0.0)
    assert 1 < quality.tau <= 8
    assert len(quality.accept_by_position) == 7
    assert 0.4 < quality.confidence_auc <= 1
    assert quality.rounds > 4


def test_area_under_curve_of_useless_scores_is_a_half() -> None:
    positive = torch.tensor([True, False, True, False])
    assert area_under_curve(torch.zeros(4), positive) == 0.5
    assert math.isclose(area_under_curve(torch.tensor([1.0, 0.0, 1.0, 0.0]), positive), 1.0)
