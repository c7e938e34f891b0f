"""The studies as a command: `python -m studies uci --data DIR`, and the same for shift, classification and crowd."""

import sys
from collections.abc import Sequence
from importlib import import_module

from studies.driver import command

NAMES = ("uci", "shift", "classification", "crowd")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study that the first word names; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in NAMES:
        return command(import_module(f"studies.{words[0]}.study").STUDY, words[1:])
    asked = words in ([], ["--help"], ["-h"])
    usage = f"usage: python -m studies {{{','.join(NAMES)}}} [--help] [--data DIR] [--out FOLDER] ..."
    wrong = "" if asked else f"studies: expected one of {', '.join(NAMES)}; found {words[0]}.\n"
    print(f"{wrong}{usage}", file=sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
