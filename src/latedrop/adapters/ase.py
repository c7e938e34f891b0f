"""An ASE calculator of a calibrated potential: energy and forces with standard deviations, and novelty.

    atoms.calc = calculator(energy, forces, graph=to_data, most_novel=1.0)

Molecular dynamics stops with a `NoveltyError` where it leaves what the potential knows.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from math import inf
from typing import Any

from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.prediction.predictor import Predictor

__all__ = ["NoveltyError", "calculator"]


class NoveltyError(LatedropError):
    """A structure is further from the known ones than was allowed."""


def calculator(
    energy: Predictor, forces: Predictor | None = None, *, graph: Callable[[Any], Any], most_novel: float = inf
) -> Any:
    """Return an ASE calculator with the results `energy`, `energy_std` and `novelty`, and more with `forces`.

    These are `forces` and `forces_std`, `(atoms, 3)`, and `atom_novelty`, `(atoms,)`.

    Args:
        energy: a predictor of one number for each structure, from `calibrate` or `load`.
        forces: a predictor of three numbers for each atom.
        graph: from `ase.Atoms` to what the predictors take as one structure, such as a graph of PyTorch Geometric.
        most_novel: the largest novelty of a structure, or of an atom, that is answered.
    """
    for name, predictor in (("energy", energy), ("forces", forces)):
        if predictor is not None and not isinstance(predictor, Predictor):
            raise ArgumentError(
                f"expected {name} to be a predictor of numbers, from calibrate() or load(); found "
                f"{type(predictor).__name__}."
            )
    if find_spec("ase") is None:
        raise LatedropError("expected ase; it is not installed. Install it: pip install ase.")
    base: Any = import_module("ase.calculators.calculator")

    class Calculator(base.Calculator):  # type: ignore[misc]
        implemented_properties = ["energy", "free_energy", "energy_std", "novelty"]  # noqa: RUF012 - of ASE
        implemented_properties += [] if forces is None else ["forces", "forces_std", "atom_novelty"]

        def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = base.all_changes) -> None:
            super().calculate(atoms, properties, system_changes)
            self.results = _results(energy, forces, [graph(self.atoms)])
            if self.results["novelty"] > most_novel:
                raise NoveltyError(
                    f"expected a structure with a novelty of at most {most_novel:g}; found "
                    f"{self.results['novelty']:.3g}: the potential does not know it. Compute it by "
                    "other means; or pass a larger most_novel=."
                )

    return Calculator()


def _results(energy: Predictor, forces: Predictor | None, structure: list[Any]) -> dict[str, Any]:
    """Return what ASE takes as results, as floats and arrays of float64."""
    p = energy.predict(structure).cpu()
    if p.mean.numel() != 1:
        raise DataError(
            f"expected one energy for a structure; found an output of shape {tuple(p.mean.shape)}. Pass a readout of "
            "the energy to calibrate()."
        )
    results: dict[str, Any] = {"energy": p.mean.item(), "free_energy": p.mean.item(), "energy_std": p.std.item()}
    novelty = [] if p.novelty is None else [p.novelty.max().item()]
    if forces is not None:
        q = forces.predict(structure).cpu()
        results |= {"forces": q.mean.double().numpy(), "forces_std": q.std.double().numpy()}
        if q.novelty is not None:
            results["atom_novelty"] = q.novelty.double().reshape(len(q.mean), -1).amax(1).numpy()
            novelty.append(q.novelty.max().item())
    return results | {"novelty": max(novelty, default=0.0)}
