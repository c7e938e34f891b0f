"""`python -m latedrop` is the command `latedrop`."""

from latedrop.cli import main

if __name__ == "__main__":
    main()
