"""The example engine decodes what plain decoding would, on public ops alone."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dspark.decode import Decoder, SamplingParams
from dspark.models import tiny_pair
from dspark.models.tiny import held_out_prompts, load_tokenizer
from dspark.testing.guards import forbid_sync

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "minimal_engine.py"


@pytest.fixture(scope="module")
def engine_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_engine", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_output_is_plain_decodings(engine_module: ModuleType) -> None:
    """More jobs than lanes, greedy and sampled ones, of different lengths."""
    target, drafter = tiny_pair()
    tokenizer = load_tokenizer()
    prompts = [tokenizer.encode(p.text).ids[: 20 + 10 * i] for i, p in enumerate(held_out_prompts()[:4])]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.7, seed=i, max_tokens=12 + 7 * i) for i in range(len(prompts))
    ]
    jobs = [
        engine_module.Job(prompt, p.max_tokens, p.temperature, p.seed or 0)
        for prompt, p in zip(prompts, params, strict=True)
    ]
    engine = engine_module.Engine(
        target.network, drafter.network, num_lanes=2, max_len=120, seconds_per_round=torch.ones(2 * 8 + 1)
    )
    rounds = engine.run(jobs)

    plain = Decoder(target).generate(prompts, params)
    assert [job.output for job in jobs] == [completion.token_ids for completion in plain]
    assert rounds < sum(p.max_tokens for p in params) / 2, "nothing was gained by drafting"


def test_a_round_reads_nothing_from_the_device(engine_module: ModuleType) -> None:
    target, drafter = tiny_pair()
    engine = engine_module.Engine(
        target.network, drafter.network, num_lanes=2, max_len=40, seconds_per_round=torch.ones(2 * 8 + 1)
    )
    engine.waiting = [engine_module.Job([5, 6, 7], 20)]
    with torch.inference_mode():
        engine.admit()
        with forbid_sync():
            verdict = engine.decode_round()
    counts = verdict.num_emitted.tolist()
    assert counts[0] >= 1
    assert counts[1] == 0


def test_it_is_built_from_public_parts_and_short() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 200
    modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not [m for m in modules if m and m.startswith(("dspark.decode", "dspark.batch", "dspark.kernels"))]
    names = [node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    assert not [name for name in names if name.startswith("_")]
