"""The study as a command without extras: `python -m studies.shift`."""

import sys

from studies.shift.study import main

if __name__ == "__main__":
    sys.exit(main())
