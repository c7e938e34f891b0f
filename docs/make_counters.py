"""Write the table of crowd_training.md from the logs beside the weights: `python docs/make_counters.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latedrop_crowd.mcnn import shipped
from latedrop_crowd.training.network import read_log

DOCS = Path(__file__).parent
START, END = "<!-- table: make_counters.py -->\n", "<!-- end of table -->\n"
FOLDERS = {"": shipped("scenes").parent, "study/": DOCS.parent / "studies" / "crowd" / "weights"}


def read_logs() -> dict[str, dict[str, Any]]:
    """The logs by the name of their weights: first those that are shipped, then those of the study."""
    return {
        f"{prefix}{name}": read_log(folder / f"{name}.log.json")
        for prefix, folder in FOLDERS.items()
        for name in sorted(path.name.removesuffix(".log.json") for path in folder.glob("*.log.json"))
    }


def table(logs: Mapping[str, Mapping[str, Any]]) -> str:
    """What the networks reach on test frames, as a Markdown table."""
    titles = ["weights", "set", "rate", "frames: train, validation, test", "epochs"]
    titles += ["left-out MAE", "test MAE", "test RMSE", "mean predictor: MAE, RMSE"]
    rows = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for name, log in logs.items():
        test, mean = log.get("test"), log["mean_predictor"].get("test")
        numbers = {**log["data"]["frames"], **({"test": test["frames"]} if test else {})}
        frames = ", ".join(str(numbers[part]) for part in ("train", "validation", "test"))
        reached = [f"{test['mae']:.2f}", f"{test['rmse']:.2f}"] if test else ["not measured"] * 2
        against = f"{mean['mae']:.2f}, {mean['rmse']:.2f}" if mean else "not measured"
        epochs = f"{log['epochs']}" + (f", the best {log['best_epoch']}" if "best_epoch" in log else "")
        left_out = f"{log['held_out']['mae']:.2f}" if "held_out" in log else ""
        cells = [f"`{name}`", log["data"]["set"], f"{log['settings']['rate']:g}", frames, epochs, left_out]
        cells += [*reached, against]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def replaced(page: str, logs: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the table of these logs."""
    before, rest = page.split(START)
    after = rest.split(END, 1)[1]
    return f"{before}{START}{table(logs)}{END}{after}"


if __name__ == "__main__":
    target = DOCS / "crowd_training.md"
    target.write_text(replaced(target.read_text(encoding="utf-8"), read_logs()), encoding="utf-8")
