"""The command line: parse, call, print; no mathematics.

It may import every room; none imports it.
"""

from latedrop.cli.app import main

__all__ = ["main"]
