"""How good a pair is on held-out text: the figures of its model card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dspark.cli.report import acceptance_by_position
from dspark.decode import Decoder, SamplingParams, mean_emitted
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.models.training.corpus import PROMPT_TOKENS, Document
from dspark.models.training.target import language_model_loss
from dspark.policy import FixedK, Outcome, Signals
from dspark.policy.reliability import area_under_curve

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NEW_TOKENS = 160


@dataclass(frozen=True)
class DraftQuality:
    """Drafting at one temperature (``coupled``, full block): mean tokens per round, conditional acceptance by position,
    and how well confidence ranks the drafts that were accepted above those that were not."""

    temperature: float
    tau: float
    accept_by_position: list[float | None]
    confidence_auc: float
    rounds: int


class _Recorder(FixedK):
    """Verifies everything and keeps, for every draft whose predecessors were accepted, its confidence and fate."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self._shown: Tensor | None = None
        self.confidence: list[Tensor] = []
        self.accepted: list[Tensor] = []

    def plan(self, signals: Signals) -> Tensor:
        if signals.confidence is None:
            raise ValueError("confidence: the drafter has no confidence head, so there is none to evaluate")
        self._shown = signals.confidence
        return super().plan(signals)

    def observe(self, outcome: Outcome) -> None:
        shown, self._shown = self._shown, None
        if shown is None:  # the last token of every request: nothing was drafted
            return
        slot = torch.arange(shown.shape[1])
        accepted = slot < outcome.accepted[:, None]  # [R, G]
        reached = (slot <= outcome.accepted[:, None]) & (slot < outcome.lengths[:, None])
        self.confidence.append(shown[reached])
        self.accepted.append(accepted[reached])


def evaluate(
    target: Target, drafter: DSparkDrafter, tokenizer: Tokenizer, docs: Sequence[Document], prompts_per_domain: int
) -> dict[str, Any]:
    """Held-out loss and draft quality, for each domain apart.

    Args:
        target, drafter, tokenizer: the pair.
        docs: held-out documents.
        prompts_per_domain: texts to continue, taken evenly over the documents.
    """
    result: dict[str, Any] = {}
    for domain in ("code", "prose"):
        chosen = [d for d in docs if d.domain == domain]
        encoded = [tokenizer.encode(d.text).ids for d in chosen]
        num_bytes = sum(len(d.text.encode()) for d in chosen)
        loss, count = _held_out_loss(target, encoded)
        starts = [(ids, i) for ids in encoded for i in range(0, len(ids) - PROMPT_TOKENS + 1, 2 * PROMPT_TOKENS)]
        segments = [ids[i : i + PROMPT_TOKENS] for ids, i in starts]
        prompts = segments[:: max(1, len(segments) // prompts_per_domain)][:prompts_per_domain]
        result[domain] = {
            "held_out_tokens": sum(map(len, encoded)),
            "loss_nats_per_token": loss,
            "bits_per_byte": loss * count / num_bytes / math.log(2),
            "prompts": len(prompts),
            "drafting": [asdict(draft_quality(target, drafter, prompts, t)) for t in (0.0, 1.0)],
        }
    return result


def draft_quality(
    target: Target, drafter: DSparkDrafter, prompts: Sequence[Sequence[int]], temperature: float
) -> DraftQuality:
    """Decode ``prompts`` with full blocks under ``coupled`` and sum up the rounds."""
    recorder = _Recorder(drafter.block_size)
    decoder = Decoder(target, drafter, recorder, "coupled")
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=NEW_TOKENS) for i in range(len(prompts))]
    rounds = [r for c in decoder.generate(prompts, params) for r in c.rounds]
    # The last rounds of a request verify fewer drafts than were proposed, and would pull τ down.
    full = [r for r in rounds if r.verified == drafter.block_size]
    return DraftQuality(
        temperature=temperature,
        tau=mean_emitted(full),
        accept_by_position=acceptance_by_position(rounds),
        confidence_auc=area_under_curve(torch.cat(recorder.confidence), torch.cat(recorder.accepted)),
        rounds=len(full),
    )


@torch.inference_mode()
def _held_out_loss(target: Target, encoded: Sequence[Sequence[int]], length: int = 512) -> tuple[float, int]:
    """Mean loss in nats per token over windows of ``length`` tokens, and the number of tokens predicted."""
    total, count = 0.0, 0
    for ids in encoded:
        for start in range(0, len(ids) - 1, length):
            window = torch.tensor([ids[start : start + length + 1]])
            predicted = window.shape[1] - 1
            total += float(language_model_loss(target.network, window)) * predicted
            count += predicted
    return total / count, count
