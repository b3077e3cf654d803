"""Ops: one public function per capability, each with a torch reference that is its executable specification."""

from dspark.ops.accept import accept, accept_workspace
from dspark.ops.attention import attention_workspace, verify_attention
from dspark.ops.cache import append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.process import count_tokens, process_logits
from dspark.ops.sample import sample, sample_workspace, truncate
from dspark.ops.schedule import schedule_prefix, schedule_workspace
from dspark.ops.tree import draft_tree
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
    Tree,
    TreeDraft,
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
    "Tree",
    "TreeDraft",
    "Verdict",
    "accept",
    "accept_workspace",
    "append_kv",
    "attention_workspace",
    "commit_kv",
    "copy_pages",
    "count_tokens",
    "draft_tree",
    "draft_walk",
    "process_logits",
    "rope_append_kv",
    "sample",
    "sample_workspace",
    "schedule_prefix",
    "schedule_workspace",
    "truncate",
    "verify_attention",
]
