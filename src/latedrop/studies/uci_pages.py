"""Pages of the UCI study."""
from pathlib import Path
from typing import Any


def write(results: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Placeholder until the pages are there."""
    return []
