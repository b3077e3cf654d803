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
from dataclasses import replace
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
from dspark.policy import Outcome
from dspark.policy.output import markdown_table
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


class _Target(Target):
    """Keeps the scores of the round."""

    scores: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        self.scores = super().logits(hidden)
        return self.scores


class _Drafter(DSparkDrafter):
    """Keeps the scores that the round's drafts were drawn from."""

    scores: Tensor

    def propose(self, *args: Any, **options: Any) -> Draft:
        draft = super().propose(*args, **{**options, "return_logits": True})
        assert draft.logits is not None
        self.scores = draft.logits
        return draft if options["return_logits"] else draft._replace(logits=None)


class _Recorder(TraceRecorder):
    """Computes the chances of the rounds that a trace keeps, by request and round."""

    def __init__(self, domains: dict[int, str], target: _Target, drafter: _Drafter, rule: Rule) -> None:
        super().__init__(domains)
        self._target, self._drafter, self._rule = target, drafter, rule
        self._rounds_of: dict[int, int] = {}
        self.chances: dict[tuple[int, int], Tensor] = {}

    def record(self, signals: Any, outcome: Outcome, **options: Any) -> None:
        super().record(signals, outcome, **options)
        begin = 0
        for i, (request, length) in enumerate(zip(outcome.request_ids, outcome.lengths.tolist(), strict=True)):
            number = self._rounds_of.get(request, 0)
            self._rounds_of[request] = number + 1
            if signals is not None and length == signals.draft_len:
                p = self._target.scores[begin : begin + length].double().softmax(-1)
                q = self._drafter.scores[i].double().softmax(-1)
                chance = coupled_chance(p, q) if self._rule == "coupled" else torch.minimum(p, q).sum(-1)
                self.chances[request, number] = chance
            begin += length + 1


def traces(rule: Rule, max_tokens: int) -> tuple[Trace, Trace]:
    """Rounds of the tiny pair at temperature 1: with the head's confidences, and with the true chances."""
    pair = tiny_pair()
    target, drafter = _Target(pair[0].network), _Drafter(pair[1].network, slots="anchor-first")
    tokenizer, texts = load_tokenizer(), held_out_prompts()
    prompts = [tokenizer.encode(text.text).ids for text in texts]
    recorder = _Recorder({i: text.domain for i, text in enumerate(texts)}, target, drafter, rule)
    decoder = Decoder(target, drafter, rule=rule, num_pages=2048, recorder=recorder)
    decoder.generate(prompts, [SamplingParams(1.0, seed=i, max_tokens=max_tokens) for i in range(len(prompts))])
    head = recorder.trace()
    chances = torch.stack([recorder.chances[key] for key in sorted(recorder.chances)])
    return head, replace(head, confidence=chances.clamp(0, 1).float().numpy())


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
    names = ["rule", "concurrency", "best fixed:k", "head", "true chances", "oracle-sound", "oracle"]
    rows = []
    for rule in ("coupled", "ratio"):
        head, truth = traces(rule, options.max_tokens)  # type: ignore[arg-type]
        sys.stdout.write(
            f"{rule}, T = 1: AUC of the head {ranking(head):.3f}, of the true chances {ranking(truth):.3f}\n"
        )
        by_head, by_truth = closed(head, options.concurrency), closed(truth, options.concurrency)
        for c in options.concurrency:
            best, scheduled, sound, oracle = by_head[c]
            speeds = best, scheduled, by_truth[c][1], sound, oracle
            rows.append([rule, str(c), *(f"{v:.0f}" for v in speeds)])
    sys.stdout.write("\n" + markdown_table(names, rows, "|---|" + "---:|" * 6))


if __name__ == "__main__":
    main()
