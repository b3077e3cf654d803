"""The root command. A subcommand's module is imported only when that subcommand runs, so that help stays quick."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

COMMANDS = {
    "generate": "Continue a prompt, or those of a file, and stream the text.",
    "ablate": "Compare policies, rules and temperatures against plain decoding.",
    "calibrate": "Fit temperatures to the drafter's confidences, and report how well they fit.",
    "profile": "Measure what a round costs here, for the policies that weigh costs.",
    "simulate": "Serve simulated requests under several policies, and compare throughput and latency.",
    "train": "Train the tiny pair from this machine's Python standard library.",
    "doctor": "Show versions, devices, extras, and which backend each op takes.",
}
"""Subcommand -> one line of help. Each lives in the module of its name here, as a Typer application named ``app``."""


class LazyGroup(TyperGroup):
    """A group that lists commands from a table and imports one when it is asked to run it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the real command in the place of its stub before the ordinary look-up."""
        if args and args[0] in COMMANDS:
            module = import_module(f"dspark.cli.{args[0]}")
            self.commands[args[0]] = get_command(module.app)
        return super().resolve_command(ctx, args)


def _stub() -> None:
    """What the help page lists; ``LazyGroup`` replaces it before it could run."""


app = typer.Typer(
    cls=LazyGroup,
    help="Speculative decoding that never changes what the model would have said.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _line in COMMANDS.items():
    app.command(_name, help=_line)(_stub)
