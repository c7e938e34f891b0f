"""A calibrated model from an ONNX file, run by onnxruntime: numpy in, numpy out, no torch.

    low = location + z((1 - level) / 2) · spread,      high = location + z((1 + level) / 2) · spread,

where `location` and `spread` are the mean and the standard deviation of a Gaussian or a Student t. Where the logarithm
of the targets was learned, exponentials of these.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.files import readable
from latedrop.onnx_files.metadata import AGAIN, ClassRecord, RegressionRecord, check_seal, record_in
from latedrop.quantiles import checked_level, conformal_score, student_quantile
from latedrop.terminal import need

__all__ = ["OnnxClassPrediction", "OnnxPrediction", "OnnxPredictor", "first_line", "load_onnx"]

Array = np.ndarray

_LARGEST = float(np.finfo(np.float32).max)


def load_onnx(
    path: str | os.PathLike[str],
    *,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    threads: int | None = None,
    batch_size: int = 256,
) -> OnnxPredictor:
    """Read a file that `to_onnx` or `latedrop export` wrote. Numpy and onnxruntime are enough; torch is not imported.

    Args:
        path: of the file.
        providers: what onnxruntime runs it with, the best first.
        threads: that one operator may use; onnxruntime's own choice where None.
        batch_size: rows that run at once.
    """
    need("onnx", "onnxruntime")
    import onnxruntime

    _check_options(providers, onnxruntime.get_available_providers(), threads, batch_size)
    with readable(Path(path), "an ONNX file"):
        content = Path(path).read_bytes()
    check_seal(content, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    # Weights in other files would be read from the current folder, and the checksum does not cover them.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    try:
        session = onnxruntime.InferenceSession(content, options, providers=list(providers))
        metadata, inputs = session.get_modelmeta().custom_metadata_map, session.get_inputs()
    except Exception as error:  # classes of onnxruntime's own, which have no common base
        raise FileError(
            f"expected an ONNX file that onnxruntime can run at {path}; it says: {first_line(error)}. {AGAIN}"
        ) from error
    record = record_in(metadata, path)
    if any(value.type not in _TYPES for value in inputs):
        raise FileError(f"expected inputs of numbers at {path}; found {[value.type for value in inputs]}. {AGAIN}")
    return OnnxPredictor(session, record, batch_size)


class OnnxPredictor:
    """A calibrated model that onnxruntime runs.

    Attributes:
        session: of onnxruntime.
        record: what the file says of its calibration.
        batch_size: rows that run at once.
    """

    def __init__(self, session: Any, record: RegressionRecord | ClassRecord, batch_size: int = 256) -> None:
        self.session, self.record, self.batch_size = session, record, batch_size
        self._inputs = session.get_inputs()
        self._outputs = [output.name for output in session.get_outputs()]

    def __call__(self, x: Any) -> Any:
        """Same as `predict`."""
        return self.predict(x)

    def predict(self, x: Any) -> Any:
        """Predict N rows: an array, a data frame, a tuple of arrays, or a mapping by the names of the inputs.

        An `OnnxPrediction`, or an `OnnxClassPrediction` of a classifier.
        """
        parts = [self._run(part) for part in self._batches(self._arrays(x))]
        outputs = {name: np.concatenate([part[name] for part in parts]) for name in self._outputs}
        output = next(outputs[name] for name in ("location", "mean", "probabilities") if name in outputs)
        if not np.isfinite(output).any():
            raise OutputError(
                f"expected a finite output; found NaN or inf in all of {len(output)} rows. Check the model on these "
                "inputs."
            )
        kind: Any = OnnxClassPrediction if isinstance(self.record, ClassRecord) else OnnxPrediction
        return kind(_flagged(outputs), self.record)

    def __repr__(self) -> str:
        names = ", ".join(f"{value.name} {value.shape}" for value in self._inputs)
        return f"OnnxPredictor of {names}: {self.record.verdict}"

    def _batches(self, inputs: dict[str, Array]) -> Iterator[dict[str, Array]]:
        rows = len(inputs[self._inputs[0].name])
        if rows == 0:
            raise DataError("expected at least one row to predict; found none.")
        with_rows = {value.name for value in self._inputs if value.shape[:1] == ["rows"]}
        for start in range(0, rows, self.batch_size):
            stop = start + self.batch_size
            yield {name: value[start:stop] if name in with_rows else value for name, value in inputs.items()}

    def _run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        try:
            return dict(zip(self._outputs, self.session.run(self._outputs, inputs), strict=True))
        except Exception as error:  # classes of onnxruntime's own, which have no common base
            raise DataError(f"expected inputs that the file takes; onnxruntime says: {first_line(error)}") from error

    def _arrays(self, x: Any) -> dict[str, Array]:
        names = [value.name for value in self._inputs]
        if isinstance(x, Mapping):
            given = dict(x)
        elif isinstance(x, (tuple, list)) and len(names) > 1:
            given = dict(zip(names, x, strict=False)) if len(x) == len(names) else {}
        else:
            given = {names[0]: self._columns(x)} if len(names) == 1 else {}
        if set(given) != set(names):
            raise DataError(
                f"expected the inputs {names}, by name or in this order; found {list(given) or type(x).__name__}."
            )
        arrays = {value.name: _array(given[value.name], value) for value in self._inputs}
        counts = {len(arrays[value.name]) for value in self._inputs if value.shape[:1] == ["rows"]}
        if len(counts) > 1:
            raise DataError(f"expected as many rows in every input; found {sorted(counts)}.")
        return arrays

    def _columns(self, x: Any) -> Any:
        """Return a data frame with its columns in the order of the calibration."""
        known, given = list(self.record.columns), list(getattr(x, "columns", ()))
        if not known or not given or known == given:
            return x
        if sorted(map(str, known)) != sorted(map(str, given)):
            raise DataError(f"expected the columns {known}; found {given}. Select these; their order does not matter.")
        return x[known]


def _output(name: str, about: str) -> Any:
    """Make a property that gives an output of the file by its name."""
    return property(lambda prediction: prediction.outputs.get(name), doc=about)


@dataclass(frozen=True, repr=False)
class _Outputs:
    """Hold the outputs of a file by name, and what it says of its calibration."""

    outputs: dict[str, Array]
    record: Any

    novelty = _output("novelty", "`(N,)`, above 1 for unusual rows; None where the calibration cannot tell.")

    def __len__(self) -> int:
        return len(next(iter(self.outputs.values())))

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} rows, with {', '.join(self.outputs)}"


@dataclass(frozen=True, repr=False)
class OnnxPrediction(_Outputs):
    """Predictions with their uncertainty, as arrays."""

    record: RegressionRecord

    mean = _output("mean", "`(N, ...)`, in the original unit of the targets.")
    std = _output("std", "`(N, ...)`, the calibrated standard deviation.")

    @property
    def variance(self) -> Array:
        """`(N, ...)`, the square of `std`."""
        return self.std**2  # type: ignore[no-any-return]

    def interval(self, level: float | None = None) -> tuple[Array, Array]:
        """Both ends, `(N, ...)` each, of the central interval at a level; that of the file where None."""
        level = self.record.level if level is None else checked_level(level)
        if level == self.record.level:
            return self.outputs["low"], self.outputs["high"]
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def to_dict(self, level: float | None = None) -> dict[str, Array]:
        """Named results, as `Prediction.to_dict` gives them."""
        low, high = self.interval(level)
        named = {"mean": self.mean, "std": self.std, "low": low, "high": high}
        return named if self.novelty is None else {**named, "novelty": self.novelty}

    def quantile(self, q: float) -> Array:
        """Return the predicted quantile, `(N, ...)`."""
        q, fitted = checked_level(q), self.record.intervals
        z = [student_quantile(q, self.record.degrees)] if fitted is None else fitted.quantiles(q)
        location, spread = self.outputs.get("location", self.mean), self.outputs.get("spread", self.std)
        along = z[0] if len(z) == 1 else np.asarray(z, location.dtype).reshape(1, -1, *[1] * (location.ndim - 2))
        with np.errstate(over="ignore"):
            end = _known(location + along * spread, q)
            return end if self.record.target is None else _known(np.exp(end.astype(float)).astype(end.dtype), q)


@dataclass(frozen=True, repr=False)
class OnnxClassPrediction(_Outputs):
    """Predictions among classes, as arrays."""

    record: ClassRecord

    probabilities = _output("probabilities", "`(N, K)`, calibrated.")
    label = _output("label", "`(N,)`, the likeliest class.")
    confidence = _output("confidence", "`(N,)`, the probability of the likeliest class.")
    entropy = _output("entropy", "`(N,)` in nats.")
    energy = _output("energy", "`(N,)`, minus the log of the sum of exponentials of the logits: large if strange.")

    @property
    def names(self) -> list[str]:
        """The likeliest class by its name."""
        known = self.record.names or [str(k) for k in range(self.probabilities.shape[1])]
        return [known[k] for k in self.label]

    def kept(self) -> Array:
        """`(N,)`, True for rows that the rule of the file keeps, which `ClassPredictor.reject` made."""
        if "kept" not in self.outputs:
            raise ArgumentError(
                "expected a file of a predictor with a rule; found one without. Call uq = uq.reject((x, labels), "
                "risk=0.01) and write the file again."
            )
        return self.outputs["kept"]

    def prediction_set(self, level: float = 0.9) -> Array:
        """`(N, K)`, True for the classes of a set, as `ClassPrediction.prediction_set` gives them."""
        scores = self.record.sets
        if scores is None:
            raise ArgumentError(
                "expected a file of a predictor with prediction sets by 'lac'; found one without, or by another score. "
                "Call uq = uq.conformal((x, labels)) and write the file again."
            )
        limits = [conformal_score(part, checked_level(level)) for part in scores]
        p: Array = self.probabilities.astype(np.float64)
        members: Array = 1 - p <= np.array(limits)
        novelty: Array | None = self.novelty
        if novelty is None:
            return members
        order = np.argsort(-p, axis=1, kind="stable")
        sums = np.take_along_axis(p, order, 1).cumsum(1)
        before = np.take_along_axis(sums, np.argsort(order, axis=1), 1) - p
        members |= (before < level - 1e-6) & (novelty > 1)[:, None]
        return members

    def to_dict(self) -> dict[str, Array]:
        """Named results, as `ClassPrediction.to_dict` gives them."""
        return dict(self.outputs)


def _known(values: Array, q: float) -> Array:
    """Replace infinite numbers, and the NaN of rows of which nothing is known, by the largest number."""
    most = np.finfo(values.dtype).max
    return np.asarray(np.nan_to_num(values, nan=np.sign(q - 0.5) * most if q != 0.5 else np.nan))


def _check_options(providers: Sequence[str], known: Sequence[str], threads: Any, batch_size: Any) -> None:
    if isinstance(providers, str) or not providers or not set(providers) <= set(known):
        raise ArgumentError(f"expected a list of providers among {list(known)}; found {providers!r}.")
    for name, value in ("threads", 1 if threads is None else threads), ("batch_size", batch_size):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"expected {name} as a whole number of at least 1; found {value!r}.")


def _flagged(outputs: dict[str, Array]) -> dict[str, Array]:
    """Say that nothing is known of rows that are not finite, as `Prediction.unknown` does."""
    beyond = np.any([~np.isfinite(values).reshape(len(values), -1).all(1) for values in outputs.values()], axis=0)
    if not beyond.any():
        return outputs
    outputs = {name: values.copy() for name, values in outputs.items()}
    classes = outputs["probabilities"].shape[1] if "probabilities" in outputs else 1
    unknown = {"low": -_LARGEST, "mean": np.nan, "location": np.nan, "mutual_information": 0.0, "kept": False}
    unknown |= {"probabilities": 1 / classes, "confidence": 1 / classes, "entropy": math.log(classes), "label": 0}
    for name, values in outputs.items():
        finite = np.isfinite(values) if name in ("mean", "location") else np.zeros(values.shape, dtype=bool)
        values[~finite & beyond.reshape(-1, *[1] * (values.ndim - 1))] = unknown.get(name, _LARGEST)
    return outputs


def _array(value: Any, wanted: Any) -> Array:
    try:
        array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    except ValueError as error:  # of numpy: lists of several lengths
        raise DataError(f"expected numbers for the input {wanted.name!r}, as many in every row; {error}.") from error
    if array.dtype.kind not in "fiub":
        raise DataError(f"expected numbers for the input {wanted.name!r}; found an array of {array.dtype}.")
    sizes = [size if isinstance(size, int) else "N" for size in wanted.shape]
    if len(sizes) != array.ndim or any(a not in ("N", b) for a, b in zip(sizes, array.shape, strict=True)):
        expected = ", ".join(map(str, sizes))
        raise DataError(f"expected the input {wanted.name!r} of shape ({expected}); found {array.shape}.")
    if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
        raise DataError(
            f"expected finite inputs; found {int((~np.isfinite(array)).sum())} NaN or inf in {wanted.name!r}. "
            "Drop or impute those rows."
        )
    dtype = np.dtype(_TYPES[wanted.type])
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.ascontiguousarray(array, dtype)
    lost = np.isinf(made) if dtype.kind == "f" else made != array
    if lost.any():
        raise DataError(
            f"expected inputs that fit {dtype}, the model's dtype; found {int(lost.sum())} of {array.size} that do "
            f"not, such as {array[lost][0]:.3g}. Convert them."
        )
    return made


_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(bool)": np.bool_,
}


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
