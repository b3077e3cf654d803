"""Declarations of the groups of arguments that several ops take, and what tables cannot say of them."""

from __future__ import annotations

import torch

from dspark.ops.call import FLOAT8, FLOATS, INTS, GroupArg, ScalarArg, TensorArg
from dspark.ops.types import PagedKV, QueryBatch, Rows, Sampling

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
