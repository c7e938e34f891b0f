"""The options of the commands on a user's own model: what they are called, what they say, how their text is read."""

import csv
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from latedrop.errors import ArgumentError
from latedrop.terminal import argument, number_list, option

if TYPE_CHECKING:
    from torch import nn

    from latedrop.calibration.methods import Method as FittingMethod
    from latedrop.calibration.targets import Transform
    from latedrop.prediction.predictor import ClassPredictor, Predictor

__all__ = ["FILES", "LEVEL", "Classes", "Fitting", "Loading", "Tabled", "TargetUnit", "split"]

LEVEL = 0.9
"""Of intervals, where no level is given."""
in_model, in_data, in_output = (partial(option, rich_help_panel=name) for name in ("Model", "Data", "Output"))

FILES = "csv, parquet, feather or npz"

Model = Annotated[str, argument("package.module:callable, or a .pt2 file of torch.export.", metavar="MODEL")]
Record = Annotated[str, argument("What `latedrop calibrate` wrote.", metavar="CALIBRATION")]

Weights = Annotated[str | None, in_model("Weights: .safetensors, or .pt of a state_dict.")]
Device = Annotated[str, in_model("auto, cpu or cuda.", autocompletion=lambda: ["auto", "cpu", "cuda"])]
Select = Annotated[list[str] | None, in_model("Only sites of this name pattern; may be repeated.")]

Example = Annotated[str | None, in_data(f"Example rows: {FILES}.")]
InputShape = Annotated[list[str] | None, in_data("Or random rows of this shape, such as 3,224,224.")]
Target = Annotated[str | None, in_data("Target columns, or the column of labels; y for arrays.")]
DropNan = Annotated[bool, in_data("Leave out rows with NaN or missing values.", "--drop-nan")]
BatchSize = Annotated[int, in_data("Rows that are read and run at once.", min=1)]


Level = Annotated[
    float | None,
    in_output(f"Probability that the interval or set holds the target; {LEVEL} by default."),
]
Report = Annotated[str | None, in_output("Also write a page about it, HTML.")]
Json = Annotated[bool, in_output("Print JSON, and nothing else, to stdout.", "--json")]
Verbose = Annotated[
    int,
    in_output("Say what is done, on stderr; -vv says more.", "--verbose", "-v", count=True, show_default=False),
]
Debug = Annotated[bool, in_output("Show the traceback of an error.", "--debug")]
ImageTransform = Annotated[
    str | None,
    in_data("From image to input: package.module:function; RGB from 0 to 1 by default."),
]


class Loading(NamedTuple):
    """The options that say how a model is loaded and which part of its output is used, of one parameter."""

    weights: Weights = None
    untrained: Annotated[bool, in_model("Accept random weights, an error otherwise.", "--untrained")] = False
    device: Device = "auto"
    readout: Annotated[str | None, in_model("Output to use: a name, an index, or package.module:function.")] = None

    def files(self, model: str, calibration: str | None = None, **others: str | None) -> dict[str, str | None]:
        """Return the files that a command reads by the names of its arguments; `conformal_data` is --conformal-data."""
        files = {"MODEL": model, "CALIBRATION": calibration, "--weights": self.weights, "--readout": self.readout}
        return files | {f"--{name.replace('_', '-')}": path for name, path in others.items()}

    def load(self, model: str) -> "nn.Module":
        """Load the network that MODEL names."""
        from latedrop.named import load_model

        return load_model(model, self.weights, device=self.device, untrained=self.untrained)

    def load_calibrated(self, model: str, calibration: str, rows: int = 256) -> "Predictor | ClassPredictor":
        """Load the network with its calibration, to be run on `rows` rows at once."""
        from latedrop.named import readout_of
        from latedrop.prediction.predictor import load

        uq: Any = load(calibration, self.load(model), readout_of(self.readout))
        uq.batch_size = rows
        return uq  # type: ignore[no-any-return]


class Tabled(NamedTuple):
    """The options that say which columns of a table, or which images that it names, are inputs, of one parameter."""

    inputs: Annotated[
        str | None,
        in_data("Input columns; by default all others, or array x.", "--inputs", "--input"),
    ] = None
    ignore: Annotated[str | None, in_data("Columns that are not inputs, separated by commas.")] = None
    images: Annotated[str | None, in_data("Folder of images that a column names: the inputs.")] = None
    column: Annotated[str | None, in_data("Column with the images' names; file by default.")] = None
    transform: ImageTransform = None


class TargetUnit(NamedTuple):
    """The options that say how targets were transformed for training, of one parameter."""

    target_mean: Annotated[str | None, in_data("Mean of the targets that training took away.")] = None
    target_std: Annotated[str | None, in_data("Standard deviation that training divided by.")] = None
    target_log: Annotated[bool, in_data("Training was on the targets' logarithm.", "--target-log")] = False

    def transform(self) -> "Transform | None":
        """Return what they mean; `ArgumentError` where they contradict each other."""
        from latedrop.calibration.targets import Log, Standardized

        mean, std, log = self
        if (mean is None) != (std is None) or (log and mean is not None):
            raise ArgumentError(
                "expected --target-mean with --target-std, or --target-log alone; found another mixture."
            )
        if mean is None or std is None:
            return Log() if log else None
        return Standardized(number_list("--target-mean", mean), number_list("--target-std", std))


class Fitting(NamedTuple):
    """The options that say what is fitted, and how, of one parameter."""

    method: Annotated[
        Literal["terms", "sample", "linear", "propagate"] | None,
        option("By default terms; sample: draws; linear: first order."),
    ] = None
    terms: Annotated[str | None, option("Terms of the variance, separated by commas.")] = None
    no_guard: Annotated[bool, option("Do not widen intervals of unusual rows.", "--no-guard")] = False
    rates: Annotated[
        str | None, option("Rates to try, separated by commas; selects --method sample if no method is named.")
    ] = None
    draws: Annotated[
        int | None, option("Draws per rate, 100 by default; selects --method sample if no method is named.")
    ] = None
    floor: Annotated[bool, option("Also fit a constant, added to the variance.", "--floor")] = False
    scale: Annotated[Literal["optimal", "relaxed"], option("Scale of least NLL, or of a balanced curve.")] = "optimal"

    def method_of(self, seed: int) -> "FittingMethod":
        """Return the method for `latedrop.calibrate`; `ArgumentError` where an option belongs to another one."""
        from latedrop import FirstOrder, Propagation, Sampling, Terms

        kinds: dict[str, type[Any]] = {kind.name: kind for kind in (Terms, Sampling, FirstOrder, Propagation)}
        name = self.method or ("sample" if self.rates is not None or self.draws is not None else "terms")
        possible = {field.name for field in fields(kinds[name]) if field.init}
        given: dict[str, Any] = {
            "rates": self.rates and number_list("--rates", self.rates),
            "draws": self.draws,
            "terms": self.terms and split(self.terms),
            "guard": False if self.no_guard else None,
            "floor": self.floor or None,
        }
        given = {key: value for key, value in given.items() if value is not None}
        wrong = ["--no-guard" if key == "guard" else f"--{key}" for key in given if key not in possible]
        if wrong:
            raise ArgumentError(f"expected options that belong to --method {name}; found {', '.join(wrong)}.")
        given |= {key: value for key, value in {"scale": self.scale, "seed": seed}.items() if key in possible}
        method: FittingMethod = kinds[name](**given)
        return method

    def scaled(self, uq: Any) -> Any:
        """Return a predictor with the scale that was asked for, where the method has none of its own."""
        by_terms = getattr(uq.calibration, "terms", None) is not None
        return uq.scaled(self.scale) if by_terms and self.scale != "optimal" else uq


class Classes(NamedTuple):
    """The options that speak of classes, of one parameter."""

    task: Annotated[
        Literal["auto", "regression", "classification"], in_data("By default as the target's values tell.")
    ] = "auto"
    class_names: Annotated[
        str | None,
        in_data("Names in the order of the outputs; by default sorted."),
    ] = None
    sets: Annotated[
        Literal["lac", "aps", "raps"] | None,
        option("Prediction sets, from --conformal-data or half of --data."),
    ] = None
    per_class: Annotated[bool, option("Sets that keep their coverage for every class.", "--per-class")] = False
    reject: Annotated[
        float | None,
        option("Keep rows so that less than this share of them is wrong."),
    ] = None

    @property
    def holds_out(self) -> bool:
        """Whether they ask for rows used for nothing else."""
        return self.sets is not None or self.reject is not None

    def check(self, *, classes: bool) -> None:
        """`ArgumentError` where options of classes were given for a regression, or contradict each other."""
        given = {"--sets": self.sets, "--per-class": self.per_class, "--reject": self.reject is not None}
        wrong = next((name for name, value in given.items() if value), "")
        if wrong and not classes:
            raise ArgumentError(f"expected {wrong} with classes; found it with a regression, which has --intervals.")
        if self.reject is not None and not 0 < self.reject < 1:
            raise ArgumentError(f"expected --reject inside (0, 1), such as 0.02; found {self.reject:g}.")
        if self.per_class and not self.sets:
            raise ArgumentError("expected --sets with --per-class; found none. Pass --sets lac.")


def split(*texts: str | None) -> list[str]:
    """Split names at commas; one that holds a comma stands in double quotes, as in csv."""
    lines = csv.reader([text for text in texts if text], skipinitialspace=True)
    return [name.strip() for line in lines for name in line if name.strip()]
