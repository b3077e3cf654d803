"""Commands run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from dspark.cli.app import app


def run(*arguments: str) -> str:
    """What a command that succeeds prints; what it refuses is raised."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout
