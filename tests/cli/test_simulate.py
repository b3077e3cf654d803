"""``simulate``: its options, its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.policy import CostProfile
from dspark.policy.simulator import synthetic_trace
from tests.cli.helpers import run

QUICK = ["--requests", "6", "--output-tokens", "8", "--prompt-tokens", "4", "--concurrency", "2"]


def results(out: Path) -> list[dict[str, object]]:
    content = json.loads((out / "results.json").read_text())
    return list(content["results"])


def test_the_command_writes_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    run("simulate", *QUICK, "--concurrency", "3", "--out", str(out))
    assert {path.name for path in out.iterdir()} == {"results.csv", "results.json", "results.md", "results.png"}
    content = json.loads((out / "results.json").read_text())
    assert content["settings"]["trace"] == "synthetic"
    assert content["settings"]["modelled"]
    policies = ["plain", "fixed:1", "fixed:3", "fixed:7", "scheduled", "gated:scheduled", "oracle-sound", "oracle"]
    assert [(r["policy"], r["concurrency"]) for r in content["results"]] == [(p, c) for c in (2, 3) for p in policies]
    by_policy = {r["policy"]: r for r in content["results"] if r["concurrency"] == 2}
    assert by_policy["plain"]["tau"] == 1
    assert by_policy["oracle"]["waste"] == 0
    assert (
        by_policy["oracle"]["tokens_per_s"] > by_policy["fixed:1"]["tokens_per_s"] > by_policy["plain"]["tokens_per_s"]
    )


def test_recorded_rounds_and_a_measured_profile_are_read(tmp_path: Path) -> None:
    trace, profile, plain = tmp_path / "some.npz", tmp_path / "cost.json", tmp_path / "plain.json"
    synthetic_trace(requests=2, tokens=30).full_verification_path().save(trace)
    CostProfile((1, 8), (1.0, 2.0)).save(profile)
    CostProfile((1,), (0.5,)).save(plain)
    options = ["--trace", str(trace), "--domain", "chat", "--between", "tokens", "--profile", str(profile)]
    options += ["--plain-profile", str(plain), "--policy", "plain", "--policy", "fixed:2", "--prefill-chunk", "0"]
    run("simulate", *QUICK, *options, "--out", str(tmp_path))
    first, second = results(tmp_path)
    assert first["tpot_p50"] == 0.5
    assert second["policy"] == "fixed:2"
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["settings"]["domains"] == ["chat"]
    assert not content["settings"]["modelled"]


def test_arrivals_come_by_rate_or_from_a_file(tmp_path: Path) -> None:
    run("simulate", *QUICK, "--rate", "5", "--rate", "50", "--policy", "fixed:2", "--out", str(tmp_path))
    assert [r["arrivals"] for r in results(tmp_path)] == ["poisson 5/s", "poisson 50/s"]
    times = tmp_path / "times.txt"
    times.write_text("0\n0.5\n0.75\n")
    run("simulate", *QUICK, "--arrivals", str(times), "--policy", "fixed:2", "--out", str(tmp_path))
    assert [r["arrivals"] for r in results(tmp_path)] == ["replay"]


def test_p20_a_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run("simulate", *QUICK, "--policy", "scheduled", "--seed", seed, "--out", str(tmp_path / name))
    a, b, c = ((tmp_path / name / "results.csv").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "fixed:8"], r"policy 'fixed:8': expected fixed:K with K from 0 to 7"),
        (["--policy", "best"], "policy 'best': expected plain, fixed:K"),
        (["--policy", "gated:oracle"], "policy 'gated:oracle': gated:NAME takes a policy that drafts"),
        (["--profile", "a100"], r"--profile: expected a .json file or one of h200, rtx4090, got 'a100'"),
        (["--plain-profile", "plain.json"], "plain: expected None, since the profile itself says"),
        (["--between", "rows"], "--between: expected nearest or tokens, got 'rows'"),
        (["--domain", "law"], "domain: expected one of math, code, chat, got 'law'"),
        (["--rate", "3", "--arrivals", "times.txt"], "--rate, --arrivals: give one of them"),
        (["--arrivals", "times.txt"], "times.txt: expected one time in seconds per line"),
        (["--trace", "some.npz", "--miscalibration", "0.5"], "--miscalibration: a recorded trace has its own"),
        (["--pages", "1"], "num_pages: request . needs . pages of 16 tokens, and the cache has 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("times.txt").write_text("soon\n")
    CostProfile((1,), (0.5,)).save("plain.json")
    synthetic_trace(requests=1, tokens=8).save("some.npz")
    with pytest.raises(ValueError, match=message):
        run("simulate", *QUICK, *options)
