"""The command line: parse, call, print; no mathematics."""

from latedrop.cli.app import main

__all__ = ["main"]
