"""Ablation results as a table, a picture and JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dspark import __version__
from dspark.cli.ablation import PLAIN, Row


def table(rows: Sequence[Row]) -> Table:
    """Rows as a table, best speed-up of each setting in bold."""
    out = Table(title="Speculative decoding against plain decoding", caption=_CAPTION, caption_justify="left")
    out.add_column("policy")
    out.add_column("rule")
    for heading in ("T", "tokens/s", "speed-up", "τ", "verified", "accepted by position, %"):
        out.add_column(heading, justify="left" if "%" in heading else "right")
    out.add_column("lossless", justify="center")
    previous = None
    for row in rows:
        setting = (row.rule, row.temperature)
        if previous not in (None, setting):
            out.add_section()
        previous = setting
        best = max(r.speedup for r in rows if (r.rule, r.temperature) == setting)
        low, high = row.speedup_iqr
        speedup = "1.00" if row.policy == PLAIN else f"{row.speedup:.2f} ({low:.2f}–{high:.2f})"
        out.add_row(
            row.policy,
            row.rule,
            f"{row.temperature:g}",
            f"{row.tokens_per_s:.0f}",
            f"[bold]{speedup}[/bold]" if row.speedup == best else speedup,
            f"{row.tau:.2f}",
            f"{row.verified_per_round:.2f}",
            " ".join("–" if a is None else f"{100 * a:.0f}" for a in row.accept_by_position),
            {True: "✓", False: "✗", None: "?"}[row.lossless],
        )
    return out


_CAPTION = (
    "speed-up: time per token against plain decoding, paired runs, median (quartiles). τ: tokens per round, bonus "
    "included. verified: drafts sent to the target per round. accepted: of the drafts at a position whose "
    "predecessors were accepted. lossless: same tokens as plain decoding; under ratio at T > 0, a chi-square test "
    "against the target's own distributions."
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


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write ``{"environment": ..., "rows": [...]}``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "rows": [dataclasses.asdict(r) for r in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_picture(path: Path, rows: Sequence[Row]) -> None:
    """Draw speed-up by policy, and acceptance by position, one line a setting (needs the ``plot`` extra)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = list(dict.fromkeys((r.rule, r.temperature) for r in rows))
    policies = [p for p in dict.fromkeys(r.policy for r in rows) if p != PLAIN]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2))
    width = 0.8 / len(settings)
    for s, (rule, temperature) in enumerate(settings):
        label = f"{rule}, T = {temperature:g}"
        chosen = {r.policy: r for r in rows if (r.rule, r.temperature) == (rule, temperature)}
        shown = [(i, chosen[p]) for i, p in enumerate(policies)]
        errors = [[r.speedup - r.speedup_iqr[0] for _, r in shown], [r.speedup_iqr[1] - r.speedup for _, r in shown]]
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
