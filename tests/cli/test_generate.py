"""``generate`` on the embedded pair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dspark.cli import main
from dspark.policy.cost import CostProfile
from dspark.policy.traces import Trace
from tests.cli.helpers import run

PROMPT = "import os\nimport sys\n\n\ndef main("


def generate(*options: str) -> str:
    return run("generate", *options, "--max-tokens", "24")


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_every_policy_writes_what_plain_decoding_writes(temperature: str) -> None:
    texts = {
        policy: generate(PROMPT, "--temperature", temperature, "--seed", "3", "--policy", policy)
        for policy in ("plain", "fixed:2", "scheduled", "scheduled-lag2")
    }
    texts["tree"] = generate(PROMPT, "--temperature", temperature, "--seed", "3", "--tree", "32")
    assert len(set(texts.values())) == 1
    assert texts["plain"].strip()


def test_processors_change_the_text_of_every_policy_alike() -> None:
    options = ("--presence-penalty", "1", "--frequency-penalty", "0.5", "--repetition-penalty", "1.2")
    texts = {generate(PROMPT, *options, "--min-new-tokens", "9", "--policy", p) for p in ("plain", "fixed:5")}
    assert len(texts) == 1
    assert texts != {generate(PROMPT)}


def test_json_tells_what_happened() -> None:
    row = json.loads(generate(PROMPT, "--json", "--policy", "fixed:7"))
    assert row["prompt"] == PROMPT
    assert row["text"] + "\n" == generate(PROMPT, "--policy", "fixed:7")
    assert row["finish_reason"] == "length"
    assert len(row["token_ids"]) == len(row["logprobs"]) == 24 == 1 + sum(r["emitted"] for r in row["rounds"])
    assert row["tau"] > 1


def test_prompts_from_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "prompt.txt", tmp_path / "prompts.jsonl"
    plain.write_text(PROMPT)
    lines.write_text(json.dumps({"text": PROMPT}) + "\n" + json.dumps({"turns": ["def f(x):", "    return"]}) + "\n")
    assert generate("--file", str(plain)) == generate(PROMPT)
    rows = [json.loads(line) for line in generate("--file", str(lines), "--json").splitlines()]
    assert [r["prompt"] for r in rows] == [PROMPT, "def f(x):\n    return"]


def test_a_trace_has_every_round_of_every_prompt(tmp_path: Path) -> None:
    lines, recorded = tmp_path / "prompts.jsonl", tmp_path / "trace.npz"
    lines.write_text(
        json.dumps({"text": PROMPT, "domain": "code"}) + "\n" + json.dumps({"text": "It was", "domain": "prose"}) + "\n"
    )
    rows = [json.loads(r) for r in generate("--file", str(lines), "--json", "--trace", str(recorded)).splitlines()]
    trace = Trace.load(recorded)
    assert trace.domains == ("code", "prose")
    whole = [[r["accepted"] for r in row["rounds"] if r["verified"] == 7] for row in rows]
    assert [trace.accepted[trace.request == i].tolist() for i in range(2)] == whole
    assert trace.confidence is not None
    assert trace.margin is not None


def test_a_measured_profile_serves_the_scheduled_policy(tmp_path: Path) -> None:
    out = tmp_path / "new" / "profile.json"
    options = ["--max-rows", "4", "--max-requests", "2", "--repeats", "1", "--out", str(out)]
    assert run("profile", *options).count(" ms\n") == 3 + 2
    profile = CostProfile.load(out)
    assert (profile.rows, profile.draft_requests, profile.source) == ((1, 2, 4), (1, 2), "measured")
    assert generate(PROMPT, "--profile", str(out)) == generate(PROMPT, "--policy", "plain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "prompt, --file: give exactly one of them"),
        (["x", "--file", "y.txt"], "prompt, --file: give exactly one of them"),
        (["--file", "no-such-file.txt"], "No such file or directory: 'no-such-file.txt'"),
        (["x", "--policy", "fixed:9"], "policy 'fixed:9': expected fixed:K with K from 0 to 7"),
        (["x", "--policy", "clairvoyant"], "policy 'clairvoyant': expected plain, fixed:K"),
        (["x", "--policy", "oracle"], "policy 'oracle': replays an earlier pass"),
        (["x", "--rule", "typical"], "rule 'typical': expected one of coupled, ratio, block, match"),
        (["x", "--tree", "8", "--policy", "fixed:3"], "--policy, --tree: give one of them"),
        (["x", "--tree", "300"], "nodes: expected 1 to 255, got 300"),
        (["x", "--tree", "8", "--rule", "block"], "tree: expected a rule of coupled, match, recursive, got 'block'"),
        (["x", "--trace", "t.npz", "--policy", "plain"], "--trace: plain decoding has no rounds with drafts to record"),
        (["x", "--trace", "t.npz", "--tree", "8"], "recorder: a trace is of chains"),
        (["x", "--profile", "p.json", "--policy", "fixed:3"], "--profile: policy fixed:3 weighs no costs"),
        (["x", "--profile", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
        (["x", "--top-p", "2"], "top_p: out of range"),
        (["x", "--repetition-penalty", "0"], "repetition_penalty: out of range"),
        (["x", "--presence-penalty", "3"], "presence_penalty: out of range"),
        (["x", "--frequency-penalty", "-3"], "frequency_penalty: out of range"),
        (["x", "--min-new-tokens", "9", "--max-tokens", "8"], "min_new_tokens: expected at most max_tokens = 8, got 9"),
        (["x", "--draft-len", "8"], "draft_len: expected 0 to the drafter's block size 7, got 8"),
        (["", "--policy", "plain"], "prompt: expected at least one token id"),
        (["x", "--target", "nowhere"], "--target and --drafter: give both"),
        (["x", "--target", "nowhere", "--drafter", "nowhere"], "no such folder: nowhere"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dspark", "generate", *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1
