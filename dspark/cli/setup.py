"""Options that several commands share: which models, which prompts, which policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from dspark.models.drafter import DSparkDrafter
from dspark.models.loading import load_drafter, load_target
from dspark.models.target import Target
from dspark.models.tiny import TINY_DRAFTER, TINY_TARGET, Prompt, load_tokenizer
from dspark.ops.types import Rule
from dspark.policy import ConfidenceScheduled, CostProfile, FixedK, Oracle, VerifyPolicy

if TYPE_CHECKING:
    from tokenizers import Tokenizer

POLICY_HELP = "plain, fixed:K, scheduled, scheduled-lag2 or oracle."


def load_models(target: Path | None, drafter: Path | None) -> tuple[Target, DSparkDrafter, Tokenizer]:
    """The pair and its tokenizer; the embedded tiny pair when no folder is given.

    Raises:
        ValueError: only one of the two folders is given.
    """
    if (target is None) != (drafter is None):
        raise ValueError("--target and --drafter: give both, or neither for the embedded tiny pair")
    loaded = load_target(target or TINY_TARGET)
    return loaded, load_drafter(drafter or TINY_DRAFTER, loaded), load_tokenizer(target or TINY_TARGET)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a file: JSON lines with ``text`` (and ``domain``), or with ``turns``, or else the file as one text.

    Raises:
        ValueError: a JSON line has neither ``text`` nor ``turns``.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [Prompt("text", path.name, content)]
    prompts = []
    for number, line in enumerate(filter(str.strip, content.splitlines()), start=1):
        row = json.loads(line)
        text = row.get("text") or "\n".join(row.get("turns", []))
        if not text:
            raise ValueError(f"{path}, line {number}: expected text or turns, got {sorted(row)}")
        prompts.append(Prompt(row.get("domain", path.stem), row.get("source", f"{path.name}:{number}"), text))
    return prompts


def check_policy(name: str, draft_len: int) -> None:
    """Raise ``ValueError`` unless ``name`` is a policy that :func:`make_policy` can build for ``draft_len`` drafts."""
    kind, _, argument = name.partition(":")
    if kind == "fixed":
        if not argument.isdigit() or int(argument) > draft_len:
            raise ValueError(f"policy {name!r}: expected fixed:K with K from 0 to {draft_len}")
    elif name not in ("plain", "scheduled", "scheduled-lag2", "oracle"):
        raise ValueError(f"policy {name!r}: expected {POLICY_HELP}")


def make_policy(name: str, profile: CostProfile | None, accepted: Sequence[int] | None = None) -> VerifyPolicy | None:
    """Build a policy by name for one request; None is plain decoding.

    Args:
        name: see :data:`POLICY_HELP`.
        profile: cost curve for the scheduled forms.
        accepted: accepted drafts of each round of an earlier pass, for the oracle.
    """
    kind, _, argument = name.partition(":")
    if kind == "fixed":
        return FixedK(int(argument))
    if kind in ("scheduled", "scheduled-lag2"):
        if profile is None:
            raise ValueError(f"policy {name!r}: needs a cost profile")
        return ConfidenceScheduled(profile, lag=2 if kind == "scheduled-lag2" else 0)
    if kind == "oracle":
        if accepted is None:
            raise ValueError("policy 'oracle': replays an earlier pass with the same seed; use it in ablate")
        return Oracle({0: accepted})
    return None


def check_rule(rule: str) -> Rule:
    """Narrow a word to a rule, or raise ``ValueError``."""
    if rule not in get_args(Rule):
        raise ValueError(f"rule {rule!r}: expected one of {', '.join(get_args(Rule))}")
    return cast(Rule, rule)
