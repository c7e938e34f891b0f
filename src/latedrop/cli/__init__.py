"""The command line: parse, call, print; no mathematics.

It may import every room; none imports it. typer and rich are an extra, imported when `main` runs.
"""

import sys
from collections.abc import Sequence

from latedrop.errors import LatedropError
from latedrop.terminal import need

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments`, by default those of the process, and exit."""
    try:
        need("cli", "typer", "rich")
    except LatedropError as error:
        sys.exit(f"latedrop: {error}")
    from latedrop.cli.app import main as run

    run(arguments)
