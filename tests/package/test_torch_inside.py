"""Private parts of torch: in one file alone, and missed with one warning where a version of torch has them no more."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import latedrop
from latedrop import LatedropWarning, find_sites, inject, linearize, sample, torch_inside
from latedrop.errors import ArgumentError
from rounding import assert_same_up_to_rounding
from zoo import ZOO, Case

PRIVATE = re.compile(
    r"torch(\.\w+)*\._(?!_)\w+|_functorch|\._C\b|\._schema\b|\._cdata\b|\._modules\b|\._parameters\b|\._buffers\b"
    r"|\._forward\w*hooks\b|_call_impl|\b_orig_mod\b|\._make_\w+|_pytree|_python_dispatch|\._values\(|\._version\b"
)


def test_one_file_alone_touches_them() -> None:
    source = Path(latedrop.__file__).parent
    found = [
        f"{path.relative_to(source)}: {match.group()}"
        for path in sorted(source.rglob("*.py"))
        if path.name != "torch_inside.py"
        for match in PRIVATE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was looked up is looked up again."""
    parts = (torch_inside._mode_of_operators, torch_inside._functorch)
    for part in parts:
        part.cache_clear()
    yield
    for part in parts:
        part.cache_clear()


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    known = torch_inside._part
    monkeypatch.setattr(torch_inside, "_part", lambda module, name: None if name in names else known(module, name))


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_without_a_mode_of_operators(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = case.make()
    expected = sample(model, x, 0.2, 7, readout=case.readout)
    without(monkeypatch, "TorchDispatchMode")
    torch_inside._mode_of_operators.cache_clear()
    with pytest.warns(LatedropWarning, match="has no TorchDispatchMode, which latedrop used") as caught:
        sites = find_sites(model, x)
    assert len(caught) == 1
    assert tuple(site.name for site in sites) == case.sites
    found = sample(model, x, 0.2, 7, sites=sites, readout=case.readout)  # and no second warning
    assert_same_up_to_rounding(found.mean, expected.mean)
    assert_same_up_to_rounding(found.variance, expected.variance)


@pytest.mark.usefixtures("forgotten")
def test_without_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(5, 3)
    expected = linearize(model, x)
    monkeypatch.delattr(torch._C, "_functorch")
    torch_inside._functorch.cache_clear()
    with pytest.warns(LatedropWarning, match="has no torch._C._functorch"):
        found = linearize(model, x)
    assert_same_up_to_rounding(found.variance_by_site, expected.variance_by_site)
    with inject(model, found.sites, 0.1), warnings.catch_warnings():
        model(x)


def test_without_a_tracer_the_compiled_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "make_fx")
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(ArgumentError, match=r"make_fx.*Use engine='auto'"):
        sample(model, torch.randn(5, 3), 0.1, 5, engine="compiled")


def test_importing_needs_none_of_them() -> None:
    """Torch itself would not run without some of them: that it can be imported is what counts."""
    code = """
import sys, torch
for name in ("torch.utils._python_dispatch", "torch.fx.experimental.proxy_tensor", "torch.utils._pytree"):
    sys.modules[name] = None  # an import of it fails from now on
for name in ("_disabled_torch_function_impl", "_functorch"):
    delattr(torch._C, name)
import latedrop
print(latedrop.sample.__name__)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "sample"
