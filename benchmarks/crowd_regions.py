"""Which regions of a density map are false: what their mass, isolation and uncertainty tell about it.

    python -m benchmarks.crowd_regions --data ../shared/data        # measures, then writes results/crowd_regions.json
    python -m benchmarks.crowd_regions --data ../shared/data --ship    # also writes the rules into the calibrations

The shipped counters read every k-th test frame of their sets. Rules are chosen on the first half of these frames (on
validation frames for the scenes, whose counter was not trained on them), all numbers are of the second half. A region
is false where no annotated head lies in it or near it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import RESULTS, machine, markdown_table, write
from latedrop.records import plain
from latedrop_crowd.calibration import load_calibration, read_maps
from latedrop_crowd.layouts import open_as_trained
from latedrop_crowd.mcnn import load_weights, shipped
from latedrop_crowd.regions import RegionTable, fit_policy, near_cells
from latedrop_crowd.scenes import make_scenes
from studies.crowd.rejection import auc

FOLDERS = {"mall": "mall", "ucsd": "ucsd", "pets": "pets2009"}
FRAMES = 60
STRATA = 10


def measured(name: str, data: Path, *, ship: bool) -> dict[str, Any]:
    """Rules from the first frames, and what they and single features say about regions of the others."""
    trained = load_weights(shipped(name))
    path = shipped(name, ".calibration.json")
    calibration = load_calibration(path, trained)
    if name == "scenes":
        crowd_set = make_scenes(0, 80, FRAMES)
        first, second = crowd_set.validation, crowd_set.test
    else:
        crowd_set = open_as_trained(name, data / FOLDERS[name], trained)
        chosen = [int(i) for i in np.array(crowd_set.test)[:: max(1, len(crowd_set.test) // (2 * FRAMES))]]
        first, second = tuple(chosen[: len(chosen) // 2]), tuple(chosen[len(chosen) // 2 :])
    near = near_cells(crowd_set.sigma, trained.stride)
    early = read_maps(trained, calibration, crowd_set, first, deviations=False)
    late = read_maps(trained, calibration, crowd_set, second)
    policy = fit_policy(early, near=near, features=("mass", "isolation"))
    if ship:
        replace(calibration, policy=policy).save(path)
    table = RegionTable.of(late, policy.threshold, near)
    false, std = ~table.true_region, table.ratio * table.mass
    asked = table.mass >= 0.1
    faint = (table.mass <= policy.faint_mass) & (table.isolation >= policy.faint_isolation)
    unsure = asked & (table.ratio >= np.quantile(table.ratio[asked], 0.9))
    return {
        "frames": {"rule": len(first), "judged": len(second)},
        "policy": plain(policy),
        "regions": len(false),
        "false": int(false.sum()),
        "auc": {
            "std": auc(std, false),
            "ratio": auc(table.ratio, false),
            "low_mass": auc(-table.mass, false),
            "isolation": auc(table.isolation, false),
            "ratio_at_equal_mass": auc_at_equal(table.ratio, table.mass, false),
        },
        "rules": {
            rule: {"marked": int(marked.sum()), "false": int((marked & false).sum())}
            for rule, marked in (("faint", faint), ("ratio", unsure))
        },
    }


def auc_at_equal(score: Any, mass: Any, false: Any) -> float | None:
    """The area under the ROC curve inside each tenth of the masses, weighted by pairs of a false and a true region."""
    strata = []
    for part in np.array_split(np.argsort(mass, kind="stable"), STRATA):
        area, pairs = auc(score[part], false[part]), int(false[part].sum()) * int((~false[part]).sum())
        strata += [] if area is None else [(area, pairs)]
    total = sum(pairs for _, pairs in strata)
    return sum(area * pairs for area, pairs in strata) / total if total else None


def region_table(record: dict[str, Any]) -> str:
    """Areas under the ROC curve for false regions, and what the two rules mark."""
    rows = []
    for name, row in record["sets"].items():
        areas = [_number(row["auc"][key]) for key in ("std", "ratio", "ratio_at_equal_mass", "low_mass")]
        rules = [f"{rule['marked']}, {_share(rule)}" for rule in row["rules"].values()]
        share = f"{row['regions']}, {100 * row['false'] / row['regions']:.0f} %"
        rows.append([name, share, *areas, *rules])
    heads = ["counter", "regions, false", "AUC: std", "ratio", "ratio at equal mass", "low mass"]
    return markdown_table([*heads, "faint: marked, false", "highest ratios: marked, false"], rows)


def _share(rule: dict[str, int]) -> str:
    return f"{100 * rule['false'] / rule['marked']:.0f} %" if rule["marked"] else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="+", default=[*FOLDERS, "scenes"], choices=[*FOLDERS, "scenes"])
    parser.add_argument("--ship", action="store_true", help="write the rules into the calibrations of the package")
    words = parser.parse_args()
    path = RESULTS / "crowd_regions.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"sets": {}}
    for name in words.sets:
        record["sets"][name] = measured(name, words.data, ship=words.ship)
        write("crowd_regions", {**record, "machine": machine(torch.device("cpu"))})
    print(region_table(record))


if __name__ == "__main__":
    main()
