"""Predict with Ray Data: `Predictions` for `map_batches`, one per worker; `predict_folder` from folder to folder.

Masks are hashes, and a batch is filled up to a fixed number of rows before it runs, so that the prediction of a row
does not depend on how the data are cut, nor on which worker it meets: the same bytes on workers of the same kind. A
worker that dies is replaced, and its batches run again.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from latedrop import errors
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError
from latedrop.metrics.levels import checked_level
from latedrop.named import load_model, readout_of
from latedrop.prediction.predictor import Predictor, load
from latedrop.terminal import listed, need

__all__ = ["Asked", "Predictions", "cause", "connected", "predict_folder"]

_SHOWN = 6


@dataclass(frozen=True)
class Asked:
    """The settings of a worker: only texts and numbers, so that they can be sent.

    Attributes:
        model: `package.module:callable`, or a `.pt2` file.
        calibration: file written by `Predictor.save`.
        inputs: columns that are the model's inputs; if empty, the columns in the calibration.
        keep: columns to copy to the output.
        level: level of the intervals.
        weights: file with the weights of the callable's module.
        readout: a name, an index, or `package.module:function`; None if the calibration has it.
        device: `"auto"`, `"cpu"` or `"cuda"`.
        untrained: accept random weights.
        folder: folder with the model's code; None is the worker's own folder.
        batch_size: number of rows that run at once; smaller batches are filled up.
    """

    model: str
    calibration: str
    inputs: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    level: float = 0.9
    weights: str | None = None
    readout: str | int | None = None
    device: str = "auto"
    untrained: bool = False
    folder: str | None = None
    batch_size: int = 1024

    def predictor(self) -> Predictor:
        """Load the model with its calibration."""
        if self.folder is not None and self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        network = load_model(self.model, self.weights, device=self.device, untrained=self.untrained)
        uq = load(self.calibration, network, readout_of(self.readout))
        if not isinstance(uq, Predictor):
            raise ArgumentError(
                "expected the calibration of a regression; found one of classes. Call predict yourself."
            )
        c = uq.calibration
        if not c.shared or any(site.coupled for site in c.sites):
            raise ArgumentError(
                "expected rows that do not depend on those beside them; with shared=False, and in a model whose rows "
                "see each other, they do, and the result would depend on how the data are cut. Predict on one machine."
            )
        if len(c.output_shape) > 1:
            raise ArgumentError(
                f"expected one value or a vector per row for a table; found outputs of shape {c.output_shape}. "
                "Calibrate with a readout."
            )
        uq.batch_size = self.batch_size
        return uq


class Predictions:
    """Map tables to tables: `dataset.map_batches(Predictions, fn_constructor_args=(asked,), batch_format="pyarrow")`.

    The result has the kept columns, and `mean`, `std`, `low`, `high`, `novelty` as `latedrop predict` writes them.
    Rows with missing values stay in their places, with NaN.
    """

    def __init__(self, asked: Asked) -> None:
        checked_level(asked.level)
        if asked.batch_size < 1:
            raise ArgumentError(f"expected a batch size of at least 1; found {asked.batch_size}.")
        self._asked, self._predictor = asked, asked.predictor()
        self.inputs = asked.inputs or tuple((self._predictor.calibration.columns or {}).get("inputs", ()))
        if not self.inputs:
            raise ArgumentError("expected the input columns, as this calibration knows none; found no inputs=.")
        wide = any(p.dtype == torch.float64 for p in self._predictor.model.parameters())
        self._dtype = np.float64 if wide else np.float32

    def __call__(self, table: Any) -> Any:
        """Predict the rows of a pyarrow table."""
        import pyarrow

        absent = [name for name in (*self.inputs, *self._asked.keep) if name not in table.column_names]
        if absent:
            raise DataError(f"expected the columns {listed(absent, _SHOWN)} in all files; found a table without.")
        x = np.column_stack([_numbers(table, name) for name in self.inputs])
        finite = np.isfinite(x).all(1)
        parts: dict[str, npt.NDArray[Any]] = {}
        for name, values in self._predicted(x[finite]).items():
            whole = np.full(len(x), np.nan, self._dtype)
            whole[finite] = values
            parts[name] = whole
        return pyarrow.table({**{name: table.column(name) for name in self._asked.keep}, **parts})

    def _predicted(self, x: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Predict finite rows in batches of one size; return columns by name."""
        size, rows = self._asked.batch_size, len(x)
        fill = np.repeat(x[:1], -rows % size, 0) if rows else np.zeros((size, x.shape[1]))
        columns = self._predictor.predict(np.concatenate([x, fill])).columns(self._asked.level)
        return {name: values[:rows].cpu().numpy().astype(self._dtype) for name, values in columns.items()}


def _numbers(table: Any, name: str) -> npt.NDArray[np.float64]:
    import pyarrow

    column = table.column(name)
    try:
        numbers: npt.NDArray[np.float64] = column.cast("float64", safe=False).to_numpy()
    except pyarrow.ArrowException as error:
        raise DataError(
            f"expected numbers in column {name!r}; its type is {column.type}. Encode it as numbers, or leave it out."
        ) from error
    return numbers


def predict_folder(
    asked: Asked,
    data: str,
    output: str,
    *,
    address: str = "local",
    workers: int | None = None,
    partitions: int | None = None,
) -> int:
    """Predict the csv or parquet files of a folder, and write a folder of parquet files in the order of the rows.

    Args:
        asked: what to predict with.
        data: a file, or a folder of files of one kind; all workers have to reach it.
        output: the folder to write; it must not be there, and is whole or not there at the end.
        address: `"local"` starts Ray on this machine, unless it runs in this process; else that of a cluster.
        workers: how many; by default one for each CPU but one, or for each GPU where the device is one.
        partitions: blocks that the data are cut into before; by default as Ray reads them.

    Returns:
        How many rows were written.
    """
    from pyarrow import parquet

    if Path(output).exists():
        raise FileError(f"expected no {output} yet; found one. Pass another folder, or remove it.")
    if not Path(output).absolute().parent.is_dir():
        raise FileError(f"expected the folder of {output}; it is not there. Make it, or pass another path.")
    part = Path(output).with_name(f".{Path(output).name}.{secrets.token_hex(8)}.part")
    with connected(address) as ray:
        try:
            context = ray.data.DataContext.get_current()
            context.execution_options.preserve_order = True
            context.use_datasource_v2 = False  # its threads fail now and then where aiohttp is not installed
            context.enable_progress_bars = context.print_on_execution_start = False
            logging.getLogger("ray.data").setLevel(logging.ERROR)
            rows = _read(ray, asked, data)
            rows = rows if partitions is None else rows.repartition(partitions)
            made = rows.map_batches(
                Predictions,
                fn_constructor_args=(asked,),
                batch_format="pyarrow",
                batch_size=64 * asked.batch_size,
                **_workers(ray, workers, gpu=asked.device.startswith("cuda")),
            )
            made.write_parquet(str(part.absolute()))
            count: int = sum(parquet.read_metadata(file).num_rows for file in part.glob("*.parquet"))
            part.rename(output)
            return count
        except ray.exceptions.RayError as error:
            raise cause(error) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield Ray, started or joined at an address unless it runs in this process; then it is left again afterwards."""
    need("ray", "ray")
    import ray

    if ray.is_initialized():
        yield ray
        return
    if address == "local":
        more: dict[str, Any] = {"include_dashboard": False}
    else:
        more = {"runtime_env": {"working_dir": os.getcwd()}}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"expected a cluster of Ray at {address}; {error}. Pass another address.") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _workers(ray: Any, workers: int | None, *, gpu: bool) -> dict[str, Any]:
    """Return the number of workers and the resources of each; one CPU stays free for reading and writing."""
    total, pool = ray.cluster_resources(), ray.data.ActorPoolStrategy
    if gpu:
        return {"compute": pool(size=workers or max(1, int(total.get("GPU", 1)))), "num_gpus": 1}
    cpus = total.get("CPU", 1.0)
    count = workers or max(1, int(cpus) - 1)
    return {"compute": pool(size=count), "num_cpus": min(1.0, max(cpus - 1, cpus / 2) / count)}


def _read(ray: Any, asked: Asked, data: str) -> Any:
    """Read a csv or parquet file, or a folder of them, as a Ray data set."""
    names = [data]
    if Path(data).is_dir():
        names = sorted(str(entry) for entry in Path(data).iterdir() if not entry.name.startswith((".", "_")))
    paths = [name if "://" in name else str(Path(name).absolute()) for name in names]
    if paths and all(path.lower().endswith(".parquet") for path in paths):
        return ray.data.read_parquet(paths)
    if not paths or not all(path.lower().endswith(".csv") for path in paths):
        raise DataError(
            f"expected files that end in .csv, or in .parquet, in {data}; found "
            f"{listed((repr(Path(name).name) for name in names), _SHOWN)}."
        )
    import pyarrow
    from pyarrow import csv

    types = {**dict.fromkeys(asked.keep, pyarrow.string()), **dict.fromkeys(asked.inputs, pyarrow.float64())}
    return ray.data.read_csv(paths, convert_options=csv.ConvertOptions(column_types=types))


def cause(error: Exception) -> LatedropError:
    """Restore the error of a worker from its text, which is all that Ray passes on."""
    raised = re.findall(r"^latedrop\.errors\.(\w+): (.+)$", str(error), re.MULTILINE)
    if raised:
        kind, message = raised[-1]
        return getattr(errors, kind, LatedropError)(message)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return LatedropError(f"expected Ray to finish; it failed: {lines[-1] if lines else type(error).__name__}")
