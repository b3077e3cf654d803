"""The command line: ``python -m dspark``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program on ``sys.argv``.

    Without the ``cli`` extra it says how to get it and exits with status 1. Input that the library refuses is one line
    and status 2; ``python -X dev -m dspark`` shows the traceback.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f'dspark: the command line needs {error.name}; install it with: pip install "dspark[cli]"')
    from dspark.cli.app import app

    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        if sys.flags.dev_mode:
            raise
        sys.stderr.write(f"dspark: {error}\n")
        sys.exit(2)
