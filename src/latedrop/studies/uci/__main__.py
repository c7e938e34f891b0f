"""The study as a command without extras: `python -m latedrop.studies.uci`."""

import sys

from latedrop.studies.uci.study import main

if __name__ == "__main__":
    sys.exit(main())
