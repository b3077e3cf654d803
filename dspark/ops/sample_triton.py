"""Launch of ``sample`` and ``truncate``."""

from __future__ import annotations

from torch import Tensor

from dspark.ops.launch import RowConfig, Scratch, check_unit_stride, check_workspace, launch, power_of_two, row_config
from dspark.ops.statistics_triton import Rows, gather_statistics, statistics_elements


def workspace_bytes(num_rows: int, vocab_size: int, config: RowConfig | None = None) -> int:
    """Bytes of scratch memory for so many rows."""
    return 4 * statistics_elements(num_rows, vocab_size, config or row_config(vocab_size))


def sample_triton(rows: Rows, out: Tensor, workspace: Tensor | None, config: RowConfig | None = None) -> None:
    """Write one token per row to ``out`` ``[T]`` int64; arguments as checked by :func:`dspark.ops.sample`.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    from dspark.kernels.chain import sample_kernel

    logits = rows.logits
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    config = config or row_config(vocab_size)
    noise = not rows.sampling.all_greedy
    scratch = _scratch(rows, workspace, config)
    stats = gather_statistics(rows, config, scratch, noise=noise, sums=False, sub_sums=False, raw=False)
    num_tiles = config.tiles(vocab_size)
    tiles_p2 = power_of_two(num_tiles)
    block_rows = max(1, 1024 // tiles_p2)
    launch(
        sample_kernel,
        (-(-num_rows // block_rows),),
        logits_ptr=logits,
        stride_logits_row=logits.stride(0),
        query_start_ptr=None,
        seed_ptr=None,
        position_ptr=None,
        threshold_ptr=None,
        request_ptr=rows.request,
        temperature_ptr=rows.sampling.temperature,
        stats_ptr=stats.planes,
        stride_plane=stats.stride_plane,
        token_ptr=out,
        num_slots=num_rows,
        num_rows=num_rows,
        vocab_size=vocab_size,
        num_tiles=num_tiles,
        METHOD="gumbel" if noise else "greedy",
        NODES=0,
        TILES=tiles_p2,
        BLOCK_R=block_rows,
        BLOCK_V=config.block_vocab,
        BLOCK_S=config.block_sub,
        num_warps=4,
    )


def truncate_triton(rows: Rows, out: Tensor, workspace: Tensor | None, config: RowConfig | None = None) -> None:
    """Write each row's threshold to ``out`` ``[T]`` float32; arguments as checked by :func:`dspark.ops.truncate`.

    Raises:
        ValueError: a tensor's layout or the workspace does not serve.
    """
    if not rows.truncated:
        out.fill_(-float("inf"))
    elif rows.logits.shape[0] > 0:
        config = config or row_config(rows.logits.shape[1])
        scratch = _scratch(rows, workspace, config)
        gather_statistics(rows, config, scratch, noise=False, sums=False, sub_sums=False, raw=False, threshold=out)


def _scratch(rows: Rows, workspace: Tensor | None, config: RowConfig) -> Scratch:
    check_unit_stride("logits", rows.logits)
    num_rows, vocab_size = rows.logits.shape
    check_workspace(workspace, workspace_bytes(num_rows, vocab_size, config), rows.logits.device)
    return Scratch(statistics_elements(num_rows, vocab_size, config), rows.logits.device, workspace)
