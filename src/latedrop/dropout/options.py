"""The options of sampling, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from latedrop.dropout.draws import checked_seed
from latedrop.errors import ArgumentError
from latedrop.network.calling import Readout

__all__ = ["ENGINES", "MOST_DRAWS", "Engine", "Sampling", "checked_draws"]

Engine: TypeAlias = Literal["auto", "rows", "loop", "compiled"]
ENGINES = get_args(Engine)
MOST_DRAWS = 1_000_000
"""More would take days, and come from a slip of the pen or a file that was tampered with."""


@dataclass(frozen=True)
class Sampling:
    """How draws are run.

    Attributes:
        draws: number of thinned networks, at least 2.
        seed: fixes all masks.
        readout: what of the output to take, before the moments.
        chunk: draws that run at once; chosen to fit memory where None, halved when memory runs out.
        shared: True: a draw is one thinned network for all examples; False: every example has its own masks.
        keep: whether every draw is returned too.
        engine: see `sample`.
    """

    draws: int = 100
    seed: int = 0
    readout: Readout = None
    chunk: int | None = None
    shared: bool = True
    keep: bool = False
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", checked_draws(self.draws))
        object.__setattr__(self, "seed", checked_seed(self.seed))
        if self.chunk is not None and self.chunk < 1:
            raise ArgumentError(f"expected chunk to be at least 1 draw; found {self.chunk}.")
        if self.engine not in ENGINES:
            raise ArgumentError(f"expected engine to be one of {ENGINES}; found {self.engine!r}.")
        if self.engine == "compiled" and self.keep:
            raise ArgumentError("expected another engine with keep_draws=True; the compiled one has moments alone.")


def checked_draws(draws: Any) -> int:
    """The number of draws as an int, or `ArgumentError`."""
    if isinstance(draws, bool) or not hasattr(draws, "__index__") or int(draws) < 2:
        raise ArgumentError(f"expected at least 2 draws, as one has no variance; found {draws!r}.")
    if int(draws) > MOST_DRAWS:
        raise ArgumentError(f"expected at most {MOST_DRAWS} draws; found {draws!r}. A few hundred are enough.")
    return int(draws)
