"""The options of the commands on a user's own model: what they are called, what they say, how their text is read."""

import csv
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from latedrop.errors import ArgumentError
from latedrop.terminal import argument, number_list, option

if TYPE_CHECKING:
    from torch import nn

    from latedrop.calibration.class_record import ClassCalibration
    from latedrop.calibration.methods import Method as FittingMethod
    from latedrop.calibration.record import Calibration
    from latedrop.calibration.transforms import Transform
    from latedrop.cli.feed import Pictures
    from latedrop.network.calling import Readout
    from latedrop.prediction.class_predictor import ClassPredictor
    from latedrop.prediction.predictor import Predictor

__all__ = [
    "ANY_TASK",
    "AS_THEY_ARE",
    "AUTO_DEVICE",
    "BY_DEFAULT",
    "LEVEL",
    "NO_IMAGES",
    "ON_CPU",
    "Classes",
    "Fitting",
    "Loading",
    "Pictured",
    "TargetUnit",
    "example_rows",
    "readout_of",
    "scale_of",
    "split",
]

LEVEL = 0.9
"""Of intervals, where no level is given."""
_MODEL, _DATA, _OUTPUT = ({"rich_help_panel": name} for name in ("Model", "Data", "Output"))
_METHODS = ["terms", "sample", "linear", "propagate"]
_SCALES = ["optimal", "relaxed"]
_TASKS = ["auto", "regression", "classification"]
_SETS = ["lac", "aps", "raps"]
_INTERVALS = ["student", "gaussian", "isotonic", "conformal"]

Model = Annotated[str, argument("package.module:callable, or a .pt2 file of torch.export.", metavar="MODEL")]
Record = Annotated[str, argument("What `latedrop calibrate` wrote.", metavar="CALIBRATION")]
Served = Annotated[str, argument("As for other commands, or an .onnx file of `latedrop export`.", metavar="MODEL")]
RecordOfServed = Annotated[
    str | None, argument("What `latedrop calibrate` wrote; none for an .onnx file.", metavar="[CALIBRATION]")
]
Weights = Annotated[
    str | None, option("Weights for the callable's module: .safetensors, or .pt of a state_dict.", **_MODEL)
]
Trust = Annotated[
    bool, option("Unpickle model files that hold more than weights, which can run any code.", "--trust", **_MODEL)
]
Untrained = Annotated[
    bool, option("Accept random weights of a callable, which are an error otherwise.", "--untrained", **_MODEL)
]
Device = Annotated[str, option("auto, cpu or cuda.", autocompletion=lambda: ["auto", "cpu", "cuda"], **_MODEL)]
ReadOut = Annotated[
    str | None,
    option("Which part of the output: a name, an index, or package.module:function.", "--readout", **_MODEL),
]
Select = Annotated[list[str] | None, option("Only sites of this name pattern; may be repeated.", **_MODEL)]
Kind = Annotated[
    str, option("Masks per element or per channel.", autocompletion=lambda: ["element", "channel"], **_MODEL)
]
Inputs = Annotated[
    str | None,
    option("Input columns, separated by commas; default: all others, or the array x.", "--inputs", "--input", **_DATA),
]
Ignore = Annotated[str | None, option("Columns that are not inputs, separated by commas.", **_DATA)]
Target = Annotated[
    str | None, option("Target columns, separated by commas, or the column of labels; for arrays y.", **_DATA)
]
TargetMean = Annotated[
    str | None, option("Mean of the training targets, where these were standardised; one per output.", **_DATA)
]
TargetStd = Annotated[str | None, option("Their standard deviation; one per output.", **_DATA)]
TargetLog = Annotated[bool, option("The model was trained on the targets' logarithm.", "--target-log", **_DATA)]
RowWeights = Annotated[str | None, option("Column with the weight of each row.", "--row-weights", **_DATA)]
Images = Annotated[
    str | None, option("Folder of images that a column of the data names: they are the inputs.", "--images", **_DATA)
]
Column = Annotated[str | None, option("The column with the images' names; file by default.", "--column", **_DATA)]
ImageTransform = Annotated[
    str | None,
    option("How an image becomes an input: size=224,normalize=imagenet; timm:MODEL; package.module:function.", **_DATA),
]
DropNan = Annotated[bool, option("Leave out rows with NaN or missing values.", "--drop-nan", **_DATA)]
BatchSize = Annotated[int, option("Rows that are read and run at once.", **_DATA)]
RowsAtOnce = Annotated[
    int | None, option("Rows that are read and run at once; 8192 of tables, 256 of arrays and images.", **_DATA)
]
Level = Annotated[
    float | None,
    option(f"Probability that the interval, or the set of classes, holds the target; {LEVEL} by default.", **_OUTPUT),
]
Task = Annotated[str, option("auto, regression or classification.", autocompletion=lambda: _TASKS, **_DATA)]
ClassNames = Annotated[
    str | None,
    option("Names of the classes in the order of the outputs, separated by commas; by default sorted.", **_DATA),
]
Sets = Annotated[
    str | None,
    option(
        "Prediction sets of classes: lac, aps or raps; from --conformal-data, or half of --data.",
        autocompletion=lambda: _SETS,
    ),
]
Reject = Annotated[
    float | None,
    option("Keep rows so that less than this share of them is wrong; from --conformal-data, or half of --data."),
]
MadeDetector = Annotated[
    str | None, option("Also write a detector of strange rows, JSON, from the rows held out or --data.", **_OUTPUT)
]
UsedDetector = Annotated[str | None, option("What `calibrate --detector` wrote: adds a p-value for every row.")]
PerClass = Annotated[bool, option("Prediction sets that keep the promised coverage for every class.", "--per-class")]
_FILES = "csv, parquet, feather, npz, pt, or a folder of these"
Example = Annotated[str | None, option(f"Example rows: {_FILES}.", **_DATA)]
InputShape = Annotated[
    list[str] | None, option("Or random rows of this shape, such as 3,224,224; one for each input.", **_DATA)
]
Validation = Annotated[str, option(f"Validation rows: {_FILES}; - is csv from stdin.")]
New = Annotated[str, option(f"Rows: {_FILES}; - is csv from stdin.")]
Test = Annotated[str, option(f"Test rows: {_FILES}; - is csv from stdin.")]
Held = Annotated[str | None, option("Rows for conformal intervals; by default half of --data, at random.", **_DATA)]
Keep = Annotated[list[str] | None, option("Columns to carry along, separated by commas; may be repeated.", **_DATA)]
Method = Annotated[
    str | None,
    option("terms, the default; sample: draws; linear: first order; propagate: maps.", autocompletion=lambda: _METHODS),
]
Terms = Annotated[str | None, option("Terms of the variance, separated by commas; dropout,leverage by default.")]
Reference = Annotated[
    str | None, option("Training rows, of which only inputs are read: they tell what is usual. Recommended.", **_DATA)
]
NoGuard = Annotated[bool, option("Do not widen intervals for rows unlike the validation rows.", "--no-guard")]
Rates = Annotated[str | None, option("Rates to try, separated by commas; with --method sample.")]
Draws = Annotated[int | None, option("Thinned networks per rate, 100 by default; with --method sample.")]
Floor = Annotated[bool, option("Also fit a constant, added to the scaled variance.", "--floor")]
Scale = Annotated[str, option("optimal: least NLL; relaxed: balanced curve.", autocompletion=lambda: _SCALES)]
OtherScale = Annotated[
    str | None, option("optimal, relaxed or a number; as calibrated by default.", autocompletion=lambda: _SCALES)
]
Intervals = Annotated[
    str | None, option("student, gaussian, isotonic or conformal.", autocompletion=lambda: _INTERVALS)
]
Seed = Annotated[int, option("Fixes all masks, and which rows are held out.")]
Written = Annotated[str, option("The calibration to write, JSON.", "--output", "-o")]
Exported = Annotated[str, option("The ONNX file to write.", "--output", "-o")]
Predictions = Annotated[
    str, option("File for csv, parquet, feather or npz; - is csv to stdout.", "--output", "-o", **_OUTPUT)
]
OnRay = Annotated[
    str | None,
    option("On Ray: local, auto or a cluster's address; writes a folder of parquet.", "--ray"),
]
Plot = Annotated[str | None, option("Draw the calibration curves to this PNG file.", **_OUTPUT)]
AlsoReport = Annotated[str | None, option("Also write a page about it, HTML.", **_OUTPUT)]
Report = Annotated[str | None, option("Write a page about it, HTML.", **_OUTPUT)]
Unit = Annotated[str | None, option("Unit of the target, or one for each of several, separated by commas.", **_OUTPUT)]
Require = Annotated[
    str | None,
    option(
        'Bounds, such as "coverage90>=0.85,gain>=0"; exit code 3 where one does not hold. Measures: coverageNN and '
        "widthNN (NN: level in percent), gain, correlation, rmse, mae, nll, ma, rows; of one of several outputs "
        "gain[NAME]. Of classes accuracy, nll, brier, ece, classwise_ece, gain, auroc, selective_risk, coverageNN, "
        "sizeNN, kept, kept_error, rows.",
        **_OUTPUT,
    ),
]
Json = Annotated[bool, option("Print JSON, and nothing else, to stdout.", "--json", **_OUTPUT)]
Verbose = Annotated[
    int,
    option("Say what is done, on stderr; -vv says more.", "--verbose", "-v", count=True, show_default=False, **_OUTPUT),
]
Debug = Annotated[bool, option("Show the traceback of an error.", "--debug", **_OUTPUT)]


class Loading(NamedTuple):
    """The options that say how a model is loaded and which part of its output is used, of one parameter."""

    weights: Weights = None
    trust: Trust = False
    untrained: Untrained = False
    device: Device = "auto"
    readout: ReadOut = None

    def load(self, model: str) -> "nn.Module":
        """Load the network that MODEL names."""
        from latedrop.named import load_model

        return load_model(model, self.weights, trust=self.trust, device=self.device, untrained=self.untrained)

    def load_calibrated(
        self, model: str, calibration: str, rows: int = 256, scale: str | None = None
    ) -> "Predictor | ClassPredictor":
        """Load the network with its calibration, to be run on `rows` rows at once."""
        from latedrop.prediction.loading import load

        uq: Any = load(calibration, self.load(model), readout_of(self.readout))
        uq.batch_size = rows
        if scale is not None and hasattr(uq.calibration, "classes"):
            raise ArgumentError("expected --scale with a regression; found a calibration of classes, which has none.")
        return uq if scale is None else uq.scaled(scale_of(scale))  # type: ignore[no-any-return]


AUTO_DEVICE = Loading()
ON_CPU = Loading(device="cpu")


class Pictured(NamedTuple):
    """The options that speak of images, which `command.bundled` makes of one parameter `images`."""

    images: Images = None
    column: Column = None
    transform: ImageTransform = None

    def of(self, record: "Calibration | ClassCalibration | None" = None) -> "Pictures | None":
        """What they mean; what is not named is as `record` remembers. None where the inputs are no images."""
        from latedrop.cli.feed import Pictures

        remembered = (record.columns or {}).get("images") if record is not None else None
        if self.images is None:
            if remembered or self.column or self.transform:
                why = (
                    "the calibration was made with images" if remembered else "--column and --transform speak of images"
                )
                raise ArgumentError(f"expected --images, the folder of the images, as {why}; found none.")
            return None
        column, transform = remembered or ("file", "")
        return Pictures(self.images, self.column or column, transform if self.transform is None else self.transform)


NO_IMAGES = Pictured()


class TargetUnit(NamedTuple):
    """The options that say how targets were transformed for training, of one parameter."""

    target_mean: TargetMean = None
    target_std: TargetStd = None
    target_log: TargetLog = False

    def of(self) -> "Transform | None":
        """What they mean."""
        from latedrop.calibration.transforms import Log, Standardized

        mean, std, log = self
        if (mean is None) != (std is None) or (log and mean is not None):
            raise ArgumentError(
                "expected --target-mean with --target-std, or --target-log alone; found another mixture."
            )
        if mean is None or std is None:
            return Log() if log else None
        return Standardized(number_list("--target-mean", mean), number_list("--target-std", std))


AS_THEY_ARE = TargetUnit()


class Fitting(NamedTuple):
    """The options that say what is fitted, and how, of one parameter."""

    terms: Terms = None
    no_guard: NoGuard = False
    method: Method = None
    rates: Rates = None
    draws: Draws = None
    floor: Floor = False
    scale: Scale = "optimal"

    def method_of(self, seed: int) -> "FittingMethod":
        """The method for `latedrop.calibrate`; `ArgumentError` where an option belongs to another one."""
        from latedrop import FirstOrder, Propagation, Sampling, Terms

        kinds: dict[str, type[Any]] = {k.name: k for k in (Terms, Sampling, FirstOrder, Propagation)}
        name = self.method or ("sample" if self.rates is not None or self.draws is not None else "terms")
        if name not in kinds:
            raise ArgumentError(f"expected --method {', '.join(kinds)}; found {name!r}.")
        given: dict[str, Any] = {"rates": self.rates and number_list("--rates", self.rates), "draws": self.draws}
        given |= {"terms": self.terms and split(self.terms), "guard": False if self.no_guard else None}
        given |= {"floor": self.floor or None}
        given = {option: value for option, value in given.items() if value is not None}
        options = {field.name for field in fields(kinds[name]) if field.init}
        wrong = [
            f"--{'no-guard' if option == 'guard' else option.replace('_', '-')}"
            for option in given
            if option not in options
        ]
        if wrong:
            raise ArgumentError(f"expected options that belong to --method {name}; found {', '.join(wrong)}.")
        more = {"scale": scale_of(self.scale), "seed": seed}
        made: FittingMethod = kinds[name](**given, **{option: more[option] for option in more if option in options})
        return made

    def scaled(self, uq: Any) -> Any:
        """A predictor with the scale that was asked for, where the method has none of its own."""
        by_terms = getattr(uq.calibration, "terms", None) is not None
        return uq.scaled(scale_of(self.scale)) if by_terms and self.scale != "optimal" else uq


BY_DEFAULT = Fitting()


class Classes(NamedTuple):
    """The options that speak of classes, of one parameter."""

    task: Task = "auto"
    class_names: ClassNames = None
    sets: Sets = None
    per_class: PerClass = False
    reject: Reject = None

    @property
    def holds_out(self) -> bool:
        """Whether they ask for rows used for nothing else."""
        return self.sets is not None or self.reject is not None

    @property
    def names(self) -> tuple[str, ...]:
        """As they were given; none by default."""
        return tuple(split(self.class_names))

    def task_of(self, task: str, names: tuple[str, ...] | None) -> Any:
        """The task for `latedrop.calibrate`, with the names of the classes where labels are text."""
        from latedrop import Classification

        if names or task == "classification":
            return Classification(names or ())
        return task

    def check(self, *, classes: bool) -> None:
        """`ArgumentError` where options of classes were given for a regression."""
        given = {"--sets": self.sets, "--per-class": self.per_class, "--reject": self.reject is not None}
        wrong = next((name for name, value in given.items() if value), "")
        if wrong and not classes:
            raise ArgumentError(f"expected {wrong} with classes; found it with a regression, which has --intervals.")
        if self.reject is not None and not 0 < self.reject < 1:
            raise ArgumentError(f"expected --reject inside (0, 1), such as 0.02; found {self.reject:g}.")
        if self.sets is not None and self.sets not in _SETS:
            raise ArgumentError(f"expected --sets {', '.join(_SETS)}; found {self.sets!r}.")
        if self.per_class and not self.sets:
            raise ArgumentError("expected --sets with --per-class; found none. Pass --sets lac.")


ANY_TASK = Classes()


def split(*texts: str | None) -> list[str]:
    """Names separated by commas; one that holds a comma stands in double quotes, as in csv."""
    lines = csv.reader([text for text in texts if text], skipinitialspace=True)
    return [name.strip() for line in lines for name in line if name.strip()]


def scale_of(text: str) -> Any:
    """A number, or the name of a choice."""
    try:
        return float(text)
    except ValueError:
        return text


def readout_of(text: str | None) -> "Readout":
    """A function, an index, or a name."""
    if text is None:
        return None
    if ":" in text:
        from latedrop.named import load_function

        return load_function(text)
    return int(text) if text.removeprefix("-").isdecimal() else text


def example_rows(network: "nn.Module", shapes: Sequence[str] | None) -> Any:
    """Random rows, of the shapes on the command line or those of an exported program."""
    import torch

    from latedrop.data.arrays import place
    from latedrop.named import example_inputs

    if not shapes:
        found = example_inputs(network)
        if found is None:
            raise ArgumentError("expected --data or --input-shape, rows to run the model on; found none.")
        return place(found, network)
    dice = torch.Generator().manual_seed(0)
    made = []
    for text in shapes:
        try:
            sizes = [int(part) for part in split(text)]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1:
            raise ArgumentError(f"expected --input-shape as the sizes of one row, such as 3,224,224; found {text!r}.")
        made.append(torch.randn(3, *sizes, generator=dice).numpy())
    return place(tuple(made) if len(made) > 1 else made[0], network)
