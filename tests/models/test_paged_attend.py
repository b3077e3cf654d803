"""A whole small model on the ops' kernels, in Triton's interpreter, beside the same model on the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.models import ModelConfig
from dspark.models.cache import PagedCache, append_layers, paged_attend, query_batch
from dspark.models.transformer import CausalLM
from dspark.ops.types import Backend
from tests.models.helpers import poison, scattered_table
from tests.small import small_model
from tests.tolerances import LOGITS


def run(
    network: CausalLM, cache: PagedCache, tokens: Tensor, lengths: list[int], start: int, backend: Backend
) -> Tensor:
    """Hidden states of rows that follow ``start`` committed tokens of each request."""
    config: ModelConfig = network.config
    table = scattered_table(len(lengths), 24, cache.page_size)
    batch = query_batch(table, torch.full((len(lengths),), start), lengths, cache.page_size)
    attend = paged_attend(cache, batch, config.windows, backend=backend)
    with torch.no_grad():
        hidden: Tensor = network(tokens, batch.positions, attend, ())[0]
    return hidden


@pytest.mark.triton
def test_prefill_and_verification_on_the_kernels() -> None:
    torch.manual_seed(0)
    network = CausalLM(small_model(29, num_hidden_layers=2, layer_windows=(0, 5))).eval()
    tokens = torch.randint(29, (8,))
    states: dict[Backend, list[Tensor]] = {"reference": [], "triton": []}
    for backend, found in states.items():
        cache = poison(PagedCache.allocate(network.config, 14, 4, torch.float32, "cpu"))
        found.append(run(network, cache, tokens, [4, 4], 0, backend))
        found.append(run(network, cache, tokens[:3], [2, 1], 4, backend))
    for expected, hidden in zip(states["reference"], states["triton"], strict=True):
        torch.testing.assert_close(network.logits(hidden), network.logits(expected), atol=LOGITS, rtol=0)


@pytest.mark.triton
def test_layers_are_written_alike() -> None:
    caches = []
    for backend in ("reference", "triton"):
        cache = poison(PagedCache.allocate(small_model(29), 3, 4, torch.float32, "cpu"))
        generator = torch.Generator().manual_seed(0)
        rows = [
            (torch.randn(3, 1, 8, generator=generator), torch.randn(3, 1, 8, generator=generator)) for _ in range(3)
        ]
        append_layers(cache, rows, torch.tensor([5, -1, 11]), backend=backend)  # type: ignore[arg-type]
        caches.append(cache.stacked)
    for name in ("k", "v"):
        expected, written = (getattr(stacked, name).nan_to_num(7.0) for stacked in caches)
        assert torch.equal(expected, written)
        assert (expected != 7.0).sum() == 3 * 2 * 8


def test_the_backend_is_checked() -> None:
    network = CausalLM(small_model(29))
    cache = PagedCache.allocate(network.config, 14, 4, torch.float32, "cpu")
    with pytest.raises(ValueError, match="backend"):
        run(network, cache, torch.tensor([1]), [1], 0, "cuda")  # type: ignore[arg-type]
