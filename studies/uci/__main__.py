"""The study as a command without extras: `python -m studies.uci`."""

import sys

from studies.uci.study import main

if __name__ == "__main__":
    sys.exit(main())
