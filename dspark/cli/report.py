"""Ablation results: rows and the statistics in them; a table, Markdown, CSV, JSON and a picture; two runs compared."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dspark import __version__
from dspark.policy.output import markdown_table, picture, write_records
from dspark.requests import Round

PLAIN = "plain"
"""The name of decoding without drafts."""

_RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One policy under one rule at one temperature and draft length, over the prompts of one domain.

    Attributes:
        draft_len: drafts per round (levels of a tree).
        domain: kind of text, or ``"all"``.
        tokens_per_s: emitted tokens over seconds, prompt processing included; median over repeats.
        speedup: plain decoding's time per token over this policy's, measured next to it on the same prompt; median
            over prompts and repeats, with its 95 % bootstrap interval in ``speedup_ci``.
        tau: tokens emitted per round, the bonus included.
        verified_per_round: drafts sent to the target per round.
        accept_by_position: of the drafts verified at each position whose predecessors were accepted, the fraction
            accepted; None where there was none. Of a tree: of the rounds that reached a depth, those that got beyond.
        lossless: at temperature 0 and under ``coupled``, the tokens equal plain decoding's; otherwise, the tokens fit
            the target's own distributions (chi-square, p > 1e-4); None where they are too few to tell.
        near_ties: prompts whose output left plain decoding's at two scores within rounding of each other; they count
            as lossless.
    """

    policy: str
    rule: str
    temperature: float
    draft_len: int
    domain: str
    tokens_per_s: float
    speedup: float
    speedup_ci: tuple[float, float]
    tau: float
    verified_per_round: float
    accept_by_position: list[float | None]
    lossless: bool | None
    prompts: int
    tokens: int
    near_ties: int

    @property
    def setting(self) -> tuple[str, float, int, str]:
        """What it shares with the rows of other policies that it is compared with."""
        return self.rule, self.temperature, self.draft_len, self.domain


def speedups(own: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """The median ratio of plain seconds to own ones, paired by prompt and repeat, and the ends of its 95 % interval.

    The interval is a bootstrap over prompts (their repeats go with them, since they are not independent), seeded.

    >>> speedups([[1.0, 1.0], [2.0, 2.0]], [[2.0, 2.0], [4.0, 4.0]])
    (2.0, (2.0, 2.0))
    """
    ratios = torch.tensor(plain, dtype=torch.float64) / torch.tensor(own, dtype=torch.float64)  # [prompts, repeats]
    generator = torch.Generator().manual_seed(0)
    resampled = torch.randint(len(ratios), (_RESAMPLES, len(ratios)), generator=generator)
    medians = ratios[resampled].flatten(1).quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return ratios.quantile(0.5).item(), (low, high)


def acceptance_by_position(rounds: Sequence[Round]) -> list[float | None]:
    """Conditional acceptance at each draft position that any round reached.

    >>> acceptance_by_position([Round(2, 2, 2, 3), Round(2, 2, 0, 1)])
    [0.5, 1.0]
    """
    positions = range(1, max((r.proposed for r in rounds), default=0) + 1)
    reached = [sum(r.verified >= k and r.accepted >= k - 1 for r in rounds) for k in positions]
    passed = [sum(r.accepted >= k for r in rounds) for k in positions]
    return [p / n if n else None for p, n in zip(passed, reached, strict=True)]


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and text; draft length and domain only where rows differ in them."""
    several = {name for name in ("draft_len", "domain") if len({getattr(row, name) for row in rows}) > 1}
    headings = ["policy", "rule", "T"] + ["γ"] * ("draft_len" in several) + ["domain"] * ("domain" in several)
    headings += ["tokens/s", "speed-up", "τ", "verified", "accepted by position, %", "lossless"]
    lines = []
    for row in rows:
        line = [row.policy, row.rule, f"{row.temperature:g}"]
        line += [str(row.draft_len)] * ("draft_len" in several) + [row.domain] * ("domain" in several)
        line += [
            f"{row.tokens_per_s:.0f}",
            "1.00" if row.policy == PLAIN else _with_interval(row),
            f"{row.tau:.2f}",
            f"{row.verified_per_round:.2f}",
            " ".join("–" if a is None else f"{100 * a:.0f}" for a in row.accept_by_position),
            {True: "✓", False: "✗", None: "?"}[row.lossless],
        ]
        lines.append(line)
    return headings, lines


def table(rows: Sequence[Row]) -> Table:
    """Rows as a table, best speed-up of each setting in bold."""
    out = Table(title="Speculative decoding against plain decoding", caption=_CAPTION, caption_justify="left")
    headings, lines = _cells(rows)
    for heading in headings:
        words = heading in ("policy", "rule", "domain") or "%" in heading
        out.add_column(heading, justify="center" if heading == "lossless" else "left" if words else "right")
    previous = None
    for row, line in zip(rows, lines, strict=True):
        if previous not in (None, row.setting):
            out.add_section()
        previous = row.setting
        if row.speedup == max(r.speedup for r in rows if r.setting == row.setting):
            line[headings.index("speed-up")] = f"[bold]{line[headings.index('speed-up')]}[/bold]"
        out.add_row(*line)
    return out


def markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    return markdown_table(*_cells(rows))


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
    for record in records:
        for name in ("speedup_ci", "accept_by_position"):
            record[name] = " ".join("" if a is None else str(a) for a in record[name])
    write_records(as_csv, [field.name for field in dataclasses.fields(Row)], records)
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
    old = {(row.policy, row.setting): row for row in before}
    both = [(old[row.policy, row.setting], row) for row in after if (row.policy, row.setting) in old]
    if not both:
        raise ValueError("compare: the two runs have no setting in common")
    headings = ["policy", "rule", "T", "γ", "domain", "speed-up before", "after", "τ before", "after", "change"]
    lines = []
    for a, b in both:
        change = (
            "faster" if b.speedup_ci[0] > a.speedup_ci[1] else "slower" if b.speedup_ci[1] < a.speedup_ci[0] else ""
        )
        cells = [a.policy, a.rule, f"{a.temperature:g}", str(a.draft_len), a.domain]
        lines.append([*cells, _with_interval(a), _with_interval(b), f"{a.tau:.2f}", f"{b.tau:.2f}", change])
    return markdown_table(headings, lines)


def _with_interval(row: Row) -> str:
    low, high = row.speedup_ci
    return f"{row.speedup:.2f} ({low:.2f}–{high:.2f})"


def write_picture(path: Path, rows: Sequence[Row]) -> None:
    """Draw speed-up by policy, and acceptance by position, one line a setting (needs the ``plot`` extra).

    Of several domains, the rows of all are drawn.
    """
    rows = [row for row in rows if row.domain == "all"]
    settings = list(dict.fromkeys(row.setting for row in rows))
    several = len({row.draft_len for row in rows}) > 1
    policies = [p for p in dict.fromkeys(r.policy for r in rows) if p != PLAIN]
    with picture(path, 2, (12, 4.5), width_ratios=(3, 2)) as (left, right):
        width = 0.8 / len(settings)
        for s, setting in enumerate(settings):
            rule, temperature, draft_len, _ = setting
            label = f"{rule}, T = {temperature:g}" + f", γ = {draft_len}" * several
            chosen = {r.policy: r for r in rows if r.setting == setting}
            shown = [(i, chosen[p]) for i, p in enumerate(policies) if p in chosen]
            errors = [[r.speedup - r.speedup_ci[0] for _, r in shown], [r.speedup_ci[1] - r.speedup for _, r in shown]]
            x = [i + (s - (len(settings) - 1) / 2) * width for i, _ in shown]
            left.bar(x, [r.speedup for _, r in shown], width, yerr=errors, label=label, capsize=2)
            deepest = max(chosen.values(), key=lambda r: r.verified_per_round).accept_by_position
            right.plot(
                range(1, len(deepest) + 1), [float("nan") if a is None else a for a in deepest], "o-", label=label
            )
        left.axhline(1, color="black", linewidth=1)
        left.set(ylabel="speed-up over plain decoding", xticks=range(len(policies)), xticklabels=policies)
        left.margins(y=0.3)
        left.legend(loc="upper left", ncols=2)
        right.set(xlabel="draft position", ylabel="accepted, given its predecessors", ylim=(0, 1.02))
        right.legend()
        for axes in (left, right):
            axes.grid(axis="y", alpha=0.3)
