"""What attention moves: each key once while its request's lines fit in a program, and little beside the keys."""

from __future__ import annotations

import pytest

from dspark.ops.cost import AttentionCall, attention_cost
from dspark.ops.cost.attention import attention_workspace_bytes
from dspark.testing.traffic import counted_traffic
from tests.gates.traffic.attention import attention_case

SHAPES = [(32, 8, 128), (40, 8, 128), (16, 8, 256)]


@pytest.mark.triton
@pytest.mark.parametrize(("rows", "times"), [(1, 1), (16, 1), (17, 2)])
def test_each_key_is_read_once_per_128_lines(rows: int, times: int) -> None:
    """8 query heads share a key head: 16 rows are 128 lines."""
    call = AttentionCall([90, 40], [rows, 1], num_heads=8, kv_heads=1, head_dim=8, words=1)
    with counted_traffic() as traffic:
        attention_case(call).run()
    tokens = times * (90 + rows) + 41
    for side in ("k", "v"):
        assert traffic.arguments[f"attention_kernel.kv.{side}"] == [tokens * 8 * 2, 0]


@pytest.mark.parametrize("shape", SHAPES)
def test_eight_rows_move_at_most_a_tenth_more_than_one(shape: tuple[int, int, int]) -> None:
    for context in (8192, 32_768, 131_072):
        one, eight = (attention_cost(AttentionCall([context], [rows], *shape)).total for rows in (1, 8))
        assert eight / one <= 1.10


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("context", [1024, 2048, 8192, 32_768, 131_072])
def test_the_model_is_near_the_lower_bound(shape: tuple[int, int, int], context: int) -> None:
    """Parts, tables and queries read again add 4 % to the keys of one row, 13 % to those of eight, 20 % if short."""
    for rows, bound in ((1, 1.04), (4, 1.11), (8, 1.13 if context >= 8192 else 1.20)):
        cost = attention_cost(AttentionCall([context], [rows], *shape, words=int(rows > 1)))
        assert cost.lower_bound <= cost.total <= bound * cost.lower_bound


def test_the_floor_of_a_token() -> None:
    """8 key heads of 128 in bfloat16: 4,096 bytes per token and layer."""
    call = AttentionCall([8192], [1])
    assert attention_cost(call).lower_bound == 8193 * 4096 + 2 * 32 * 128 * 2


def test_workspace_of_many_long_requests() -> None:
    """A larger chunk takes less; the keys of these requests take 137 GB a layer."""
    lengths, contexts = [8] * 256, [131_064] * 256
    assert attention_workspace_bytes(AttentionCall(contexts, lengths)) == 5_827_461_120
    assert attention_workspace_bytes(AttentionCall(contexts, lengths, chunk=4096)) == 1_090_519_040
