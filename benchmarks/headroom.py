"""How well any confidence could do on the tiny pair: ``python -m benchmarks.headroom``.

At a temperature above 0 a draft's fate is partly the draw's. Even who knew the target's distribution, and with it the
chance of acceptance, could not rank accepted drafts above rejected ones perfectly, nor schedule as an oracle does. This
decodes held-out prompts with every draft verified, computes those chances, and prints how well they and the drafter's
head rank drafts, and what a scheduler reaches with either on a modelled machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.policy_ablation import simulated
from dspark.decode import Decoder, SamplingParams
from dspark.models import DSparkDrafter, Target, tiny_pair
from dspark.models.tiny import held_out_prompts, load_tokenizer
from dspark.ops import Draft
from dspark.ops.types import Rule
from dspark.policy import FixedK, Outcome
from dspark.policy.reliability import area_under_curve
from dspark.policy.traces import Trace, TraceRecorder

FIXED = tuple(f"fixed:{k}" for k in range(1, 8))


def coupled_chance(p: Tensor, q: Tensor) -> Tensor:
    """Chance ``[...]`` that a draft from q is what p draws with the same Gumbel noise; ``p, q [..., V]`` float64.

    Token x wins both with chance ``1 / sum_y max(p_y / p_x, q_y / q_x)``: an exponential race of the larger rates
    (Daliri, Musco and Suresh, arXiv 2408.07978, has the bound that follows).
    """
    order = (p / q).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    from_p = p.cumsum(-1) / p  # of tokens whose p_y / q_y is at least that of x
    from_q = (q.sum(-1, keepdim=True) - q.cumsum(-1)) / q
    return (1 / (from_p + from_q)).nan_to_num(0.0).sum(-1)


class _Seen:
    """What went by in a round: the scores drafted from, those of the target, and then the chances of all drafts."""

    draft: Tensor
    target: Tensor

    def __init__(self) -> None:
        self.chances: list[Tensor] = []


class _Target(Target):
    def __init__(self, target: Target, seen: _Seen) -> None:
        super().__init__(target.network)
        self._seen = seen

    def logits(self, hidden: Tensor) -> Tensor:
        self._seen.target = super().logits(hidden)
        return self._seen.target


class _Drafter(DSparkDrafter):
    def __init__(self, drafter: DSparkDrafter, seen: _Seen) -> None:
        super().__init__(drafter.network, slots="anchor-first")
        self._seen = seen

    def propose(self, *args: Any, **options: Any) -> Draft:
        draft = super().propose(*args, **{**options, "return_logits": True})
        assert draft.logits is not None
        self._seen.draft = draft.logits
        return draft if options["return_logits"] else draft._replace(logits=None)


class _Recorder(TraceRecorder):
    """Keeps the chances of the rounds that a trace keeps."""

    def __init__(self, domains: dict[int, str], seen: _Seen, rule: Rule) -> None:
        super().__init__(domains)
        self._seen, self._rule = seen, rule
        self.order: list[tuple[int, int]] = []
        self._rounds_of: dict[int, int] = {}

    def record(self, signals: Any, outcome: Outcome, **options: Any) -> None:
        super().record(signals, outcome, **options)
        begin = 0
        for i, (request, length) in enumerate(zip(outcome.request_ids, outcome.lengths.tolist(), strict=True)):
            number = self._rounds_of.get(request, 0)
            self._rounds_of[request] = number + 1
            if signals is not None and length == signals.draft_len:
                p = self._seen.target[begin : begin + length].double().softmax(-1)
                q = self._seen.draft[i].double().softmax(-1)
                self.order.append((request, number))
                self._seen.chances.append(
                    coupled_chance(p, q) if self._rule == "coupled" else torch.minimum(p, q).sum(-1)
                )
            begin += length + 1


def traces(rule: Rule, max_tokens: int) -> tuple[Trace, Trace]:
    """Rounds of the tiny pair at temperature 1: with the head's confidences, and with the true chances."""
    target, drafter = tiny_pair()
    tokenizer, texts = load_tokenizer(), held_out_prompts()
    prompts = [tokenizer.encode(text.text).ids for text in texts]
    seen = _Seen()
    recorder = _Recorder({i: text.domain for i, text in enumerate(texts)}, seen, rule)
    decoder = Decoder(
        _Target(target, seen),
        _Drafter(drafter, seen),
        FixedK(drafter.block_size),
        rule,
        num_pages=2048,
        recorder=recorder,
    )
    decoder.generate(prompts, [SamplingParams(1.0, seed=i, max_tokens=max_tokens) for i in range(len(prompts))])
    head = recorder.trace()
    order = sorted(range(len(recorder.order)), key=recorder.order.__getitem__)
    chances = torch.stack([seen.chances[i] for i in order]).clamp(0, 1).float().numpy()
    return head, head._replace(confidence=chances)


def ranking(trace: Trace) -> float:
    """AUC of the confidences of drafts whose predecessors were accepted."""
    assert trace.confidence is not None
    slot = np.arange(trace.draft_len)
    reached = slot <= trace.accepted[:, None]
    accepted = (slot < trace.accepted[:, None])[reached]
    return float(area_under_curve(torch.from_numpy(trace.confidence[reached]), torch.from_numpy(accepted)))


def closed(trace: Trace, concurrency: Sequence[int]) -> dict[int, list[float]]:
    """Tokens per second by load: the best fixed length, the scheduler, the sound oracle, the oracle."""
    results = simulated(trace, policies=(*FIXED, "gated:scheduled"), concurrency=concurrency)
    speed = {(r.concurrency, r.policy): r.tokens_per_s for r in results}
    rest = ("gated:scheduled", "oracle-sound", "oracle")
    return {c: [max(speed[c, k] for k in FIXED), *(speed[c, name] for name in rest)] for c in concurrency}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 64, 128, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| rule | concurrency | best fixed:k | head | true chances | oracle-sound | oracle |",
        "|---|" + "---:|" * 6,
    ]
    for rule in ("coupled", "ratio"):
        head, truth = traces(rule, options.max_tokens)  # type: ignore[arg-type]
        sys.stdout.write(
            f"{rule}, T = 1: AUC of the head {ranking(head):.3f}, of the true chances {ranking(truth):.3f}\n"
        )
        by_head, by_truth = closed(head, options.concurrency), closed(truth, options.concurrency)
        for c in options.concurrency:
            best, scheduled, sound, oracle = by_head[c]
            cells = [rule, c, *(f"{v:.0f}" for v in (best, scheduled, by_truth[c][1], sound, oracle))]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
