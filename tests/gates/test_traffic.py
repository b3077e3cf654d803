"""The traffic gate: bytes and launches, counted in the interpreter, are the committed ones, to the byte."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from dspark.ops.types import Rule
from dspark.testing.traffic import counted_traffic
from tests.gates import counts
from tests.gates.counted import SMALL, STATED, attention
from tests.gates.counted_rows import accept
from tests.gates.counts import Count, Counted, committed, count, differences
from tests.gates.traffic_table import main

pytestmark = pytest.mark.triton
TABLE = committed()


def test_only_lanes_that_are_not_masked_off_count() -> None:
    from tests.gates.toy_kernels import masked_copy_kernel

    x = torch.tensor([1.0, -1.0, 2.0, -2.0, 3.0, 4.0], dtype=torch.float16)
    y, count = torch.zeros(6, dtype=torch.float16), torch.zeros(1, dtype=torch.int32)
    with counted_traffic() as traffic:
        masked_copy_kernel[(2,)](x_ptr=x, y_ptr=y, count_ptr=count, n=6, BLOCK=4)
    assert count.item() == 2
    assert (traffic.read, traffic.written) == (6 * 2 + 2 * 4, 4 * 2 + 2 * 4)
    assert traffic.kernels == ["masked_copy_kernel"]
    assert traffic.arguments == {
        "masked_copy_kernel.x_ptr": [12, 0],
        "masked_copy_kernel.y_ptr": [0, 8],
        "masked_copy_kernel.count_ptr": [8, 8],
    }


def test_unmasked_and_scalar_accesses_count_by_the_width_of_their_dtype() -> None:
    from tests.gates.toy_kernels import row_sum_kernel

    x, out = torch.randn(3, 10).bfloat16(), torch.empty(3)
    with counted_traffic() as traffic:
        row_sum_kernel[(3,)](x, out, 10, 10, BLOCK_C=4)
    assert (traffic.read, traffic.written) == (3 * 10 * 2, 3 * 4)
    torch.testing.assert_close(out, x.float().sum(1))


def test_what_torch_launches_beside_the_kernels_counts() -> None:
    with counted_traffic() as traffic:
        torch.empty(3).view(3, 1).zero_().add(1)
    assert traffic.torch_ops == ["zero_", "add"]
    assert traffic.launches == 2


def test_counting_ends_with_the_block() -> None:
    from tests.gates.toy_kernels import row_sum_kernel

    with counted_traffic() as traffic:
        pass
    row_sum_kernel[(1,)](torch.ones(4), torch.empty(1), 4, 4, BLOCK_C=4)
    assert (traffic.read, traffic.launches) == (0, 0)


def test_compiled_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"), counted_traffic():
        pass


def test_the_fields_of_a_group_count_by_their_names() -> None:
    _, traffic = count(next(call for call in SMALL if call.name.startswith("append_kv")))
    assert (
        traffic.arguments["append_kv_kernel.kv.k"] == traffic.arguments["append_kv_kernel.kv.v"] == [0, 3 * 2 * 24 * 2]
    )


@pytest.mark.parametrize(
    "call", [*SMALL, *(pytest.param(call, marks=pytest.mark.slow) for call in STATED)], ids=lambda call: call.name
)
def test_what_is_counted_is_what_is_committed(call: Counted) -> None:
    row, traffic = count(call)
    assert not traffic.torch_ops, "an op launches torch's kernels beside its own"
    assert not differences({call.name: row}, TABLE), traffic.arguments
    assert row.bound <= row.total or row.launches == 0


def test_every_row_of_the_table_is_counted() -> None:
    assert list(TABLE) == [call.name for call in [*SMALL, *STATED]]


def test_a_wrong_count_is_seen() -> None:
    name, row = next(iter(TABLE.items()))
    for wrong in (row._replace(read=row.read + 4), row._replace(written=0), row._replace(launches=row.launches + 1)):
        assert differences({name: wrong}, TABLE) == [f"{name}: counted {tuple(wrong)}, committed {tuple(row)}"]
    assert differences({"another": row}, TABLE) == [f"another: counted {tuple(row)}, committed None"]


def test_the_command_prints_differs_and_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "traffic.json"
    path.write_text(counts.TABLE.read_text().replace(json.dumps(list(TABLE[NORMED])), "[1, 2, 3, 4]"))
    monkeypatch.setattr(counts, "TABLE", path)
    assert main([NORMED]) == 1
    assert f"DIFFERS {NORMED}: counted {tuple(TABLE[NORMED])}, committed (1, 2, 3, 4)" in capsys.readouterr().out
    assert main([NORMED, "--write"]) == main([NORMED]) == 0
    assert path.read_text() == (Path(__file__).parent / "traffic.json").read_text()


NORMED = "rope_append_kv normed, Hq 6, rows 4-1, Hkv 2, D 24, bfloat16"


def rows_of(*beginnings: str, without: str = "never") -> list[Count]:
    """Rows of stated calls, by how their names begin; there must be some of each."""
    names = [call.name for call in STATED if without not in call.name]
    found = [[TABLE[name] for name in names if name.startswith(beginning)] for beginning in beginnings]
    assert all(found)
    return [row for rows in found for row in rows]


@pytest.mark.parametrize(
    ("beginning", "most"),
    [
        *((f"accept {rule}", 1.02) for rule in ("coupled", "match", "recursive")),  # trees too
        *((f"accept {rule} {q}", 1.02) for rule in ("ratio", "block") for q in ("dense", "point")),
        *((f"accept {rule} sparse", 1.04) for rule in ("ratio", "block")),  # q, once per tile of a residual
        *((f"sample {noise}", 1.02) for noise in ("gumbel", "greedy")),
        ("process_logits bans", 1.02),
        ("append_kv", 1.02),
        ("rope_append_kv", 1.02),
        ("copy_pages", 1.02),
        ("draft_tree coupled, R 1, G 2", 1.02),
        *((f"schedule_prefix {mode}, 64 of 7", 1.0) for mode in ("early_stop", "global", "budget")),
        *((f"verify_attention chain, {context}:1,", 1.04) for context in (1024, 2048, 8192)),
        *((f"verify_attention tree, {context}:4,", 1.11) for context in (1024, 2048, 8192)),
        *((f"verify_attention tree, {context}:8,", 1.20) for context in (1024, 2048)),  # few keys beside the parts
        ("verify_attention tree, 8192:8,", 1.13),
    ],
)
def test_little_is_moved_beyond_the_lower_bound(beginning: str, most: float) -> None:
    for row in rows_of(beginning, without="truncated"):
        assert row.bound <= row.total <= most * row.bound


def test_counts_of_each_row_and_bits_of_each_lane_are_beyond_the_bound() -> None:
    (penalties,), (mask,) = rows_of("process_logits penalties"), rows_of("process_logits mask")
    assert 1.5 < penalties.over < 1.57  # each of 8 rows reads its request's counts
    assert 1.6 < mask.over < 1.66  # each lane asks for its token's word


@pytest.mark.parametrize("heads", ["4/1x128", "5/1x128", "2/1x256"])
def test_eight_rows_move_at_most_a_tenth_more_than_one(heads: str) -> None:
    one, eight = (TABLE[f"verify_attention chain, 8192:{rows}, {heads}, S 16"] for rows in (1, 8))
    assert eight.total / one.total <= 1.10


@pytest.mark.parametrize(("rows", "times"), [(1, 1), (16, 1), (17, 2)])
def test_each_key_is_read_once_per_128_lines(rows: int, times: int) -> None:
    """8 query heads share a key head: 16 rows are 128 lines."""
    _, traffic = count(attention([90, 40], [rows, 1], (8, 1, 8), words=1))
    tokens = times * (90 + rows) + 41
    for side in (".k", ".v"):
        assert [moved for name, moved in traffic.arguments.items() if name.removesuffix("_ptr").endswith(side)] == [
            [tokens * 8 * 2, 0]
        ]


def test_launches() -> None:
    """A step of a tree's recursion and a level of a drafted tree are so many; truncation adds two."""
    for rule in ("coupled", "match"):
        assert {row.launches for row in rows_of(f"accept {rule} tree")} == {3}
    assert TABLE["accept recursive tree 1, rows 16, V 151936, bfloat16"].launches == 4 + 2 * 4
    assert {row.launches for row in rows_of("draft_tree coupled, R 2, G 7")} == {3 * 7 + 1}
    for rule in ("coupled", "ratio dense"):
        truncated, plain = (TABLE[f"accept {rule}{cut}, rows 8, V 151936, bfloat16"] for cut in (" truncated", ""))
        assert truncated.launches == plain.launches + 2
        assert truncated.bound == plain.bound


@pytest.mark.parametrize("rule", ["coupled", "match", "ratio", "block"])
def test_truncation_costs_its_search_and_a_second_look_at_what_is_kept(rule: Rule) -> None:
    """Beside the logits that these two read, nothing grows by more than 2 % of the bound."""
    beside = []
    for cuts in (None, [(50, 0.95, 0.0)]):
        row, traffic = count(accept(rule, [2], 16_384, cuts=cuts))
        of_logits = [read for name, (read, _) in traffic.arguments.items() if "logits" in name.rpartition(".")[2]]
        beside.append(row.total - sum(of_logits))
    assert 0 < beside[1] - beside[0] < 0.02 * row.bound


def test_of_many_nodes_what_lies_beyond_the_bound_is_known() -> None:
    """W1's rows are read once per tile and base logits once per 16 nodes, which caches serve; the largest scores of
    each tile are written and read."""
    (row,) = rows_of("draft_tree coupled, R 2, G 7")
    tiles, nodes, vocab_size = 4096 // 128, 2 * (1 + 4 + 16 + 4 * 31), 4096
    rows, scores = nodes * tiles * 256 * 2, nodes * tiles * (8 * 4 + 4 + 8)
    again = 2 * 4 * vocab_size * 2  # base logits of 31 nodes, read for 16 of them at a time
    assert row.bound < row.total - rows - scores - again < row.bound * 1.02
