"""The study as a command without extras: `python -m studies.classification`."""

import sys

from studies.classification.study import main

if __name__ == "__main__":
    sys.exit(main())
