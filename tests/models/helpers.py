"""Small random models of transformers, the same models of ours, and pages for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dspark.models.cache import PagedCache
from dspark.models.config import ModelConfig
from dspark.models.target import Target
from dspark.models.transformer import CausalLM
from tests.tolerances import LOGITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Rotary parameters, but for ``rope_theta`` and the original length."""


def random_hf_model(model_type: str, changes: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A transformers model with every parameter random, norms and biases included."""
    import transformers  # slow, and the golden tests use this module without it

    config = transformers.AutoConfig.for_model(model_type, **{**BASE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.data = centre + 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def as_target(model: PreTrainedModel) -> Target:
    """The same weights in our network, without a file in between."""
    network = CausalLM(ModelConfig.from_hf(model.config.to_dict()))
    network.load_state_dict(model.state_dict())
    return Target(network)


def scattered_table(requests: int, tokens: int, page_size: int, seed: int = 0) -> Tensor:
    """Block table ``[R, B]`` with room for ``tokens`` each, pages in random order; page 0 belongs to nobody."""
    columns = -(-tokens // page_size)
    order = torch.randperm(requests * columns, generator=torch.Generator().manual_seed(seed))
    return (order + 1).view(requests, columns)


def poison(cache: PagedCache) -> PagedCache:
    """Fill a cache with NaN, so that whoever reads what was not written fails."""
    for kv in cache.layers:
        kv.k.fill_(float("nan"))
        kv.v.fill_(float("nan"))
    return cache


def close(got: Tensor, expected: Tensor, nan: bool = False) -> None:
    """Equal but for the order of float32 sums; with ``nan``, not a number where that is expected."""
    torch.testing.assert_close(got, expected, rtol=0, atol=LOGITS, equal_nan=nan)
