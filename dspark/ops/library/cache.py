"""The ops on the paged cache as ``torch.ops.dspark.*``."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.cache_triton import RotaryRows
from dspark.ops.library.define import define
from dspark.ops.types import Backend, PagedKV

_SCHEMAS = {
    "append_kv": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? k_scale, "
    "Tensor? v_scale, str backend) -> ()",
    "rope_append_kv": "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    "Tensor? k_scale, Tensor? v_scale, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor(c!) out, str backend) -> ()",
    "commit_kv": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor path, Tensor num_emitted, Tensor query_start, "
    "Tensor slots, str backend) -> ()",
    "copy_pages": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor source, Tensor target, str backend) -> ()",
}


def append_kv_op(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor, backend: Backend) -> None:
    """:func:`dspark.ops.append_kv` as ``torch.ops.dspark.append_kv``; the backend is "reference" or "triton"."""
    torch.ops.dspark.append_kv(k, v, kv.k, kv.v, slots, kv.k_scale, kv.v_scale, backend)


def rope_append_kv_op(
    q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor, rotary: RotaryRows, out: Tensor, backend: Backend
) -> None:
    """:func:`dspark.ops.rope_append_kv` as ``torch.ops.dspark.rope_append_kv``."""
    torch.ops.dspark.rope_append_kv(
        q, k, v, kv.k, kv.v, slots, kv.k_scale, kv.v_scale,
        rotary.cos, rotary.sin, rotary.q_norm, rotary.k_norm, rotary.eps, out, backend,
    )  # fmt: skip


def commit_kv_op(
    kv: PagedKV, path: Tensor, num_emitted: Tensor, query_start: Tensor, slots: Tensor, backend: Backend
) -> None:
    """:func:`dspark.ops.commit_kv` as ``torch.ops.dspark.commit_kv``."""
    torch.ops.dspark.commit_kv(kv.k, kv.v, path, num_emitted, query_start, slots, backend)


def copy_pages_op(kv: PagedKV, source: Tensor, target: Tensor, backend: Backend) -> None:
    """:func:`dspark.ops.copy_pages` as ``torch.ops.dspark.copy_pages``."""
    torch.ops.dspark.copy_pages(kv.k, kv.v, source, target, backend)


def _append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    backend: Backend,
) -> None:
    from dspark.ops.cache import append_kv

    append_kv(k, v, PagedKV(k_cache, v_cache, k_scale, v_scale), slots, backend=backend)


def _rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    out: Tensor,
    backend: Backend,
) -> None:
    from dspark.ops.cache import rope_append_kv

    kv = PagedKV(k_cache, v_cache, k_scale, v_scale)
    used = None if q_norm is None and k_norm is None else eps
    rope_append_kv(
        q, k, v, kv, slots, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, eps=used, out=out, backend=backend
    )


def _commit_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    path: Tensor,
    num_emitted: Tensor,
    query_start: Tensor,
    slots: Tensor,
    backend: Backend,
) -> None:
    from dspark.ops.cache import commit_kv

    commit_kv(PagedKV(k_cache, v_cache), path, num_emitted, query_start, slots, backend=backend)


def _copy_pages(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor, backend: Backend) -> None:
    from dspark.ops.cache import copy_pages

    copy_pages(PagedKV(k_cache, v_cache), source, target, backend=backend)


for _name, _implementation in (
    ("append_kv", _append_kv),
    ("rope_append_kv", _rope_append_kv),
    ("commit_kv", _commit_kv),
    ("copy_pages", _copy_pages),
):
    define(_name, _SCHEMAS[_name], _implementation)
