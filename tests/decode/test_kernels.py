"""Whole rounds on the kernels, as the decoder takes them on a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from dspark.decode import Decoder, SamplingParams, TreeShape
from dspark.ops.op import Op
from tests.decode.pairs import narrow_pair

pytestmark = pytest.mark.triton

OF_TREES = {"append_kv", "commit_kv", "verify_attention", "draft_tree", "accept_tree", "accept"}
"""Ops of a round that drafts trees; the first token of a prompt is accepted as a chain's."""


def take_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Let every op run its kernel; returns the set of those that do, as they are called."""
    called: set[str] = set()

    def choose(op: Op, backend: str, device: torch.device) -> str:
        called.add(op.name)
        return "triton"

    monkeypatch.setattr(Op, "choose", choose)
    return called


@pytest.mark.parametrize(
    ("rule", "tree", "ops"),
    [
        ("ratio", None, {"append_kv", "verify_attention", "draft_walk", "accept"}),
        (
            "coupled",
            TreeShape(6, 3),
            {"append_kv", "commit_kv", "verify_attention", "draft_tree", "accept_tree", "accept"},
        ),
        (
            "recursive",
            TreeShape(5, 2),
            {"append_kv", "commit_kv", "verify_attention", "draft_tree", "accept_tree", "accept"},
        ),
    ],
)
def test_rounds_on_the_kernels_are_those_on_the_references(
    rule: str, tree: TreeShape | None, ops: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = narrow_pair(11)
    prompts, params = [[1, 2, 3, 4, 5], [7]], [SamplingParams(temperature=t, seed=5, max_tokens=5) for t in (0.0, 0.9)]
    if rule != "coupled":
        params = [SamplingParams(temperature=p.temperature, seed=i, max_tokens=5) for i, p in enumerate(params)]

    def run() -> list[tuple[list[int], list[int]]]:
        decoder = Decoder(target, drafter, rule=rule, tree=tree, num_pages=16, page_size=4)  # type: ignore[arg-type]
        return [(c.token_ids, [r.accepted for r in c.rounds]) for c in decoder.generate(prompts, params)]

    expected = run()
    called = take_kernels(monkeypatch)
    assert run() == expected
    assert called == ops
