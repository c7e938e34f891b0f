"""An ASE calculator of a potential that differentiates itself: per structure, per atom, and where it stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from latedrop import Batches, Predictor, Terms, calibrate, load
from latedrop.errors import ArgumentError, DataError, LatedropError
from rounding import assert_same_up_to_rounding

pytest.importorskip("torch_geometric", reason="not installed: torch_geometric")
ase = pytest.importorskip("ase", reason="not installed: ase")
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402

from latedrop.adapters.ase import NoveltyError, calculator  # noqa: E402


class Potential(nn.Module):
    """The energy of all pairs of a structure; `graph` says whether its derivative can be differentiated again."""

    def __init__(self, *, graph: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pair = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 16))
        self.atom, self.graph = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1)), graph

    def forward(self, data: Any) -> dict[str, Tensor]:
        with torch.enable_grad():
            places = data.pos.detach().requires_grad_()
            i, j = (data.batch[:, None] == data.batch).fill_diagonal_(False).nonzero().T
            distance = (places[i] - places[j]).norm(dim=1, keepdim=True)
            near = self.pair(torch.exp(-((distance - torch.linspace(0.5, 2, 4)) ** 2)))
            each = self.atom(near.new_zeros(len(places), 16).index_add(0, i, near))
            energy = each.new_zeros(data.num_graphs, 1).index_add(0, data.batch, each)
            (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=self.graph)
        return {"energy": energy.detach() if not self.graph else energy, "forces": -slope}


def structures(count: int, seed: int) -> list[Data]:
    """Of 3 to 5 atoms, with the energies and forces of another network as targets."""
    g, made = torch.Generator().manual_seed(seed), []
    for i in range(count):
        places = torch.eye(5, 3)[: 3 + i % 3] + 0.1 * torch.randn(3 + i % 3, 3, generator=g)
        squares = torch.pdist(places).square().sum().reshape(1, 1)
        made.append(Data(pos=places, energy=squares, forces=-2 * (len(places) * places - places.sum(0))))
    return made


def calibrated(model: nn.Module, name: str, **options: Any) -> Predictor:
    loaders = [DataLoader(structures(n, seed), 20, generator=torch.Generator()) for n, seed in ((40, 1), (50, 2))]
    with pytest.warns(match="no better than their average"):
        uq: Predictor = calibrate(
            model,
            loaders[0],
            reference=loaders[1],
            readout=name,
            batches=Batches(unpack=name),
            progress=False,
            **options,
        )
    return uq


def to_graph(atoms: Any) -> Data:
    return Data(pos=torch.tensor(atoms.positions, dtype=torch.float32))


def test_the_calculator(tmp_path: Any) -> None:
    model = Potential().eval()
    energy, forces = calibrated(model, "energy"), calibrated(model, "forces")
    assert {"leverage", "gradients"} <= {term.name for term in energy.calibration.terms.terms}
    atoms = ase.Atoms("Ar4", positions=np.eye(4, 3))
    atoms.calc = calculator(energy, forces, graph=to_graph)
    exact = model(next(iter(DataLoader([to_graph(atoms)]))))
    assert_same_up_to_rounding(atoms.get_potential_energy(), exact["energy"].item())
    assert_same_up_to_rounding(atoms.get_forces(), exact["forces"].detach().numpy())
    shapes = {name: np.shape(value) for name, value in atoms.calc.results.items()}
    assert shapes["forces_std"] == (4, 3)
    assert shapes["atom_novelty"] == (4,)
    assert atoms.calc.results["energy_std"] > 0
    assert atoms.calc.results["novelty"] >= 0
    energy.save(tmp_path / "energy.json")
    again = load(tmp_path / "energy.json", model).predict([to_graph(atoms)])
    assert_same_up_to_rounding(float(again.std), atoms.calc.results["energy_std"])
    atoms.calc = calculator(energy, graph=to_graph, most_novel=1)
    atoms.positions *= 5
    with pytest.raises(NoveltyError, match=r"novelty of at most 1; found .*Compute it by other means"):
        atoms.get_potential_energy()


def test_a_force_that_cannot_be_differentiated_again_has_draws() -> None:
    """The default goes without mask gradients; a structure has the same alone as in a batch."""
    uq = calibrated(Potential(graph=False).eval(), "forces", method=Terms(["dropout", "leverage"]))
    batch = next(iter(DataLoader(structures(6, 3), 6)))
    p, alone = uq.predict(batch), uq.predict(structures(6, 3)[4])
    rows = slice(int(batch.ptr[4]), int(batch.ptr[5]))
    assert_same_up_to_rounding(p.std[rows], alone.std)


def test_dynamics_that_diverge_are_novel() -> None:
    energy, forces = (calibrated(Potential().eval(), name) for name in ("energy", "forces"))
    lost, far = ase.Atoms("Ar4", positions=np.full((4, 3), np.nan)), ase.Atoms("Ar4", positions=np.eye(4, 3) * 1e30)
    for atoms in (lost, far):
        atoms.calc = calculator(energy, forces, graph=to_graph, most_novel=3)
    with pytest.raises(NoveltyError, match="finite positions; found NaN or inf"):
        lost.get_potential_energy()
    with pytest.warns(match="nothing is known of"), pytest.raises(NoveltyError, match="at most 3; found inf"):
        far.get_potential_energy()
    lost.calc = calculator(energy, forces, graph=to_graph)
    with pytest.raises(DataError, match="finite inputs"):
        lost.get_potential_energy()


def test_errors_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    forces = calibrated(Potential().eval(), "forces", method=Terms(["leverage"]))
    with pytest.raises(ArgumentError, match=r"energy to be a predictor of numbers.*found Potential"):
        calculator(Potential(), graph=to_graph)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"one energy for a structure; found an output of shape \(4, 3\)"):
        calculator(forces, graph=to_graph).calculate(ase.Atoms("Ar4", positions=np.eye(4, 3)))
    monkeypatch.setattr("latedrop.adapters.ase.find_spec", lambda name: None)
    with pytest.raises(LatedropError, match="pip install ase"):
        calculator(forces, graph=to_graph)
