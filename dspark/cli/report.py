"""Ablation results: a table, Markdown, CSV, JSON and a picture, and two runs compared."""

from __future__ import annotations

import csv
import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dspark import __version__
from dspark.cli.rows import PLAIN, Row


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and text; draft length and domain only where rows differ in them."""
    several = {name for name in ("draft_len", "domain") if len({getattr(row, name) for row in rows}) > 1}
    headings = ["policy", "rule", "T"] + ["γ"] * ("draft_len" in several) + ["domain"] * ("domain" in several)
    headings += ["tokens/s", "speed-up", "τ", "verified", "accepted by position, %", "lossless"]
    lines = []
    for row in rows:
        low, high = row.speedup_ci
        line = [row.policy, row.rule, f"{row.temperature:g}"]
        line += [str(row.draft_len)] * ("draft_len" in several) + [row.domain] * ("domain" in several)
        line += [
            f"{row.tokens_per_s:.0f}",
            "1.00" if row.policy == PLAIN else f"{row.speedup:.2f} ({low:.2f}–{high:.2f})",
            f"{row.tau:.2f}",
            f"{row.verified_per_round:.2f}",
            " ".join("–" if a is None else f"{100 * a:.0f}" for a in row.accept_by_position),
            {True: "✓", False: "✗", None: "?"}[row.lossless],
        ]
        lines.append(line)
    return headings, lines


def _setting(row: Row) -> tuple[str, float, int, str]:
    return row.rule, row.temperature, row.draft_len, row.domain


def table(rows: Sequence[Row]) -> Table:
    """Rows as a table, best speed-up of each setting in bold."""
    out = Table(title="Speculative decoding against plain decoding", caption=_CAPTION, caption_justify="left")
    headings, lines = _cells(rows)
    for heading in headings:
        words = heading in ("policy", "rule", "domain") or "%" in heading
        out.add_column(heading, justify="center" if heading == "lossless" else "left" if words else "right")
    previous = None
    for row, line in zip(rows, lines, strict=True):
        if previous not in (None, _setting(row)):
            out.add_section()
        previous = _setting(row)
        if row.speedup == max(r.speedup for r in rows if _setting(r) == _setting(row)):
            line[headings.index("speed-up")] = f"[bold]{line[headings.index('speed-up')]}[/bold]"
        out.add_row(*line)
    return out


def markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    headings, lines = _cells(rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, ["---"] * len(headings), *lines]) + "\n"


_CAPTION = (
    "speed-up: time per token against plain decoding, paired runs, median (95 % interval). τ: tokens per round, bonus "
    "included. verified: drafts sent to the target per round. accepted: of the drafts at a position whose "
    "predecessors were accepted. lossless: same tokens as plain decoding; where a rule keeps the law alone, at T > 0 "
    "a chi-square test against the target's own distributions."
)


def environment() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "dspark": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
    }


def processor_name() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_results(path: Path, rows: Sequence[Row]) -> list[Path]:
    """Write ``{"environment": ..., "rows": [...]}`` to ``path``, and the table as Markdown and CSV beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [dataclasses.asdict(r) for r in rows]
    path.write_text(json.dumps({"environment": environment(), "rows": records}, indent=1) + "\n")
    as_markdown, as_csv = path.with_suffix(".md"), path.with_suffix(".csv")
    as_markdown.write_text(markdown(rows), encoding="utf-8")
    with as_csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        for record in records:
            both_ends = " ".join(map(str, record["speedup_ci"]))
            positions = " ".join("" if a is None else str(a) for a in record["accept_by_position"])
            writer.writerow({**record, "speedup_ci": both_ends, "accept_by_position": positions})
    return [path, as_markdown, as_csv]


def read_rows(path: Path) -> list[Row]:
    """Rows that :func:`write_results` wrote as JSON.

    Raises:
        ValueError: the file holds no such rows.
    """
    try:
        return [Row(**{**r, "speedup_ci": tuple(r["speedup_ci"])}) for r in json.loads(path.read_text())["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected the JSON results of ablate: {error!r}") from error


def comparison(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Two runs side by side as Markdown: rows that both have, and which of their intervals do not overlap.

    Raises:
        ValueError: they have no row in common.
    """
    old = {row.key: row for row in before}
    both = [(old[row.key], row) for row in after if row.key in old]
    if not both:
        raise ValueError("compare: the two runs have no setting in common")
    headings = ["policy", "rule", "T", "γ", "domain", "speed-up before", "after", "τ before", "after", "change"]
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    for a, b in both:
        change = (
            "faster" if b.speedup_ci[0] > a.speedup_ci[1] else "slower" if b.speedup_ci[1] < a.speedup_ci[0] else ""
        )
        cells = [a.policy, a.rule, f"{a.temperature:g}", str(a.draft_len), a.domain]
        cells += [f"{row.speedup:.2f} ({row.speedup_ci[0]:.2f}–{row.speedup_ci[1]:.2f})" for row in (a, b)]
        cells += [f"{a.tau:.2f}", f"{b.tau:.2f}", change]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_picture(path: Path, rows: Sequence[Row]) -> None:
    """Draw speed-up by policy, and acceptance by position, one line a setting (needs the ``plot`` extra).

    Of several domains, the rows of all are drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row.domain == "all"]
    settings = list(dict.fromkeys(map(_setting, rows)))
    several = len({row.draft_len for row in rows}) > 1
    policies = [p for p in dict.fromkeys(r.policy for r in rows) if p != PLAIN]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2))
    width = 0.8 / len(settings)
    for s, setting in enumerate(settings):
        rule, temperature, draft_len, _ = setting
        label = f"{rule}, T = {temperature:g}" + f", γ = {draft_len}" * several
        chosen = {r.policy: r for r in rows if _setting(r) == setting}
        shown = [(i, chosen[p]) for i, p in enumerate(policies) if p in chosen]
        errors = [[r.speedup - r.speedup_ci[0] for _, r in shown], [r.speedup_ci[1] - r.speedup for _, r in shown]]
        x = [i + (s - (len(settings) - 1) / 2) * width for i, _ in shown]
        left.bar(x, [r.speedup for _, r in shown], width, yerr=errors, label=label, capsize=2)
        deepest = max(chosen.values(), key=lambda r: r.verified_per_round).accept_by_position
        right.plot(range(1, len(deepest) + 1), [float("nan") if a is None else a for a in deepest], "o-", label=label)
    left.axhline(1, color="black", linewidth=1)
    left.set(ylabel="speed-up over plain decoding", xticks=range(len(policies)), xticklabels=policies)
    left.margins(y=0.3)
    left.legend(loc="upper left", ncols=2)
    right.set(xlabel="draft position", ylabel="accepted, given its predecessors", ylim=(0, 1.02))
    right.legend()
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
