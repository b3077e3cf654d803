"""Ops: one public function per capability, each with a torch reference that is its executable specification."""

from dspark.ops.accept import accept, accept_workspace
from dspark.ops.attention import verify_attention
from dspark.ops.cache import append_kv
from dspark.ops.process import count_tokens, process_logits
from dspark.ops.sample import sample, sample_workspace, truncate
from dspark.ops.schedule import schedule_prefix
from dspark.ops.types import (
    Backend,
    ConfidenceHead,
    DenseQ,
    Draft,
    DraftDistribution,
    GatedHead,
    Logprobs,
    MarkovHead,
    PagedKV,
    PointMass,
    Processors,
    QueryBatch,
    RNNHead,
    Rule,
    Sampling,
    SequentialHead,
    SparseQ,
    Status,
    Stream,
    Verdict,
)
from dspark.ops.walk import draft_walk

__all__ = [
    "Backend",
    "ConfidenceHead",
    "DenseQ",
    "Draft",
    "DraftDistribution",
    "GatedHead",
    "Logprobs",
    "MarkovHead",
    "PagedKV",
    "PointMass",
    "Processors",
    "QueryBatch",
    "RNNHead",
    "Rule",
    "Sampling",
    "SequentialHead",
    "SparseQ",
    "Status",
    "Stream",
    "Verdict",
    "accept",
    "accept_workspace",
    "append_kv",
    "count_tokens",
    "draft_walk",
    "process_logits",
    "sample",
    "sample_workspace",
    "schedule_prefix",
    "truncate",
    "verify_attention",
]
