"""The study as a command without extras: `python -m latedrop.studies.classification`."""

import sys

from latedrop.studies.classification.study import main

if __name__ == "__main__":
    sys.exit(main())
