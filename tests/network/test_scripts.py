"""Parts of a model in TorchScript: nothing goes inside, and the rest works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latedrop import LatedropWarning, Sampling, calibrate, find_sites, inject, linearize, load, propagate, sample
from latedrop.errors import ArgumentError, SiteError
from rounding import assert_same_up_to_rounding

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:.*are TorchScript:latedrop.LatedropWarning"),
]


class Part(nn.Module):
    """A convolution by a raw weight and one by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(4, 4, 3, 3) / 6)
        self.layer = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(F.relu(F.conv2d(x, self.raw, padding=1))))


class Around(nn.Module):
    """Python layers before and after a part; `first` leaves out those before."""

    def __init__(self, part: nn.Module, *, first: bool = False) -> None:
        super().__init__()
        self.before = nn.Identity() if first else nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.part = part
        self.after = nn.Conv2d(4, 2, 3)
        self.last = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self.part(self.before(x))).relu().mean((2, 3)))


def traced(part: nn.Module) -> nn.Module:
    return torch.jit.trace(part, torch.randn(2, 4, 5, 5))


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "scripted": torch.jit.script,
    "traced": traced,
    "frozen": lambda part: torch.jit.freeze(torch.jit.script(part.eval())),
    "frozen trace": lambda part: torch.jit.freeze(traced(part.eval())),
    "optimized": lambda part: torch.jit.optimize_for_inference(torch.jit.script(part.eval())),
}


def made(kind: str, *, first: bool = False) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model with the part in TorchScript, the same in Python, and inputs."""
    torch.manual_seed(0)
    part = Part().eval()
    python = Around(part, first=first).eval()
    script = Around(KINDS[kind](part), first=first).eval()
    script.load_state_dict({k: v for k, v in python.state_dict().items() if "part." not in k}, strict=False)
    return script, python, torch.randn(6, 4, 5, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_its_weights_are_no_sites_and_the_rest_works(kind: str) -> None:
    model, python, x = made(kind)
    with pytest.warns(LatedropWarning, match=r"\['part'\] are TorchScript: no dropout goes inside"):
        sites = find_sites(model, x)
    assert [site.name for site in sites] == ["before.2", "after", "last"]
    for engine in ("auto", "loop"):
        found = sample(model, x, 0.2, 10, sites=sites, engine=engine)  # type: ignore[arg-type]
        expected = sample(python, x, 0.2, 10, sites=sites)
        assert_same_up_to_rounding(found.variance, expected.variance)
    with inject(model, sites, 0.2, draw=3), inject(python, sites, 0.2, draw=3):
        assert_same_up_to_rounding(model(x), python(x))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_after_it_have_weights_upstream(kind: str) -> None:
    model, _, x = made(kind, first=True)
    assert [site.name for site in find_sites(model, x)] == ["after", "last"]


@pytest.mark.parametrize("kind", KINDS)
def test_first_order_is_right_or_warned_about(kind: str) -> None:
    model, python, x = made(kind)
    sites = find_sites(python, x, select=["before.2", "after", "last"])
    if kind == "optimized":
        with pytest.warns(LatedropWarning, match=r"depends on the sites \['before.2'\] in a way that has no gradient"):
            linearize(model, x, sites)
        return
    found, expected = linearize(model, x, sites), linearize(python, x, sites)
    assert_same_up_to_rounding(found.variance_by_site, expected.variance_by_site)


def test_what_cannot_be_is_refused() -> None:
    model, _, x = made("scripted")
    with pytest.raises(SiteError, match="found a part in TorchScript in 'part'"):
        propagate(model, x, 0.1)
    with pytest.warns(LatedropWarning, match="sums or averages"):
        moments = propagate(model, x, {"after": 0.1, "last": 0.1})  # nothing random goes in
    assert bool((moments.variance > 0).all())
    optimized, _, _ = made("optimized")
    with pytest.raises(ArgumentError, match=r"found what cannot be compiled.*Use engine='auto'"):
        sample(optimized, x, 0.1, 5, engine="compiled")


def test_a_weight_of_it_that_python_reads_is_a_site() -> None:
    class Reads(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.after(F.conv2d(self.part(self.before(x)), self.part.raw)).relu().mean((2, 3)))  # type: ignore[arg-type]

    model, x = Reads(torch.jit.script(Part())).eval(), torch.randn(4, 4, 7, 7)
    assert [site.name for site in find_sites(model, x)] == ["before.2", "part.raw", "after", "last"]
    assert_same_up_to_rounding(sample(model, x, 0.2, 5).mean, sample(model, x, 0.2, 5, engine="loop").mean)


def test_what_it_writes_into_itself_is_thrown_away() -> None:
    class Counts(Part):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.add_(1)
            return F.relu(self.layer(x))

    part = torch.jit.script(Counts().eval())
    model, x = Around(part).eval(), torch.randn(4, 4, 7, 7)
    sample(model, x, 0.2, 5)
    linearize(model, x)
    assert part.calls == 0
    assert float(part.seen) == 0


def test_gradients_of_a_model_that_differentiates_itself_stay_off_its_weights() -> None:
    class Slopes(Around):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            super().forward(x).sum().backward()
            assert x.grad is not None
            return x.grad.sum((2, 3))

    model, x = Slopes(torch.jit.script(Part())).eval(), torch.randn(4, 4, 7, 7)
    assert bool((sample(model, x, 0.2, 5).variance > 0).any())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_calibrated_saved_and_loaded(kind: str, tmp_path: object) -> None:
    model, _, x = made(kind)
    model.train()
    uq = calibrate(model, (x.repeat(3, 1, 1, 1), torch.randn(18, 1)), method=Sampling(rates=[0.2]), progress=False)
    uq.save(f"{tmp_path}/uq.json")
    assert_same_up_to_rounding(load(f"{tmp_path}/uq.json", model).predict(x).variance, uq.predict(x).variance)
