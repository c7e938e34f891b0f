"""The counter that a command of `latedrop crowd` means: ours, by file or name; code; or an exported program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from latedrop.errors import ArgumentError
from latedrop.terminal import option

if TYPE_CHECKING:
    from latedrop_crowd.calibration import CrowdCalibration
    from latedrop_crowd.mcnn import Trained

__all__ = [
    "CALIBRATION",
    "NO_OPTIONS",
    "WEIGHTS",
    "CounterOptions",
    "calibrated",
    "fold_networks",
    "is_foreign",
    "load_counter",
    "weights_path",
]

WEIGHTS = Annotated[
    str,
    option(
        "A counter: a file that `crowd train` wrote, a shipped name such as mall, package.module:callable, or a .pt2 "
        "file.",
        "--weights",
        "-w",
    ),
]
CALIBRATION = Annotated[
    Path | None,
    option("What `crowd calibrate` wrote; by default the one beside the weights.", "--calibration", "-c"),
]
_OTHERS = "For a counter trained elsewhere:"
STATE = Annotated[str | None, option(f"{_OTHERS} its weights, for package.module:callable.", "--state")]
INPUT_SCALE = Annotated[float | None, option(f"{_OTHERS} its frames are in [0, this]; 255 for bytes.")]
DENSITY_SCALE = Annotated[float | None, option(f"{_OTHERS} people for each unit of its map.")]
RELU = Annotated[bool, option(f"{_OTHERS} cut off densities below 0.", "--relu")]
STRIDE = Annotated[int | None, option(f"{_OTHERS} pixels on each side of a cell of its map; 4 by default.")]
CHANNELS = Annotated[int | None, option(f"{_OTHERS} 1 for grey frames, the default, 3 for colour.")]
ROI = Annotated[Path | None, option("Image: people are counted where it is not black; by default the weights' own.")]


class CounterOptions(NamedTuple):
    """The options about a counter, which `command.bundled` makes of one parameter; None where they were not given."""

    state: STATE = None
    input_scale: INPUT_SCALE = None
    density_scale: DENSITY_SCALE = None
    relu: RELU = False
    stride: STRIDE = None
    channels: CHANNELS = None
    roi: ROI = None

    def given(self) -> dict[str, Any]:
        """Those about a counter of others that were given."""
        said = {name: value for name, value in self._asdict().items() if name not in ("roi", "relu")}
        found = {name: value for name, value in said.items() if value is not None}
        return found | ({"relu": True} if self.relu else {})


NO_OPTIONS = CounterOptions()


def is_foreign(weights: str) -> bool:
    """Whether code, or a program, is meant."""
    return (not Path(weights).is_file() and ":" in weights) or Path(weights).suffix.lower() == ".pt2"


def load_counter(weights: str, device: Any, options: CounterOptions) -> Trained:
    """The counter, on its device."""
    trained = _foreign(weights, device, options) if is_foreign(weights) else _ours(weights, device, options)
    if options.roi is None:
        return trained
    import torch

    from latedrop_crowd.density import roi_cells
    from latedrop_crowd.layouts import read_roi

    mask = read_roi(options.roi).repeat(trained.enlarge, 0).repeat(trained.enlarge, 1)
    return replace(trained, roi=torch.from_numpy(roi_cells(mask, trained.stride)).to(device))


def weights_path(weights: str) -> tuple[Path, bool]:
    """The file, and whether a calibration beside it is not the user's own; a path goes before a name."""
    from latedrop_crowd.mcnn import shipped

    if is_foreign(weights):
        program = Path(weights).suffix.lower() == ".pt2"
        return (Path(weights), False) if program else (Path(f"{weights.rpartition(':')[2]}.py"), True)
    if Path(weights).is_file() or Path(weights).name != weights or weights.endswith(".safetensors"):
        return Path(weights), False
    return shipped(weights), True


def calibrated(
    weights: str, calibration: Path | None, device: Any, options: CounterOptions
) -> tuple[Trained, CrowdCalibration]:
    """The counter with its calibration."""
    from latedrop_crowd.calibration import load_calibration

    trained = load_counter(weights, device, options)
    path, _ = weights_path(weights)
    beside = path.with_name(f"{path.stem}.calibration.json")
    if calibration is None and not beside.is_file():
        raise ArgumentError(
            f"expected --calibration, as there is no {beside.name} beside the weights. Run: latedrop crowd calibrate "
            f"--weights {weights} --set ..."
        )
    return trained, load_calibration(calibration or beside, trained)


def fold_networks(trained: Trained, path: Path, device: Any) -> list[Trained]:
    """The networks beside a cross-fitted one, which left its blocks of frames out; none for others."""
    from latedrop_crowd.mcnn import load_weights

    names = [path.with_suffix(f".fold{number}.safetensors") for number in range(int(trained.about.get("folds", 0)))]
    return [load_weights(name, device) for name in names]


def _ours(weights: str, device: Any, options: CounterOptions) -> Trained:
    from latedrop_crowd.mcnn import load_weights

    if options.given():
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options.given())
        raise ArgumentError(
            f"expected {names} only with package.module:callable or a .pt2 file; {weights} says itself how its frames "
            "and its map are scaled. Leave it out."
        )
    return load_weights(weights_path(weights)[0], device)


def _foreign(weights: str, device: Any, options: CounterOptions) -> Trained:
    from latedrop.named import load_model
    from latedrop_crowd.counters import as_counter

    given = options.given()
    model = load_model(weights, given.pop("state", None), device=str(device))
    return as_counter(model, **given, about={"network": weights})
