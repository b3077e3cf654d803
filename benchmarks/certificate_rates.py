"""How many steps of the certified walk are certified: ``python -m benchmarks.certificate_rates``.

On blocks that the embedded tiny pair drafts over its held-out prompts, and on those of the golden traces (their Markov
head). A step counts as tried while all steps before it in its block were certified, as with the kernels.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.setup import make_sampling
from dspark.decode import Decoder
from dspark.models.drafter import DSparkDrafter
from dspark.models.loading import load_drafter, load_target
from dspark.models.tiny import held_out_prompts, load_tokenizer, tiny_pair
from dspark.ops import BiasTable, MarkovHead, Stream, build_bias_table
from dspark.ops.draft.certified_reference import certified_steps
from dspark.ops.draft.walk_reference import WalkInputs
from dspark.policy.output import markdown_table
from dspark.requests import SamplingParams

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"


@dataclass(frozen=True)
class Blocks:
    """Blocks to walk: base logits ``[n, G, V]`` and anchors ``[n]``, and the head that walks them."""

    name: str
    base_logits: Tensor
    anchor: Tensor
    head: MarkovHead


class _Recorder(DSparkDrafter):
    """Keeps the base logits and the anchors of every block."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        super().__init__(drafter.network, slots="anchor-first")
        self.blocks: list[tuple[Tensor, Tensor]] = []

    def block_logits(self, anchor: Tensor, *context: Any) -> tuple[Tensor, Tensor]:
        hidden, base_logits = super().block_logits(anchor, *context)
        self.blocks.append((base_logits, anchor))
        return hidden, base_logits


def tiny_blocks(max_tokens: int) -> Blocks:
    """Blocks of the tiny pair, at the contexts that it decodes at temperature 1."""
    target, drafter = tiny_pair()
    recorder, tokenizer = _Recorder(drafter), load_tokenizer()
    prompts = [tokenizer.encode(prompt.text).ids for prompt in held_out_prompts()]
    decoder = Decoder(target, recorder, rule="coupled")
    decoder.generate(prompts, SamplingParams(temperature=1.0, max_tokens=max_tokens))
    base_logits, anchor = (torch.cat(part) for part in zip(*recorder.blocks, strict=True))
    head = drafter.network.sequential_head()
    assert isinstance(head, MarkovHead)
    return Blocks("tiny pair", base_logits, anchor, head)


def golden_blocks() -> Blocks:
    """All rounds of the golden trace of the Markov head."""
    from safetensors.torch import load_file

    drafter = load_drafter(GOLDEN / "draft_vanilla", load_target(GOLDEN / "target"))
    trace = load_file(GOLDEN / "trace_vanilla.safetensors")
    head = drafter.network.sequential_head()
    assert isinstance(head, MarkovHead)
    base_logits, anchor = (torch.cat([trace[f"{i}.{name}"] for i in range(3)]) for name in ("base_logits", "anchor"))
    return Blocks("golden vanilla", base_logits, anchor, head)


def rates(blocks: Blocks, table: BiasTable, top_k: int, temperature: float) -> tuple[float, float]:
    """Certified steps over those tried, and blocks that are certified as a whole."""
    count, draft_len, _ = blocks.base_logits.shape
    inputs = WalkInputs(
        base_logits=blocks.base_logits,
        anchor=blocks.anchor,
        head=blocks.head,
        hidden=None,
        confidence_head=None,
        confidence_hidden=None,
        sampling=make_sampling(count, temperature),
        position=torch.arange(count),
        stream=Stream.TARGET,
    )
    _, certified = certified_steps(inputs, table, top_k)
    tried = (certified + 1).clamp(max=draft_len).sum()
    return float(certified.sum() / tried), float((certified == draft_len).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens that the tiny pair writes per prompt")
    options = parser.parse_args()
    names, rows = ["blocks", "V", "K", "M", "T", "steps certified", "whole blocks"], []
    for blocks in (tiny_blocks(options.max_tokens), golden_blocks()):
        count, _, vocab_size = blocks.base_logits.shape
        for top_m in (16, 64):
            table = build_bias_table(blocks.head, top_m=top_m)
            for top_k in (16, 64, 128):
                for temperature in (0.0, 0.7, 1.0):
                    steps, whole = rates(blocks, table, top_k, temperature)
                    cells = [f"{count} of {blocks.name}", *map(str, (vocab_size, top_k, top_m, temperature))]
                    rows.append([*cells, f"{steps:.1%}", f"{whole:.1%}"])
    print(markdown_table(names, rows, "|" + "---|" * 7), end="")


if __name__ == "__main__":
    main()
