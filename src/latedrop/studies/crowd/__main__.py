"""The study as a command without extras: `python -m latedrop.studies.crowd`."""

import sys

from latedrop.studies.crowd.study import main

if __name__ == "__main__":
    sys.exit(main())
