"""Declarations of the groups of arguments that several ops take, and what tables cannot say of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dspark.ops.call import FLOAT8, FLOATS, INTS, GroupArg, ScalarArg, TensorArg
from dspark.ops.types import (
    DenseQ,
    GatedHead,
    MarkovHead,
    PagedKV,
    PointMass,
    QueryBatch,
    RNNHead,
    Rows,
    Sampling,
    SequentialHead,
    SparseQ,
    Tree,
    Verdict,
)

CACHE_DTYPES = (*FLOATS, FLOAT8)

SAMPLING = GroupArg(
    {
        Sampling: {
            "temperature": TensorArg("R", (torch.float32,), layout="dense"),
            "top_k": TensorArg("R", (torch.int64,), layout="dense"),
            "top_p": TensorArg("R", (torch.float32,), layout="dense"),
            "min_p": TensorArg("R", (torch.float32,), layout="dense"),
            "seed": TensorArg("R", (torch.int64,), layout="dense"),
            "all_greedy": ScalarArg("bool"),
            "any_truncation": ScalarArg("bool"),
        }
    }
)

ROWS = GroupArg(
    {
        Rows: {
            "tokens": TensorArg("T", (torch.int64,), layout="dense"),
            "query_start": TensorArg("R+1", (torch.int64,), layout="dense"),
            "position": TensorArg("R", (torch.int64,), layout="dense"),
            "max_query_len": ScalarArg("SymInt", least=1, symbol="N"),
        }
    }
)

_MARKOV = {"w1": TensorArg("V1 r", FLOATS, layout="rows"), "w2": TensorArg("V r", FLOATS, layout="rows")}
_GATED = {
    "gate_weight": TensorArg("r h+r", FLOATS, layout="rows"),
    "gate_bias": TensorArg("r", FLOATS, layout="dense"),
}
_RNN = {
    "joint_weight": TensorArg("3r 2r+h", FLOATS, layout="rows"),
    "joint_bias": TensorArg("3r", FLOATS, layout="dense"),
}
MARKOV_HEAD = GroupArg({MarkovHead: _MARKOV})
HEAD = GroupArg({MarkovHead: _MARKOV, GatedHead: _MARKOV | _GATED, RNNHead: _MARKOV | _RNN}, optional=True)
"""``V1`` is the number of W1's rows: ``V`` where the drafter's vocabulary is the target's."""

_DENSE_Q = {
    "logits": TensorArg("R G Vd", FLOATS, layout="rows"),
    "draft_ids": TensorArg("V", (torch.int32,), optional=True, layout="dense"),
}
_SPARSE_Q = {
    "tokens": TensorArg("R G K", (torch.int64,), layout="rows"),
    "logprobs": TensorArg("R G K", (torch.float32,), layout="rows"),
}
Q = GroupArg({DenseQ: _DENSE_Q, SparseQ: _SPARSE_Q, PointMass: {}}, optional=True)
Q_OF_TREES = GroupArg({DenseQ: _DENSE_Q}, optional=True)

TREE = GroupArg(
    {
        Tree: {
            "tokens": TensorArg("R N", (torch.int64,), layout="dense"),
            "parents": TensorArg("R N", (torch.int64,), layout="dense"),
            "ancestors": TensorArg("R N | R N W", (torch.int64,), layout="dense"),
            "depth": TensorArg("R N", (torch.int64,), layout="dense"),
            "num_nodes": TensorArg("R", (torch.int64,), layout="dense"),
        }
    }
)

VERDICT = GroupArg(
    {
        Verdict: {
            "tokens": TensorArg("R N", (torch.int64,), written=True, layout="contiguous"),
            "num_emitted": TensorArg("R", (torch.int64,), written=True, layout="contiguous"),
            "path": TensorArg("R N", (torch.int64,), written=True, layout="contiguous"),
            "logprobs": TensorArg("R N", (torch.float32,), written=True, layout="contiguous"),
            "status": TensorArg("R", (torch.int64,), written=True, layout="contiguous"),
        }
    },
    optional=True,
)


QUERY_BATCH = GroupArg(
    {
        QueryBatch: {
            "query_start": TensorArg("R+1", INTS, layout="dense"),
            "context_len": TensorArg("R", INTS, layout="dense"),
            "block_table": TensorArg("R B", INTS, layout="rows"),
            "positions": TensorArg("T", INTS, layout="dense"),
            "slots": TensorArg("T", INTS),
            "ancestors": TensorArg("T | T W", (torch.int64,), optional=True, layout="dense"),
            "max_query_len": ScalarArg("SymInt", least=0, symbol="Q"),
        }
    }
)


def pages(shape: str = "P S Hkv D", *, written: bool = False) -> GroupArg:
    """The pages of a layer, or of a stack of them."""
    return GroupArg(
        {
            PagedKV: {
                "k": TensorArg(shape, CACHE_DTYPES, written=written, layout="rows"),
                "v": TensorArg(shape, "kv.k", written=written, layout="rows"),
                "k_scale": TensorArg("Hkv", (torch.float32,), optional=True, layout="dense"),
                "v_scale": TensorArg("Hkv", (torch.float32,), optional=True, layout="dense"),
            }
        }
    )


def check_scales(kv: PagedKV) -> None:
    """Check that a cache has both scales or none, and none unless it is of float8.

    Raises:
        ValueError: it does not.
    """
    for name, scale, other in (("k_scale", kv.k_scale, kv.v_scale), ("v_scale", kv.v_scale, kv.k_scale)):
        if scale is None and other is not None:
            raise ValueError(f'kv.{name}: expected shape "Hkv", as the other scale has, got None')
        if scale is not None and kv.k.dtype is not FLOAT8:
            raise ValueError(f"kv.{name}: only a float8_e4m3fn cache has scales, got pages of {kv.k.dtype}")


def num_words(num_nodes: int) -> int:
    """Words of 64 bits that a node's ancestors take."""
    return -(-num_nodes // 64)


def check_ancestors(tree: Tree) -> None:
    """Check that a tree's ancestors have as many words as its nodes need, and no axis for a single one.

    Raises:
        ValueError: they do not.
    """
    words, shape = num_words(tree.tokens.shape[1]), list(tree.ancestors.shape)
    if shape[2:] != ([] if words == 1 else [words]):
        expected = '"R N"' if words == 1 else f'"R N W" with W = {words}'
        raise ValueError(f"tree.ancestors: expected shape {expected}, got {shape}")


def check_head(sizes: Mapping[str, int], head: SequentialHead | None, hidden: Tensor | None, rows: int) -> None:
    """Check that W1 has so many rows, and that a head which reads hidden states has them.

    Raises:
        ValueError: it is not so.
    """
    if head is not None and sizes["V1"] != rows:
        raise ValueError(f'head.w1: expected shape "V1 r" with V1 = {rows}, got {list(head.w1.shape)}')
    if isinstance(head, GatedHead | RNNHead) and hidden is None:
        raise ValueError(f'hidden: {type(head).__name__} needs the block\'s hidden states "R G h", got None')
