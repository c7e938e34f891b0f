"""Every benchmark that runs anywhere, one after the other: `python -m benchmarks`."""

import runpy

if __name__ == "__main__":
    for name in ("linear", "speed"):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
