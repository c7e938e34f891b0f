"""A model in a module of its own with its calibration beside it, as a user has them."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import latedrop


def save_calibrated(where: Path, module: str, code: str, name: str, inputs: int) -> npt.NDArray[np.float64]:
    """Write `module`.py with the model `name`, and its `cal.json`; the inputs of the calibration."""
    (where / f"{module}.py").write_text(code)
    names: dict[str, Any] = {}
    exec(code, names)
    dice = np.random.default_rng(0)
    x = dice.normal(size=(60, inputs))
    latedrop.calibrate(names[name], (x, dice.normal(size=(60, 1))), progress=False).save(where / "cal.json")
    return x
