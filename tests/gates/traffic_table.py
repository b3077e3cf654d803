"""What the ops ask of memory, counted in Triton's interpreter: a table, beside lower bounds and the committed one.

``make traffic`` counts every call, prints the table and says what differs from ``tests/gates/traffic.json``;
``make traffic WRITE=1`` rewrites that file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before dspark.kernels is

from tests.gates.counted import SMALL, STATED
from tests.gates.counts import Count, commit, committed, count, differences

FAMILIES = {"cache": "_kv|copy_pages", "sample": "sample|truncate|process_logits"}
"""Those whose name their ops' names do not have."""


def table(rows: Mapping[str, Count]) -> str:
    """The rows as text; bytes in MB."""
    lines = [f"{'call':<75} {'read':>10} {'written':>10} {'bound':>10} {'over':>8} {'launches':>8}"]
    for name, row in rows.items():
        lines.append(
            f"{name:<75} {row.read / 1e6:>10.4f} {row.written / 1e6:>10.4f} {row.bound / 1e6:>10.4f} "
            f"{row.over - 1:>8.2%} {row.launches:>8}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a count is not the committed one, and is not to be."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gates.traffic_table", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "pattern", nargs="?", default="", help="a family of ops, or a regular expression that is found in a call's name"
    )
    parser.add_argument("--small", action="store_true", help="only the small calls, which take seconds in all")
    parser.add_argument("--committed", action="store_true", help="print the committed table, and count nothing")
    parser.add_argument("--write", action="store_true", help="rewrite the committed rows, and drop those of no call")
    options = parser.parse_args(arguments)
    calls = {call.name: call for call in (SMALL if options.small else [*SMALL, *STATED])}
    pattern = FAMILIES.get(options.pattern, options.pattern)
    names = [name for name in calls if re.search(pattern, name)]
    before = committed()
    if options.committed:
        print(table({name: before[name] for name in names if name in before}))
        return 0
    counted = {name: count(calls[name])[0] for name in names}
    print(table(counted))
    for line in (found := differences(counted, before)):
        print(f"DIFFERS {line}")
    if options.write:
        after = before | counted
        commit({call.name: after[call.name] for call in [*SMALL, *STATED] if call.name in after})
        print(f"rewrote {len(found)} of {len(counted)} rows")
    return int(bool(found) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
