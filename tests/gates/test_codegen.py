"""The codegen gate: what the compiler makes of every shipped kernel, and that each kind of fault is seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import dspark.ops
from dspark.testing.codegen import datasheets, faults, occupancy
from dspark.testing.registry import NVIDIA_TARGETS, TARGETS, Budget, KernelEntry, budgets
from tests.gates.kernel_table import DOCUMENT, compiler_of, table_rows, triton_version
from tests.ops.shipped import CALLS, shipped_kernels

OPS = Path(dspark.ops.__file__).parent

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="no triton here")

PLENTY = budgets(Budget(registers=255, shared=65_536), amd=Budget(registers=512, shared=65_536))
ROW_SUM = KernelEntry(
    name="row_sum",
    kernel="tests.gates.toy_kernels:row_sum_kernel",
    signature={"x_ptr": "*bf16", "out_ptr": "*fp32", "stride_x_row": "i32", "num_cols": "i32"},
    constexprs={"BLOCK_C": 2048},
    aligned=("x_ptr", "out_ptr", "stride_x_row", "num_cols"),
    num_warps=4,
    num_stages=1,
    budgets=PLENTY,
)


def of(name: str, like: KernelEntry = ROW_SUM, **changes: object) -> KernelEntry:
    kernel = f"tests.gates.toy_kernels:{name}_kernel"
    return replace(like, name=name, kernel=kernel, **changes)  # type: ignore[arg-type]


def test_a_good_kernel_has_no_fault_on_any_target() -> None:
    entry = replace(ROW_SUM, claims=dict.fromkeys(NVIDIA_TARGETS, (r"^LDG\.E\.128$",)) | {"gfx942": ("load_dwordx4",)})
    sheets = datasheets([entry])
    assert [sheet.target for sheet in sheets] == list(TARGETS)
    for sheet in sheets:
        assert not faults(entry, sheet)
        assert 8 <= sheet.reading.registers <= 64
        assert sheet.reading.load_bits == (128,)
        assert sheet.reading.store_bits == (32,)
        assert sheet.occupancy > 0
        assert not sheet.reading.matrix


@pytest.mark.parametrize("target", TARGETS)
def test_lost_alignment_is_seen(target: str) -> None:
    entry = replace(ROW_SUM, aligned=(), claims={target: (r"^LDG\.E\.128$|load_dwordx4$",)})
    (sheet,) = datasheets([entry], [target])
    assert max(sheet.reading.load_bits) < 128
    (fault,) = faults(entry, sheet)
    assert fault.startswith(f"row_sum on {target}: claimed instruction: nothing matches")


SPILLS = of(
    "greedy_registers",
    signature={"x_ptr": "*fp32", "out_ptr": "*fp32"},
    constexprs={"BLOCK_C": 4096},
    aligned=("x_ptr", "out_ptr"),
    num_warps=1,
)


@pytest.mark.parametrize("target", TARGETS)
def test_spills_are_seen(target: str) -> None:
    few_registers = {"waves_per_eu": 8} if target == "gfx942" else {"maxnreg": 40}
    entry = replace(SPILLS, options=few_registers)
    (sheet,) = datasheets([entry], [target])
    (fault,) = faults(entry, sheet)
    assert fault.startswith(f"greedy_registers on {target}: spills: ")


@pytest.mark.parametrize("target", TARGETS)
def test_budgets_are_held(target: str) -> None:
    entry = replace(ROW_SUM, budgets=dict.fromkeys(TARGETS, Budget(registers=7, shared=0)))
    (sheet,) = datasheets([entry], [target])
    sheet = replace(sheet, shared=16)
    assert faults(entry, sheet) == [
        f"row_sum on {target}: registers: {sheet.reading.registers}, budget 7",
        f"row_sum on {target}: shared memory: 16 bytes, budget 0",
    ]
    assert faults(replace(entry, budgets={}), sheet) == [f"row_sum on {target}: no budget is declared"]


MATRIX = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma_f32"}


@pytest.mark.parametrize("target", TARGETS)
def test_matrix_instructions_are_read(target: str) -> None:
    entry = of(
        "product",
        signature={"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"},
        constexprs={"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64},
        aligned=("a_ptr", "b_ptr", "c_ptr"),
        claims={target: (f"^{MATRIX[target]}",)},
    )
    (sheet,) = datasheets([entry], [target])
    assert not faults(entry, sheet)
    assert all(name.startswith(MATRIX[target]) and count > 0 for name, count in sheet.reading.matrix.items())
    assert sheet.reading.matrix
    assert sheet.shared > 0
    assert faults(replace(entry, claims={target: ("^NOT_THERE",)}), sheet)


NARROW = {
    "narrow_row_sum": (ROW_SUM.signature, ROW_SUM.constexprs, "%row * %stride_x_row"),
    "narrow_loop": (
        {"x_ptr": "*bf16", "out_ptr": "*fp32", "stride_x_row": "i32", "num_rows": "i32"},
        ROW_SUM.constexprs,
        " * %stride_x_row",
    ),
    "narrow_while": (
        {"x_ptr": "*bf16", "out_ptr": "*fp32", "stride_x_row": "i32", "num_rows": "i32"},
        ROW_SUM.constexprs,
        " * %stride_x_row",
    ),
    "narrow_constant": (
        {"x_ptr": "*bf16", "out_ptr": "*fp32"},
        {"BLOCK_C": 1024, "NUM_COLS": 151_936},
        "%row * %c151936_i32",
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_p06_a_32_bit_pointer_product_is_seen(name: str) -> None:
    signature, constexprs, product = NARROW[name]
    entry = of(name, signature=signature, constexprs=constexprs, aligned=())
    (sheet,) = datasheets([entry], ["sm_90"])
    (fault,) = faults(entry, sheet)
    assert "32-bit pointer product at toy_kernels.py:" in fault
    assert product in fault


def test_p06_other_32_bit_products_pass() -> None:
    entry = of("wide")
    (sheet,) = datasheets([entry], ["sm_90"])
    assert not faults(entry, sheet)


@pytest.mark.parametrize(
    ("target", "registers", "shared", "num_warps", "expected"),
    [
        ("sm_80", 32, 0, 4, 1.0),
        ("sm_80", 128, 0, 4, 0.25),
        ("sm_90", 255, 0, 8, 0.125),
        ("sm_90", 40, 100_000, 4, 0.125),
        ("sm_80", 40, 100_000, 4, 0.0625),
        ("gfx942", 64, 0, 4, 1.0),
        ("gfx942", 128, 0, 4, 0.5),
        ("gfx942", 16, 32_768, 4, 0.25),
    ],
)
def test_occupancy_by_hand(target: str, registers: int, shared: int, num_warps: int, expected: float) -> None:
    assert occupancy(target, registers, shared, num_warps) == expected


def test_what_does_not_compile_is_an_error() -> None:
    entry = replace(ROW_SUM, constexprs={"BLOCK_C": 1000})
    with pytest.raises(RuntimeError, match=r"(?s)row_sum sm_90: .*power of 2"):
        datasheets([entry], ["sm_90"])
    with pytest.raises(ValueError, match="targets: expected some of sm_80"):
        datasheets([ROW_SUM], ["sm_75"])
    with pytest.raises(ValueError, match="aligned names"):
        datasheets([replace(ROW_SUM, aligned=("y_ptr",))], ["sm_90"])


def first_entries() -> dict[str, KernelEntry]:
    """One entry of every kernel."""
    found: dict[str, KernelEntry] = {}
    for entry in shipped_kernels():
        found.setdefault(entry.kernel.partition(":")[2], entry)
    return found


def assert_kept(entries: Sequence[KernelEntry], targets: Sequence[str] = TARGETS) -> None:
    """The entries have no fault on the targets, and their rows of the committed table are still true."""
    sheets = datasheets(entries, targets)
    by_name = {entry.name: entry for entry in entries}
    found = [fault for sheet in sheets for fault in faults(by_name[sheet.entry], sheet)]
    assert not found, "\n".join(found)
    committed = DOCUMENT.read_text(encoding="utf-8")
    if compiler_of(committed) != triton_version():
        pytest.skip(f"the committed table is of Triton {compiler_of(committed)}")
    missing = [row for row in table_rows(entries, sheets) if row not in committed.splitlines()]
    assert not missing, "docs/kernels.md is stale; run `make kernels`:\n" + "\n".join(missing)


KERNELS = first_entries() if find_spec("triton") else {}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_keeps_an_entry(kernel: str) -> None:
    assert_kept([KERNELS[kernel]], ["sm_90"])


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_every_kernel_keeps_all_of_its_entries(call: str) -> None:
    assert_kept(shipped_kernels([call]))


def test_the_committed_table_has_no_other_rows() -> None:
    committed = DOCUMENT.read_text(encoding="utf-8").splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in committed if line.startswith("| ") and "sm_90" in line]
    assert names == [entry.name for entry in shipped_kernels()]


def test_every_kernel_that_is_launched_is_registered() -> None:
    """Of the device code, what the ops name (``use_kernel`` of ``op.py`` is no kernel)."""
    sources = "".join(p.read_text(encoding="utf-8") for p in OPS.rglob("*.py"))
    launched = set(re.findall(r"\b(?!use_)\w+_kernel\b", sources))
    assert launched == {entry.kernel.partition(":")[2] for entry in shipped_kernels()}
