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
RULE_HELP = "coupled, ratio, block or match"


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
        ValueError: a line of a ``.jsonl`` file is not such an object.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [Prompt("text", path.name, content)]
    prompts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["text"] if "text" in row else "\n".join(row["turns"])
            prompts.append(Prompt(row.get("domain", path.stem), f"{path.name}:{number}", text))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object with text or turns: {error!r}") from error
    return prompts


def check_policy(name: str, draft_len: int) -> None:
    """Raise ``ValueError`` unless ``name`` is a policy that can run with ``draft_len`` drafts."""
    policy = make_policy(name, CostProfile((1,), (1.0,)), accepted=())
    if isinstance(policy, FixedK) and policy.k > draft_len:
        raise ValueError(f"policy {name!r}: expected fixed:K with K from 0 to {draft_len}")


def make_policy(name: str, profile: CostProfile | None, accepted: Sequence[int] | None = None) -> VerifyPolicy | None:
    """Build a policy by name for one request; None is plain decoding.

    Args:
        name: see :data:`POLICY_HELP`.
        profile: cost curve, for the scheduled forms.
        accepted: accepted drafts of each round of an earlier pass, for the oracle.

    Raises:
        ValueError: another name, or what the policy needs is None.
    """
    kind, _, argument = name.partition(":")
    if kind == "fixed" and argument.isdigit():
        return FixedK(int(argument))
    if name == "plain":
        return None
    if name in ("scheduled", "scheduled-lag2"):
        if profile is None:
            raise ValueError(f"policy {name!r}: needs a cost profile")
        return ConfidenceScheduled(profile, lag=2 if name == "scheduled-lag2" else 0)
    if name == "oracle":
        if accepted is None:
            raise ValueError("policy 'oracle': replays an earlier pass with the same seed; use it in ablate")
        return Oracle({0: accepted})
    raise ValueError(f"policy {name!r}: expected {POLICY_HELP}")


def check_rule(rule: str) -> Rule:
    """Narrow a word to a rule, or raise ``ValueError``."""
    if rule not in get_args(Rule):
        raise ValueError(f"rule {rule!r}: expected one of {', '.join(get_args(Rule))}")
    return cast(Rule, rule)
