"""Launch of ``sample`` and ``truncate``."""

from __future__ import annotations

from torch import Tensor

from dspark.ops.launch import (
    RowConfig,
    check_contiguous,
    check_unit_stride,
    launch,
    padded,
    row_config,
    scratch,
)
from dspark.ops.sample.statistics_launch import Rows, Slots, gather_statistics, slots_of


def workspace_bytes(num_rows: int, vocab_size: int, config: RowConfig | None = None) -> int:
    """Bytes of scratch memory for so many rows."""
    return 4 * sum(_sizes(slots_of(num_rows, 0, vocab_size, config or row_config(vocab_size))))


def _sizes(slots: Slots) -> list[int]:
    return [slots.elements, padded(slots.count)]


def sample_triton(rows: Rows, out: Tensor, workspace: Tensor | None, config: RowConfig | None = None) -> None:
    """Write one token per row to ``out`` ``[T]`` int64; arguments as checked by :func:`dspark.ops.sample`.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    from dspark.kernels.accept.chain import sample_kernel

    check_unit_stride("logits", rows.logits)
    check_contiguous("out", out)
    num_rows, vocab_size = rows.logits.shape
    if num_rows == 0:
        return
    slots = slots_of(num_rows, 0, vocab_size, config or row_config(vocab_size))
    planes, threshold = scratch(_sizes(slots), rows.logits.device, workspace)
    noise = not rows.sampling.all_greedy
    kept = threshold if rows.truncated else None
    gather_statistics(rows, slots, planes, kept, noise=noise, sums=False, sub_sums=False, raw=False)
    grid, arguments = slots.draw(slots.tiles_p2)
    arguments |= {
        "logits_ptr": rows.logits,
        "stride_logits_row": rows.logits.stride(0),
        "query_start_ptr": None,
        "seed_ptr": None,
        "position_ptr": None,
        "depth_ptr": None,
        "threshold_ptr": None,
        "request_ptr": rows.request,
        "temperature_ptr": rows.sampling.temperature,
        "stats_ptr": planes,
        "token_ptr": out,
        "num_rows": num_rows,
        "METHOD": "gumbel" if noise else "greedy",
    }
    launch(sample_kernel, grid, arguments)


def truncate_triton(rows: Rows, out: Tensor, workspace: Tensor | None, config: RowConfig | None = None) -> None:
    """Write each row's threshold to ``out`` ``[T]`` float32; arguments as checked by :func:`dspark.ops.truncate`.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    check_unit_stride("logits", rows.logits)
    check_contiguous("out", out)
    num_rows, vocab_size = rows.logits.shape
    if not rows.truncated:
        out.fill_(-float("inf"))
    elif num_rows > 0:
        slots = slots_of(num_rows, 0, vocab_size, config or row_config(vocab_size))
        planes, _ = scratch(_sizes(slots), rows.logits.device, workspace)
        gather_statistics(rows, slots, planes, out, noise=False, sums=False, sub_sums=False, raw=False)
