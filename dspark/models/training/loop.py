"""The loop that both trainings share: schedule, optimiser, and checkpoints that a stopped run resumes from."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Training:
    """Hyper-parameters of a run.

    Attributes:
        steps: optimiser steps; the learning rate ends at 5 % of ``peak_rate``.
        batch: sequences per step.
        peak_rate, warmup: learning rate at its highest, and the steps it takes to get there.
        weight_decay: AdamW's, on matrices only.
        seed: of initialisation and of the data's order.
        save_every: steps between checkpoints.
    """

    steps: int = 2400
    batch: int = 4
    peak_rate: float = 2e-3
    warmup: int = 150
    weight_decay: float = 0.1
    seed: int = 0
    save_every: int = 100


@dataclass(frozen=True)
class StepLog:
    """What a step reports: its loss, the gradient norm before clipping, the learning rate, and (for a drafter) the
    mean acceptance 1 - TV at each position of a block."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    acceptance: tuple[float, ...] = ()


@dataclass(frozen=True)
class Losses:
    """A batch's loss to differentiate, and a drafter's mean acceptance by position to watch, ``[G]`` or None."""

    total: Tensor
    acceptance: Tensor | None = None


def run_training(
    network: nn.Module, losses: Callable[[int], Losses], t: Training, checkpoint: Path
) -> Iterator[StepLog]:
    """Train ``network`` in place, yielding after every step; resumes from ``checkpoint`` if it exists.

    Args:
        network: parameters that do not require gradients stay as they are.
        losses: the loss of step ``i``, a pure function of the step and the parameters, so that a resumed run goes on
            as if it had not stopped.
        t: hyper-parameters.
        checkpoint: file that the run's state is kept in.

    Raises:
        FloatingPointError: the gradients are no longer finite.
    """
    wanted = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in wanted if p.ndim >= 2], "weight_decay": t.weight_decay},
        {"params": [p for p in wanted if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
    for step in range(_restore(checkpoint, network, optimizer), t.steps):
        loss = losses(step)
        torch.autograd.backward(loss.total)
        norm = float(nn.utils.clip_grad_norm_(wanted, 1.0))
        if not math.isfinite(norm):
            raise FloatingPointError(f"training diverged at step {step}: gradient norm {norm}")
        rate = learning_rate(step, t)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % t.save_every == 0 or step + 1 == t.steps:
            _save(checkpoint, network, optimizer, step + 1)
        acceptance = () if loss.acceptance is None else tuple(loss.acceptance.tolist())
        yield StepLog(step, loss.total.item(), norm, rate, acceptance)


def learning_rate(step: int, t: Training) -> float:
    """Linear warm-up, then a cosine down to 5 % of the peak at the last step."""
    if step < t.warmup:
        return t.peak_rate * (step + 1) / t.warmup
    progress = min(1.0, (step - t.warmup) / max(1, t.steps - t.warmup))
    return t.peak_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def initialise(network: nn.Module, seed: int, std: float = 0.02) -> None:
    """Draw every matrix from a normal distribution; norms and biases keep their constants."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=std, generator=generator)


def _save(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    partial = path.with_suffix(".partial")  # a run stopped while writing keeps the previous checkpoint
    torch.save({"module": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    os.replace(partial, path)


def _restore(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
