"""Run every benchmark: `python -m benchmarks`."""

from benchmarks import linear

if __name__ == "__main__":
    linear.main()
