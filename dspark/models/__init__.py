"""Models: paged targets, drafters, checkpoints and the embedded tiny pair."""

from dspark.models.cache import PagedCache, PagePool, query_batch
from dspark.models.config import ModelConfig
from dspark.models.draft_network import DrafterConfig
from dspark.models.drafter import Drafter, DSparkDrafter
from dspark.models.loading import load_drafter, load_target
from dspark.models.target import Target
from dspark.models.tiny import held_out_prompts, load_tokenizer, tiny_pair

__all__ = [
    "DSparkDrafter",
    "Drafter",
    "DrafterConfig",
    "ModelConfig",
    "PagePool",
    "PagedCache",
    "Target",
    "held_out_prompts",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "query_batch",
    "tiny_pair",
]
