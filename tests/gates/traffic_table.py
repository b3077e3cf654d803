"""What the ops ask of memory: counted in Triton's interpreter, beside the models of ``dspark.ops.cost``.

``make traffic`` prints the table and writes ``runs/traffic.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before dspark.kernels is

from tests.gates.traffic import accept, attention, cache, process, sample, schedule, tree, walk
from tests.gates.traffic.case import Case, Row, measure

JSON = Path(__file__).parent.parent.parent / "runs" / "traffic.json"

GROUPS = (accept, sample, process, cache, schedule, tree, attention, walk)
CASES: list[Case] = [case for group in GROUPS for case in group.cases()]
"""Small calls of every kind."""


def stated_cases() -> list[Case]:
    """The shapes that bounds are stated for."""
    return [case for group in GROUPS for case in group.stated_cases()]


def table(rows: Sequence[Row]) -> str:
    """The rows as text; bytes in MB."""
    lines = [
        f"{'op':<8} {'rule':<22} {'shape':<34} {'counted':>10} {'modelled':>10} {'bound':>10} {'over':>7} "
        f"{'launches':>8}"
    ]
    for row in rows:
        counted, modelled = row.read + row.written, row.modelled_read + row.modelled_written
        lines.append(
            f"{row.op:<8} {row.rule:<22} {row.shape:<34} {counted / 1e6:>10.4f} {modelled / 1e6:>10.4f} "
            f"{row.lower_bound / 1e6:>10.4f} {row.over_bound - 1:>7.2%} {row.launches:>8}"
            + ("" if row.agrees else "  DIFFERS")
        )
    return "\n".join(lines)


def main() -> None:
    rows = [measure(case)[0] for case in stated_cases()]
    print(table(rows))
    JSON.parent.mkdir(exist_ok=True)
    found = [
        {**asdict(row), "counted": row.read + row.written, "modelled": row.modelled_read + row.modelled_written}
        for row in rows
    ]
    JSON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {JSON.name}")


if __name__ == "__main__":
    main()
