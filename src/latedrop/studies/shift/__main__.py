"""The study as a command without extras: `python -m latedrop.studies.shift`."""

import sys

from latedrop.studies.shift.study import main

if __name__ == "__main__":
    sys.exit(main())
