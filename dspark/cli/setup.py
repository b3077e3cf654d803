"""What several commands share: options, models, prompts, policies by name, and how they report to the console."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.decode import TreeShape
from dspark.models.drafter import DSparkDrafter
from dspark.models.loading import load_drafter, load_target
from dspark.models.target import Target
from dspark.models.tiny import TINY_DRAFTER, TINY_TARGET, Prompt, held_out_prompts, load_tokenizer
from dspark.ops.types import RULES_OF_TREES, Rule
from dspark.policy import (
    Bandit,
    ConfidenceScheduled,
    ConfidenceThreshold,
    CostProfile,
    FixedK,
    Gated,
    Goodput,
    Oracle,
    StepCost,
    VerifyPolicy,
)
from dspark.policy.calibration import SequentialTemperatures
from dspark.policy.confidence import ConfidenceProvider, Tempered, WithConfidence
from dspark.policy.learned import HeadMarginLogistic, MarginLogistic, OnlineTempered

if TYPE_CHECKING:
    from tokenizers import Tokenizer

POLICY_HELP = (
    "plain, fixed:K, threshold:T, scheduled, scheduled-lag2, goodput, bandit, oracle or module:Class of your own; "
    "NAME@FILE with the temperatures that calibrate wrote; NAME@online, NAME@margin, NAME@head+margin with confidences "
    "that are learnt; gated:NAME, which does not draft while that does not pay."
)
_OF_PROFILE: dict[str, Callable[[CostProfile], VerifyPolicy]] = {
    "scheduled": ConfidenceScheduled,
    "scheduled-lag2": lambda profile: ConfidenceScheduled(profile, lag=2),
    "goodput": Goodput,
    "bandit": Bandit,
}
_PROVIDERS: dict[str, Callable[[], ConfidenceProvider]] = {
    "online": OnlineTempered,
    "margin": MarginLogistic,
    "head+margin": HeadMarginLogistic,
}
_OTHERS = ("plain", "fixed", "threshold", "oracle", "tree")
RULE_HELP = "coupled, ratio, block, match or recursive"

TargetFolder = Annotated[Path | None, typer.Option(help="Hugging Face folder; the tiny pair by default.")]
DrafterFolder = Annotated[Path | None, typer.Option(help="DeepSpec folder.")]
ProfileFile = Annotated[
    Path | None, typer.Option(help="Cost profile (JSON of the command profile); measured at the start by default.")
]


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


def choose_prompts(file: Path | None, count: int) -> list[Prompt]:
    """So many prompts, taken evenly over a file or, without one, over the held-out texts."""
    texts = held_out_prompts() if file is None else read_prompts(file)
    return texts[:: max(1, len(texts) // count)][:count]


def tree_shape(name: str) -> TreeShape | None:
    """The trees that a policy's name asks for: ``tree:NODES`` or ``tree:NODES:BRANCHING``; None for another name.

    Raises:
        ValueError: the numbers are missing or out of range.

    >>> tree_shape("tree:32:2")
    TreeShape(nodes=32, branching=2)
    """
    kind, *numbers = name.split(":")
    if kind != "tree":
        return None
    if len(numbers) not in (1, 2) or not all(number.isdigit() for number in numbers):
        raise ValueError(f"policy {name!r}: expected tree:NODES or tree:NODES:BRANCHING")
    return TreeShape(*map(int, numbers))


def runs_under(name: str, rule: Rule) -> bool:
    """Whether a policy and a rule go together: ``block`` and the oracle would bias the output, and only some rules know
    trees."""
    if name == "oracle":
        return rule != "block"
    return tree_shape(name) is None or rule in RULES_OF_TREES


def most_verified(name: str) -> int:
    """The drafts that a policy insists on: K of ``fixed:K``."""
    kind, _, number = name.partition(":")
    return int(number) if kind == "fixed" and number.isdigit() else 0


def check_policy(name: str, draft_len: int) -> None:
    """Raise ``ValueError`` unless ``name`` is a policy that can run with ``draft_len`` drafts."""
    if tree_shape(name) is not None:
        return
    policy = make_policy(name, CostProfile((1,), (1.0,)), accepted=())
    if isinstance(policy, FixedK) and policy.k > draft_len:
        raise ValueError(f"policy {name!r}: expected fixed:K with K from 0 to {draft_len}")


def make_policy(name: str, profile: CostProfile | None, accepted: Sequence[int] | None = None) -> VerifyPolicy | None:
    """Build a policy by name for one request; None is plain decoding.

    Args:
        name: see :data:`POLICY_HELP`.
        profile: cost curve, for the policies that weigh costs.
        accepted: accepted drafts of each round of an earlier pass, for the oracle.

    Raises:
        ValueError: another name, or what the policy needs is None.
    """

    def costs() -> CostProfile:
        if profile is None:
            raise ValueError(f"policy {name!r}: needs a cost profile")
        return profile

    kind, _, argument = name.partition(":")
    if kind == "gated" and argument:
        policy = None if argument == "oracle" or argument.startswith("gated:") else make_policy(argument, profile)
        if policy is None:
            raise ValueError(f"policy {name!r}: gated:NAME takes a policy that drafts and is not gated")
        return Gated(policy, StepCost(costs()))
    if "@" in name:
        inner, _, source = name.partition("@")
        policy = make_policy(inner, profile)
        if policy is None:
            raise ValueError(f"policy {name!r}: plain decoding has no confidences")
        if source in _PROVIDERS:
            return WithConfidence(policy, _PROVIDERS[source]())
        return WithConfidence(policy, Tempered(SequentialTemperatures.load(source)))
    if kind == "fixed" and argument.isdigit():
        return FixedK(int(argument))
    if kind == "threshold":
        try:
            return ConfidenceThreshold(float(argument))
        except ValueError as error:
            raise ValueError(f"policy {name!r}: expected threshold:T with T from 0 to 1") from error
    if name == "plain":
        return None
    if name in _OF_PROFILE:
        return _OF_PROFILE[name](costs())
    if name == "oracle":
        if accepted is None:
            raise ValueError("policy 'oracle': replays an earlier pass with the same seed; use it in ablate")
        return Oracle({0: accepted})
    if argument and kind not in (*_OF_PROFILE, *_OTHERS):
        return _custom(name, kind, argument, costs)
    raise ValueError(f"policy {name!r}: expected {POLICY_HELP}")


def needs_profile(name: str) -> bool:
    """Whether :func:`make_policy` may ask for a cost profile; a class of one's own may."""
    return name.partition("@")[0].partition(":")[0] not in _OTHERS


def needs_margins(name: str) -> bool:
    """Whether the policy looks at the margins of drafts."""
    return name.partition("@")[2] in ("margin", "head+margin")


def _custom(name: str, module: str, attribute: str, costs: Callable[[], CostProfile]) -> VerifyPolicy:
    """Make ``module:Class``, with ``profile=`` if it takes one."""
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"policy {name!r}: expected a class, got {type(found).__name__}")
    policy = found(profile=costs()) if "profile" in inspect.signature(found).parameters else found()
    if not all(callable(getattr(policy, method, None)) for method in ("plan", "observe")):
        raise ValueError(f"policy {name!r}: expected methods plan and observe (dspark.policy.VerifyPolicy)")
    return cast(VerifyPolicy, policy)


def check_rule(rule: str) -> Rule:
    """Narrow a word to a rule, or raise ``ValueError``."""
    if rule not in get_args(Rule):
        raise ValueError(f"rule {rule!r}: expected one of {', '.join(get_args(Rule))}")
    return cast(Rule, rule)


def console_of(width: int) -> Console:
    """A console of that width where the output has none: into a file, tables would be folded to 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def progress_bar(console: Console) -> Progress:
    """A line that says what runs, how much of it is done, and how long the rest will take."""
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def draw(console: Console, name: str, write: Callable[[Path], None], path: Path) -> list[Path]:
    """Write a picture and return its path; without matplotlib, say how to get one and return none."""
    if find_spec("matplotlib") is None:
        console.print(f'for a {name}, too: pip install "dspark[plot]"', markup=False)
        return []
    write(path)
    return [path]
