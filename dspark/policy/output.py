"""What reports share: Markdown tables, CSV files, pictures."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "") -> str:
    """A Markdown table.

    Args:
        headings: of the columns.
        rows: cells.
        rule: the line between them, where columns are aligned.

    >>> markdown_table(["a", "b"], [["1", "2"]])
    '| a | b |\\n| --- | --- |\\n| 1 | 2 |\\n'
    """
    head, *body = (f"| {' | '.join(cells)} |" for cells in (headings, *rows))
    return "\n".join([head, rule or "|" + " --- |" * len(headings), *body]) + "\n"


def write_records(path: str | Path, names: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Write a line of column names and one per record."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(records)


@contextmanager
def picture(path: str | Path, plots: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Axes of so many plots side by side, to draw on; at the end of the block they are written to ``path`` (PNG).

    Args:
        path: file.
        plots: how many.
        size: of all, in inches.
        options: of ``matplotlib.pyplot.subplots``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a picture needs matplotlib; install it with: pip install "dspark[plot]"', name="matplotlib"
        ) from error

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, plots, figsize=size, **options)
    yield axes
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(path), dpi=120)
    plt.close(figure)
