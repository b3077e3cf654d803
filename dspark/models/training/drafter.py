"""Training of a DSpark drafter for a frozen target, with the paper's three losses (section 3.3).

Random anchors cut blocks out of texts that the target wrote. A block sees the target's features of everything before
its anchor, and the sequential head is teacher-forced. What is learnt is the frozen target's own distribution there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.draft_network import DrafterConfig, DSparkNetwork
from dspark.models.training.loop import Losses, StepLog, Training, initialise, run_training
from dspark.models.training.target import TINY_TARGET_SHAPE, causal_attend, dense_attention
from dspark.models.transformer import CausalLM
from dspark.ops.draft import sequential_step
from dspark.ops.types import ConfidenceHead

_MAX_LOG_ODDS = 30.0
"""No draft of so small a chance is accepted, and float32 holds its reciprocal."""

TINY_DRAFTER_SHAPE = DrafterConfig(
    model=dataclasses.replace(TINY_TARGET_SHAPE, num_hidden_layers=2, layer_windows=(), tie_word_embeddings=False),
    block_size=7,
    mask_token_id=1,
    target_layer_ids=(1, 4, 6),
    num_target_layers=TINY_TARGET_SHAPE.num_hidden_layers,
    markov_rank=128,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)


@dataclass(frozen=True)
class DrafterTraining(Training):
    """Hyper-parameters of the drafter's training.

    Attributes:
        anchors: blocks cut out of each sequence.
        ce_weight, tv_weight, confidence_weight: weights of the cross-entropy, the total variation (L1) and the
            confidence loss.
        coupled_weight: weight of the chance that rule ``coupled`` rejects; the paper has no such loss.
    """

    steps: int = 7200
    batch: int = 4
    peak_rate: float = 1.5e-3
    weight_decay: float = 0.05
    seed: int = 1
    anchors: int = 48
    ce_weight: float = 0.1
    tv_weight: float = 0.9
    confidence_weight: float = 1.0
    coupled_weight: float = 0.0


def new_drafter(config: DrafterConfig, target: CausalLM, seed: int) -> DSparkNetwork:
    """A drafter to train: the target's embedding and head (frozen), final norm and last layers; the rest is random."""
    net = DSparkNetwork(config)
    initialise(net, seed)
    last = list(target.model.layers)[-config.model.num_hidden_layers :]
    copies = [
        (net.embed_tokens, target.model.embed_tokens),
        (net.lm_head, target.lm_head),
        (net.norm, target.model.norm),
    ]
    for own, given in [*copies, *zip(net.layers, last, strict=True)]:
        own.load_state_dict(given.state_dict())
    return trainable(net)


def trainable(network: DSparkNetwork) -> DSparkNetwork:
    """Ready a drafter, new or loaded, for training: all of it learns but the embedding and the head of the target."""
    network.requires_grad_(True)
    network.embed_tokens.requires_grad_(False)
    network.lm_head.requires_grad_(False)
    return network


@dataclass(frozen=True)
class Rollouts:
    """What a target wrote: the texts that its drafter learns from.

    Attributes:
        tokens: ``[n, L]`` int64, each a prompt and its continuation.
        prompt_len: tokens of each prompt.
        temperature: ``[n]`` float32 that each continuation was sampled at.
    """

    tokens: Tensor
    prompt_len: int
    temperature: Tensor


def block_losses(
    net: DSparkNetwork, target: CausalLM, tokens: Tensor, anchors: Tensor, temperature: Tensor, t: DrafterTraining
) -> Losses:
    """The paper's loss on blocks that start at ``anchors``.

    Args:
        net: the drafter.
        target: the frozen target.
        tokens: ``[B, L]`` text.
        anchors: ``[B, A]`` positions in ``0 .. L - G - 1``.
        temperature: ``[B]`` that each text is learnt at; at 0 the target's distribution is its largest logit.
        t: the loss weights.
    """
    config = net.config
    batch, length = tokens.shape
    count, block = anchors.shape[1], config.block_size
    with torch.no_grad():
        positions = torch.arange(length).expand(batch, -1)
        hidden, features = target(tokens, positions, causal_attend, config.target_layer_ids)
        target_logits = target.logits(hidden)  # [B, L, V]

    row = torch.arange(batch)[:, None, None]
    at = anchors[:, :, None] + torch.arange(block)  # [B, A, G], position of the token that precedes each draft
    context_kv = net.context_kv(net.context(features), positions)
    mask = _block_mask(anchors, length, block)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context_k, context_v = context_kv[layer]  # [B, L, Hkv, D]
        return dense_attention(q, torch.cat([context_k, k], dim=1), torch.cat([context_v, v], dim=1), attn_mask=mask)

    inputs = torch.full((batch, count, block), config.mask_token_id)
    inputs[:, :, 0] = tokens[row[..., 0], anchors]
    hidden = net.block(inputs.flatten(1), at.flatten(1), attend).view(batch, count, block, -1)  # [B, A, G, h]
    previous = tokens[row, at]  # [B, A, G]
    logits = net.lm_head(hidden) + _teacher_forced_bias(net, previous, hidden)

    log_q = logits.log_softmax(-1)
    scale = temperature[:, None, None, None]
    p = _at_temperature(target_logits[row, at], scale)
    distance = (log_q.exp() - p).abs().sum(-1)  # [B, A, G], L1
    cross_entropy = F.nll_loss(log_q.flatten(0, 2), tokens[row, at + 1].flatten(), reduction="none").view_as(distance)
    weight = torch.exp(-torch.arange(block) / block)
    weight = weight / weight.sum()
    loss = t.ce_weight * cross_entropy + t.tv_weight * distance
    if t.coupled_weight:
        loss = loss + t.coupled_weight * (1 - coupled_acceptance(log_q, p, tokens[row, at + 1]))
    total = (loss * weight).sum(-1).mean()
    # What decoding would see: there the draft is sampled at the same temperature.
    acceptance = 1 - 0.5 * (_at_temperature(logits.detach(), scale) - p).abs().sum(-1)
    confidence = net.confidence()
    if confidence is not None:
        total = total + t.confidence_weight * _confidence_loss(confidence, hidden, previous, acceptance, weight)
    return Losses(total, acceptance.mean((0, 1)))


def coupled_acceptance(log_q: Tensor, p: Tensor, token: Tensor) -> Tensor:
    """An unbiased estimate ``[...]`` of the chance that rule ``coupled`` accepts a draft.

    With the same Gumbel noise, p and q both draw token x with chance ``1 / sum_y max(p_y / p_x, q_y / q_x)`` (Daliri,
    Musco and Suresh, arXiv 2408.07978). The sum over x is the mean, over x drawn from p, of that chance over ``p_x``.

    Args:
        log_q: ``[..., V]`` log-probabilities of the drafter; the estimate is differentiable in them.
        p: ``[..., V]`` probabilities of the target.
        token: ``[...]`` int64, drawn from p.
    """
    at = token[..., None]
    p_token = p.gather(-1, at)
    odds = (log_q - log_q.gather(-1, at)).clamp(max=_MAX_LOG_ODDS).exp()  # q_y / q_x
    return 1 / torch.maximum(p, p_token * odds).sum(-1)


def _at_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """``softmax(logits / temperature)``, which is the largest logit alone at temperature 0."""
    greedy = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return torch.where(temperature > 0, (logits / temperature.clamp(min=1e-6)).softmax(-1), greedy)


def _block_mask(anchors: Tensor, length: int, block: int) -> Tensor:
    """``[B, 1, A*G, L + A*G]``: a block sees the context before its anchor, and all of itself."""
    batch, count = anchors.shape
    before = torch.arange(length) < anchors[:, :, None]  # [B, A, L]
    own = torch.eye(count, dtype=torch.bool).repeat_interleave(block, 0).repeat_interleave(block, 1)  # [A*G, A*G]
    seen = torch.cat([before.repeat_interleave(block, 1), own.expand(batch, -1, -1)], dim=-1)
    return seen[:, None]


def _teacher_forced_bias(net: DSparkNetwork, previous: Tensor, hidden: Tensor) -> Tensor | float:
    """The head's bias ``[B, A, G, V]`` when every previous token is the text's own."""
    head = net.sequential_head()
    if head is None:
        return 0.0
    biases, state = [], None
    for k in range(previous.shape[-1]):
        bias, state = sequential_step(head, previous[..., k].flatten(), hidden[..., k, :].flatten(0, 1), state)
        biases.append(bias.view(*previous.shape[:2], -1))
    return torch.stack(biases, dim=-2)


def _confidence_loss(
    head: ConfidenceHead, hidden: Tensor, previous: Tensor, acceptance: Tensor, weight: Tensor
) -> Tensor:
    """Binary cross-entropy against the expected acceptance (eq. 8)."""
    features = hidden if head.w1 is None else torch.cat([hidden, F.embedding(previous, head.w1)], dim=-1)
    logit = features @ head.weight + head.bias
    loss = F.binary_cross_entropy_with_logits(logit, acceptance, reduction="none")
    return (loss * weight).sum(-1).mean()


def train_drafter(
    network: DSparkNetwork, target: CausalLM, rollouts: Rollouts, checkpoint: Path, t: DrafterTraining
) -> Iterator[StepLog]:
    """Train a drafter for a frozen target, yielding after every step; see :func:`run_training`.

    Each step cuts ``t.anchors`` blocks out of the continuations of ``t.batch`` rollouts.
    """
    count, length = rollouts.tokens.shape
    first, last = rollouts.prompt_len - 1, length - network.config.block_size - 1

    def losses(step: int) -> Losses:
        random = np.random.default_rng((t.seed, step))
        chosen = torch.from_numpy(random.choice(count, t.batch, replace=False))
        order = torch.from_numpy(random.random((t.batch, last - first + 1)).argsort(-1))
        anchors = first + order[:, : t.anchors]
        return block_losses(network, target, rollouts.tokens[chosen], anchors, rollouts.temperature[chosen], t)

    return run_training(network, losses, t, checkpoint)
