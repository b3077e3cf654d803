"""The scheduler's kernels in Triton's interpreter: the reference's decision, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.kernels.schedule import prefix as kernels
from dspark.ops.launch import power_of_two, recorded_launches
from dspark.ops.op import OPS
from dspark.ops.schedule import schedule_prefix, schedule_workspace
from dspark.ops.schedule.launch import MAX_SORTED, ScheduleConfig, schedule_config, scratch_sizes
from dspark.ops.schedule.reference import MAX_ROWS, MAX_SPEED, UNIT_BITS, ScheduleMode
from dspark.testing.guards import guarded, poisoned_empty
from tests.ops.schedule.test_schedule import Problem, arguments_of, problems

pytestmark = pytest.mark.triton

MODES: tuple[ScheduleMode, ...] = ("early_stop", "global", "budget")
NAN = float("nan")


def chunked(draft_len: int, chunk: int = 8) -> ScheduleConfig:
    """Chunks of a few drafts, each ranked by two programs."""
    drafts = power_of_two(draft_len)
    return ScheduleConfig(max(1, chunk // drafts), drafts, max(1, chunk // drafts) * drafts // 2)


def by_kernel(config: ScheduleConfig | None, mode: ScheduleMode, **arguments: Any) -> Tensor:
    """Lengths by the kernels, in memory that held something else."""
    names = ("confidence", "steps_per_second", "mode", "budget", "max_lengths", "min_lengths", "weights")
    given = dict.fromkeys(names) | {"mode": mode} | arguments
    with poisoned_empty():
        lengths: Tensor = OPS["schedule_prefix"]("triton", *(given[name] for name in names), None, config=config)
    return lengths


def assert_agrees(problem: Problem, mode: ScheduleMode, budget: int, config: ScheduleConfig | None) -> None:
    arguments = arguments_of(problem) | {"budget": torch.tensor(budget) if mode == "budget" else None}
    expected = schedule_prefix(mode=mode, backend="reference", **arguments)
    assert by_kernel(config, mode, **arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12)
@given(problem=problems(), budget=st.integers(-1, 20))
def test_one_program_decides_as_the_reference(mode: ScheduleMode, problem: Problem, budget: int) -> None:
    assert_agrees(problem, mode, budget, None)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=4)
@given(problem=problems(max_requests=4, max_drafts=4), budget=st.integers(-1, 20))
def test_chunks_decide_as_the_reference(mode: ScheduleMode, problem: Problem, budget: int) -> None:
    assert_agrees(problem, mode, budget, chunked(len(problem.confidence[0])))


def pool(requests: int, draft_len: int) -> dict[str, Tensor]:
    """Confidences of which many are equal, and a curve that bends."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.tensor([0.5, 0.9, 0.95, 1.0, NAN])
    confidence = grid[torch.randint(5, (requests, draft_len), generator=generator)]
    rows = torch.arange(requests * (1 + draft_len) + 1, dtype=torch.float64)
    return {"confidence": confidence, "steps_per_second": 1 / (requests + rows // 8)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requests", [150, 700])
def test_pools_of_several_tiles(requests: int, mode: ScheduleMode) -> None:
    """700 requests of 7 drafts are read twice, and both are searched a tile at a time."""
    arguments: dict[str, Any] = pool(requests, 7)
    if mode == "budget":
        arguments["budget"] = torch.tensor(requests * 3)
    assert schedule_config(requests, 7).size > kernels.most_searched()
    expected = schedule_prefix(mode=mode, backend="reference", **arguments)
    assert torch.equal(by_kernel(None, mode, **arguments), expected)
    assert 0 < expected.sum() < requests * 7


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_pool_beyond_one_program(mode: ScheduleMode) -> None:
    arguments: dict[str, Any] = pool(1100, 7)
    if mode == "budget":
        arguments["budget"] = torch.tensor(2000)
    assert schedule_config(1100, 7).chunks(1100) > 1
    expected = schedule_prefix(mode=mode, backend="reference", **arguments)
    assert torch.equal(by_kernel(None, mode, **arguments), expected)


@pytest.mark.parametrize("config", [None, chunked(3)], ids=["one program", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_strides_and_bad_numbers(dtype: torch.dtype, config: ScheduleConfig | None) -> None:
    rows = torch.tensor([[0.5, NAN, 0.9], [7.0, 0.75, -1.0], [0.0, 1.0, 1.0], [0.25, 0.25, float("inf")]])
    confidence = rows.to(dtype).t().contiguous().t()
    speed = torch.tensor([0.0, NAN, -1.0, 8.0, 8.0, 8.0, 7.0, float("inf"), 6.0, 5.0] + [NAN] * 7).to(dtype)
    caps = torch.tensor([3, -2, 9, 3], dtype=torch.int32)
    weights = torch.tensor([1.0, NAN, 9.0, -1.0], dtype=dtype)
    for mode in ("early_stop", "global") if config is None else ("early_stop",):
        arguments = {"steps_per_second": speed, "max_lengths": caps, "weights": weights, "min_lengths": -caps}
        expected = schedule_prefix(confidence, mode=mode, backend="reference", **arguments)
        assert torch.equal(by_kernel(config, mode, confidence=confidence, **arguments), expected)


@pytest.mark.parametrize("config", [None, chunked(3)], ids=["one program", "chunks"])
def test_nothing_else_is_written(config: ScheduleConfig | None) -> None:
    given = pool(6, 3)
    confidence = guarded(given["confidence"].nan_to_num(0.5), row_gap=3)
    needed = 4 * sum(scratch_sizes(6, config or schedule_config(6, 3)))
    with poisoned_empty():
        out = guarded(torch.empty(6, dtype=torch.int64))
        workspace = guarded(torch.empty(max(needed, 1), dtype=torch.uint8))
    caps = torch.tensor([3, 3, 0, 3, 1, 3])
    arguments = (confidence.tensor, given["steps_per_second"], "global", None, caps, None, None, out.tensor)
    OPS["schedule_prefix"]("triton", *arguments, workspace=workspace.tensor[:needed], config=config)
    for band in (confidence, out, workspace):
        band.check()
    assert (out.tensor >= 0).all()
    assert (out.tensor <= caps).all()


def test_a_workspace_that_does_not_serve_is_refused() -> None:
    arguments = pool(1100, 7)
    small = torch.empty(schedule_workspace(1100, 7) - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"workspace: expected shape \"bytes\""):
        schedule_prefix(**arguments, mode="global", workspace=small, backend="triton")
    out = torch.empty(1100, 2, dtype=torch.int64)[:, 0]
    with pytest.raises(ValueError, match="out: expected a contiguous tensor"):
        schedule_prefix(**arguments, mode="global", out=out, backend="triton")
    with pytest.raises(ValueError, match="the kernels take shape"):
        schedule_prefix(torch.ones(1, MAX_SORTED + 1), torch.ones(9000), mode="global", backend="triton")


@pytest.mark.parametrize(
    ("requests", "draft_len", "launches"),
    [(1, 1, 1), (64, 7, 1), (512, 16, 1), (1024, 8, 1), (513, 16, 3), (4096, 16, 3), (60_000, 16, 3)],
)
def test_launches_by_size(requests: int, draft_len: int, launches: int) -> None:
    def meta(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    confidence = meta(requests, draft_len, dtype=torch.float32)
    speed = meta(requests * (1 + draft_len) + 1, dtype=torch.float64)
    with recorded_launches() as recorded:
        schedule_prefix(confidence, speed, mode="early_stop", backend="triton")
    assert len(recorded) == launches


def test_no_drafts_are_no_lengths() -> None:
    assert by_kernel(None, "global", **pool(3, 0)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("draft_len", [1, 3, 7, 8, 16, 200, MAX_SORTED])
def test_configurations(draft_len: int) -> None:
    for requests in (1, 2, 31, 64, 500, 512, 513, 4096, 60_000):
        if requests * (1 + draft_len) > MAX_ROWS:
            continue
        config = schedule_config(requests, draft_len)
        assert config.size == power_of_two(config.size) <= MAX_SORTED
        assert config.block_drafts >= draft_len
        assert config.parts * config.block_ranked == config.size
        assert config.chunks(requests) * config.size <= 2 ** kernels.place_bits()


def test_both_sides_count_alike() -> None:
    assert kernels.token_units() == 1 << UNIT_BITS
    assert kernels.max_speed() == MAX_SPEED
    # Keys fit into 63 bits, and float64 holds every sum exactly.
    assert UNIT_BITS + 1 + kernels.place_bits() < 63
    assert MAX_ROWS << UNIT_BITS <= 2**53
