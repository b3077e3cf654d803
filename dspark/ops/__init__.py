"""Ops: one public function per capability, each with a torch reference that is its executable specification."""

from dspark.ops.accept import accept, accept_workspace
from dspark.ops.attention import attention_workspace, verify_attention
from dspark.ops.cache import append_kv, commit_kv, copy_pages, rope_append_kv
from dspark.ops.draft.certified import CertifiedDraft, draft_walk_certified
from dspark.ops.draft.certified_table import BiasTable, build_bias_table, cached_bias_table
from dspark.ops.draft.tree import draft_tree, draft_tree_workspace
from dspark.ops.draft.walk import draft_walk, draft_walk_workspace
from dspark.ops.draft.walk_inputs import DraftVocabulary, WalkTables, build_walk_tables
from dspark.ops.sample import sample, sample_workspace, truncate
from dspark.ops.sample.process import count_tokens, process_logits
from dspark.ops.schedule import schedule_prefix, schedule_workspace
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
    Rows,
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

__all__ = [
    "Backend",
    "BiasTable",
    "CertifiedDraft",
    "ConfidenceHead",
    "DenseQ",
    "Draft",
    "DraftDistribution",
    "DraftVocabulary",
    "GatedHead",
    "Logprobs",
    "MarkovHead",
    "PagedKV",
    "PointMass",
    "Processors",
    "QueryBatch",
    "RNNHead",
    "Rows",
    "Rule",
    "Sampling",
    "SequentialHead",
    "SparseQ",
    "Status",
    "Stream",
    "Tree",
    "TreeDraft",
    "Verdict",
    "WalkTables",
    "accept",
    "accept_workspace",
    "append_kv",
    "attention_workspace",
    "build_bias_table",
    "build_walk_tables",
    "cached_bias_table",
    "commit_kv",
    "copy_pages",
    "count_tokens",
    "draft_tree",
    "draft_tree_workspace",
    "draft_walk",
    "draft_walk_certified",
    "draft_walk_workspace",
    "process_logits",
    "rope_append_kv",
    "sample",
    "sample_workspace",
    "schedule_prefix",
    "schedule_workspace",
    "truncate",
    "verify_attention",
]
