"""The options of `calibrate` with their types, for programs that are checked by mypy or pyright."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from latedrop.calibration.classes.fit import Scaling
from latedrop.calibration.fit import Loss
from latedrop.calibration.intervals import IntervalKind
from latedrop.calibration.measuring import Method
from latedrop.calibration.record import Choice
from latedrop.calibration.transforms import Transform
from latedrop.calibration.verdict import Folds
from latedrop.data.datasets import Unpack
from latedrop.data.items import Collate
from latedrop.dropout.moments import Engine
from latedrop.network.calling import Readout
from latedrop.network.find_sites import Select
from latedrop.network.sites import Kind, Site
from latedrop.terms import Term

__all__ = ["Options"]


class Options(TypedDict, total=False):
    """What `calibrate` takes by name only, whatever the task is; its docstring says what each is."""

    method: Method | None
    terms: Sequence[str | Term] | None
    reference: Any
    guard: bool | None
    features: Sequence[str] | None
    folds: Folds
    mean: Literal["draws", "model"] | None
    floor: bool
    per_site: bool
    loss: Loss
    per_output: bool | None
    scale: Choice
    intervals: IntervalKind | None
    conformal_data: Any
    target: Transform | None
    row_weights: Any
    sites: Sequence[Site] | None
    select: Select
    kind: Kind
    readout: Readout
    seed: int
    shared: bool
    batch_size: int
    chunk: int | None
    engine: Engine
    unpack: Unpack | None
    collate: Collate
    progress: bool
    class_names: Sequence[str] | None
    ignore_index: int | None
    scaling: Scaling
