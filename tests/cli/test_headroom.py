"""The chances that the headroom script computes, against counted draws."""

from __future__ import annotations

import pytest
import torch

from benchmarks.headroom import coupled_chance, ranking, traces
from dspark.ops.philox import gumbel
from dspark.ops.types import Stream
from tests.tolerances import SIGMAS


def test_the_coupled_chance_is_how_often_two_draws_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 5, generator=generator, dtype=torch.float64).pow(2).unbind()
    p, q = p / p.sum(), q / q.sum()
    noise = gumbel(torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64), 5, Stream.TARGET)
    agree = ((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).double()
    chance = float(coupled_chance(p, q))
    assert abs(float(agree.mean()) - chance) < SIGMAS * (chance * (1 - chance) / len(agree)) ** 0.5
    distance = float((p - q).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) <= chance <= 1 - distance
    assert float(coupled_chance(p, p)) == pytest.approx(1)
    sure = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert coupled_chance(torch.stack([sure, sure]), torch.stack([sure, sure.flip(0)])).tolist() == [1, 0]


def test_true_chances_rank_drafts_better_than_the_head() -> None:
    head, truth = traces("coupled", max_tokens=24)
    assert head.accepted.tolist() == truth.accepted.tolist()
    assert ranking(truth) > ranking(head)
