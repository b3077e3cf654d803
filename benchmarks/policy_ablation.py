"""Policies × rules × temperatures × draft lengths × domains on the tiny pair, decoded and simulated.

``python -m benchmarks.policy_ablation --out runs/policy_ablation`` decodes held-out text under every combination,
records a trace of the pair, and serves that trace on a modelled machine under load. ``decoded``, ``record`` and
``simulated`` are the same as functions, for other pairs, traces and policies (``module:Class`` names one's own class).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.cli.ablate import Plan, run_ablation
from dspark.cli.calibrate import record
from dspark.cli.report import Row, markdown, write_picture, write_results
from dspark.cli.setup import choose_prompts
from dspark.cli.simulate import policy_maker
from dspark.measure import measure_cost
from dspark.models import DSparkDrafter, Target, tiny_pair
from dspark.models.tiny import Prompt, load_tokenizer
from dspark.policy import CostProfile, simulator
from dspark.policy.traces import Trace

POLICIES = ("fixed:1", "fixed:3", "fixed:7", "threshold:0.6", "scheduled", "scheduled-lag2", "goodput")


def decoded(
    target: Target,
    drafter: DSparkDrafter,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    *,
    policies: Sequence[str] = (*POLICIES, "oracle", "tree:7", "tree:16"),
    rules: Sequence[str] = ("coupled", "ratio", "block"),
    temperatures: Sequence[float] = (0.0, 1.0),
    draft_lens: Sequence[int] = (3, 7),
    repeats: int = 3,
    max_tokens: int = 96,
) -> list[Row]:
    """Every combination, measured on this machine against plain decoding; rows by domain and for all prompts."""
    plan = Plan(
        prompts=tokens,
        policies=policies,
        rules=rules,  # type: ignore[arg-type]  # words; the decoder refuses others
        temperatures=temperatures,
        repeats=repeats,
        max_tokens=max_tokens,
        draft_lens=draft_lens,
        domains=[p.domain for p in prompts],
    )
    return run_ablation(target, drafter, plan, measure_cost(target, drafter))


def simulated(
    trace: Trace,
    *,
    policies: Sequence[str] = POLICIES,
    profile: CostProfile = simulator.MACHINES["h200"],
    concurrency: Sequence[int] = (1, 8, 32, 128, 256),
    requests: int = 256,
    seed: int = 0,
) -> list[simulator.Result]:
    """The same text served under each policy at each load; plain decoding and two oracles beside them."""
    engine = simulator.Engine(profile, prefill_chunk=0)
    names = ("plain", *policies, "oracle-sound", "oracle")
    makers = {name: policy_maker(name, trace.draft_len) for name in names}
    loads = [(simulator.Workload.closed(max(requests, 4 * n), seed=seed), n) for n in concurrency]
    return list(simulator.sweep(trace, makers, loads, engine, seed=seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", help="repeatable; a name that ablate knows, or module:Class")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/policy_ablation"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    target, drafter = tiny_pair()
    tokenizer = load_tokenizer()
    texts = choose_prompts(None, options.prompts)
    tokens = [tokenizer.encode(p.text).ids for p in texts]
    own = {"policies": options.policy} if options.policy else {}

    rows = decoded(target, drafter, texts, tokens, repeats=options.repeats, **own)
    write_results(options.out / "decoded.json", rows)
    write_picture(options.out / "decoded.png", rows)
    trace = record(target, drafter, texts, tokens)
    trace.save(options.out / "trace.npz")
    results = simulated(trace, **own)
    (options.out / "simulated.md").write_text(simulator.markdown(results), encoding="utf-8")
    simulator.write_csv(options.out / "simulated.csv", results)
    simulator.write_json(options.out / "simulated.json", results, {"trace": "trace.npz", "profile": "h200, modelled"})
    simulator.write_picture(options.out / "simulated.png", results)
    sys.stdout.write(f"{markdown(rows)}\n{simulator.markdown(results)}\nwrote {options.out}\n")


if __name__ == "__main__":
    main()
