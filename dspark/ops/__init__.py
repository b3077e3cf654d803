"""Ops: one public function per capability, each with a torch reference that is its executable specification."""

from dspark.ops.accept import accept
from dspark.ops.attention import verify_attention
from dspark.ops.cache import append_kv
from dspark.ops.sample import sample, truncate
from dspark.ops.schedule import schedule_prefix
from dspark.ops.types import (
    Backend,
    ConfidenceHead,
    Draft,
    GatedHead,
    MarkovHead,
    PagedKV,
    QueryBatch,
    RNNHead,
    Rule,
    Sampling,
    SequentialHead,
    Status,
    Stream,
    Verdict,
)
from dspark.ops.walk import draft_walk

__all__ = [
    "Backend",
    "ConfidenceHead",
    "Draft",
    "GatedHead",
    "MarkovHead",
    "PagedKV",
    "QueryBatch",
    "RNNHead",
    "Rule",
    "Sampling",
    "SequentialHead",
    "Status",
    "Stream",
    "Verdict",
    "accept",
    "append_kv",
    "draft_walk",
    "sample",
    "schedule_prefix",
    "truncate",
    "verify_attention",
]
