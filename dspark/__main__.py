"""``python -m dspark``: the same program as the console script."""

from __future__ import annotations

from dspark.cli import main

if __name__ == "__main__":
    main()
