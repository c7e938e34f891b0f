"""The study as a command without extras: `python -m studies.crowd`."""

import sys

from studies.crowd.study import main

if __name__ == "__main__":
    sys.exit(main())
