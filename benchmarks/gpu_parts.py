"""The parts of `benchmarks.gpu_round`: each gives units, a name and what measures it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures import Architecture, architectures
from benchmarks.gpu_setting import DRAWS, RATE, Setting, Unit
from benchmarks.nets import SpeedNet, speed_nets
from benchmarks.timing import peak_bytes
from benchmarks.versions import copying_rows
from latedrop import Batches, Predictor, Sampling, calibrate, find_sites, linearize, sample

HERE = Path(__file__).parents[1]


@dataclass
class Case:
    """A network with some rows."""

    model: nn.Module
    x: Tensor
    readout: Callable[[Any], Tensor] | None

    def plain(self) -> Tensor:
        with torch.no_grad():
            return self.model(self.x)

    def trained(self) -> None:
        """Forward and backward, of all weights."""
        with torch.backends.cudnn.flags(enabled=not any(isinstance(m, nn.RNNBase) for m in self.model.modules())):
            output = self.model(self.x) if self.readout is None else self.readout(self.model(self.x))
        torch.autograd.grad(output.sum(), [p for p in self.model.parameters() if p.requires_grad])


def _cases(setting: Setting) -> Iterator[tuple[str, Callable[[], Case]]]:
    for net in architectures(setting.small):
        for rows in (1, min(net.many, setting.most)):
            yield f"{net.name}, {rows}", partial(_case, net, rows, setting.device)
    kind = "cpu" if setting.small or setting.device.type == "cpu" else "gpu"
    for speed in speed_nets(kind):
        if speed.name != "wide_mlp":
            for rows in speed.batches.values():
                rows = min(rows, 64 * setting.most)
                yield f"{speed.name}, {rows}", partial(_speed_case, speed, rows, setting.device)


def _case(net: Architecture, rows: int, device: torch.device) -> Case:
    return Case(net.made(device), net.rows(rows, device), net.readout)


def _speed_case(net: SpeedNet, rows: int, device: torch.device) -> Case:
    readout = (lambda maps: maps.sum((1, 2, 3))) if net.name == "mcnn" else None
    return Case(net.made(device).requires_grad_(False), net.data(rows, device)[0], readout)


def first_order(setting: Setting) -> Iterator[Unit]:
    """First order, alone and as `predict` with leverage and guard; memory beside that of a training step."""
    for name, make in _cases(setting):
        yield name, partial(_first_order, setting, make)


def _first_order(setting: Setting, make: Callable[[], Case]) -> dict[str, Any]:
    case = make()
    sites = find_sites(case.model, case.x[:2])
    linear = partial(linearize, case.model, case.x, sites, case.readout)
    uq = _calibrated(case)
    program = Predictor(case.model, uq.calibration, case.readout, batch_size=len(case.x), engine="compiled")
    runs: dict[str, Callable[[], Any]] = {"plain": case.plain, "first order": linear}
    runs["predict"] = lambda: uq.predict(case.x)
    runs["compiled"] = lambda: program.predict(case.x)
    found = setting.turns(runs, "plain")
    found["bytes"] = {"first order": peak_bytes(linear, setting.device)[1]}
    found["bytes"]["predict"] = peak_bytes(lambda: uq.predict(case.x), setting.device)[1]
    if "compiled" not in found["failed"]:
        found["off"] = float((program.predict(case.x).std / uq.predict(case.x).std - 1).abs().max())
    case.model.requires_grad_(True)
    found["bytes"]["training step"] = peak_bytes(case.trained, setting.device)[1]
    found["sites"] = len(sites)
    return found


def _calibrated(case: Case, rows: int = 16) -> Predictor:
    """With dropout and leverage in use, whatever they are worth here."""
    if case.x.is_floating_point():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(rows, *case.x.shape[1:], generator=generator).to(case.x)
    else:
        x = torch.randint(0, 1000, (rows, *case.x.shape[1:])).to(case.x)
    with torch.no_grad():
        own = torch.cat(
            [case.model(part) if case.readout is None else case.readout(case.model(part)) for part in x.split(4)]
        )
    noise = torch.linspace(-1, 1, rows, device=own.device).reshape(-1, *[1] * (own.dim() - 1)) * own.std()
    uq = calibrate(case.model, (x, own + noise), readout=case.readout, batches=Batches(8), progress=False)
    record = uq.calibration
    names = [*(f"dropout:{site.name}" for site in record.sites), "leverage"]
    used = replace(record.terms, columns=tuple(names), coefficients=((1e-3,) * len(names),))
    return Predictor(case.model, replace(record, terms=used), case.readout, batch_size=len(case.x))


def sampling(setting: Setting) -> Iterator[Unit]:
    """50 draws, beside 50 plain passes and beside copying the rows."""
    for name, make in _cases(setting):
        yield name, partial(_sampled, setting, make, engines=("auto",))


def programs(setting: Setting) -> Iterator[Unit]:
    """The same with the compiled engine, which takes a while to compile; and how long that is in another process."""
    for net in ("wide_mlp", "mixer", "bert_base", "resnet50"):
        yield f"first prediction of {net}", partial(_first_prediction, setting, net)
    for name, make in _cases(setting):
        if setting.device.type == "cpu" or name.endswith(", 1"):
            yield name, partial(_sampled, setting, make, engines=("auto", "compiled"))


def _sampled(setting: Setting, make: Callable[[], Case], engines: tuple[str, ...]) -> dict[str, Any]:
    case = make()
    sites = find_sites(case.model, case.x[:2])
    chunk = max(1, DRAWS // (5 if len(case.x) > 1 else 1))

    def plain() -> None:
        for _ in range(DRAWS):
            case.plain()

    runs: dict[str, Callable[[], Any]] = {"plain x 50": plain}
    if case.readout is None and not any(site.coupled for site in sites):
        runs["copying the rows"] = lambda: copying_rows(case.model, case.x, sites, RATE, DRAWS, chunk)
    for engine in engines:
        runs[engine] = partial(
            sample, case.model, case.x, RATE, DRAWS, sites=sites, readout=case.readout, engine=engine
        )
    return setting.turns(runs, "plain x 50") | {"sites": len(sites)}


_PROCESS = """
import time, sys, torch
from benchmarks.architectures import architectures
from latedrop import find_sites, sample
name, small, device = sys.argv[1], sys.argv[2] == "True", torch.device(sys.argv[3])
net = next(net for net in architectures(small) if net.name == name)
model, x = net.made(device), net.rows(1, device)
sites = find_sites(model, x)
if device.type == "cuda":
    sample(model, x, 0.05, 4, sites=sites, readout=net.readout)
    torch.cuda.synchronize()
start, busy = time.perf_counter(), time.process_time()
sample(model, x, 0.05, 50, sites=sites, readout=net.readout, engine="compiled")
if device.type == "cuda":
    torch.cuda.synchronize()
print(time.perf_counter() - start, time.process_time() - busy)
"""


def _first_prediction(setting: Setting, net: str) -> dict[str, Any]:
    """Seconds to the first compiled prediction, in a process that finds no program and in those that find it.

    The first also leaves torch's bytecode behind, as an installation has it: not every machine can write beside it.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        variables |= {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-W", "ignore", "-c", _PROCESS, net, str(setting.small), setting.device.type]
        for _ in range(3):
            done = subprocess.run(command, env=variables, cwd=HERE, capture_output=True, text=True, check=False)
            if done.returncode:
                return {"error": done.stderr.strip().rpartition("\n")[2][:200]}
            found.append([float(number) for number in done.stdout.split()])
    walls, busy = zip(*found, strict=True)
    return {"first process": walls[0], "later processes": walls[1:], "busy": busy}


def one_row(setting: Setting) -> Iterator[Unit]:
    """One row of a tiny network: beside a loop that stacks its outputs, and beside copying the rows."""
    for draws in (10, 50):
        yield f"{draws} draws", partial(_one_row, setting, draws)
    yield "predict", partial(_one_row_predicted, setting)


def _tiny(device: torch.device) -> tuple[nn.Module, Tensor]:
    net = next(net for net in speed_nets("cpu") if net.name == "uci_mlp")
    return net.made(device).requires_grad_(False), net.data(1, device)[0]


def _one_row(setting: Setting, draws: int) -> dict[str, Any]:
    model, x = _tiny(setting.device)
    sites = find_sites(model, x)
    dropping = nn.Sequential(model[0], model[1], nn.Dropout(RATE), model[2])

    def stacked() -> Tensor:
        dropping.train()
        with torch.no_grad():
            outputs = torch.stack([dropping(x) for _ in range(draws)])
        return torch.stack([outputs.mean(0), outputs.var(0)])

    def passed() -> Tensor:
        with torch.no_grad():
            return model(x.expand(draws, -1))

    runs: dict[str, Callable[[], Any]] = {
        "stacked loop": stacked,
        "one pass over the draws": passed,
        "copying the rows": lambda: copying_rows(model, x, sites, RATE, draws, draws),
        "auto": partial(sample, model, x, RATE, draws, sites=sites),
    }
    if setting.device.type == "cuda":
        runs["compiled"] = partial(sample, model, x, RATE, draws, sites=sites, engine="compiled")
    return setting.turns(runs, "stacked loop")


def _one_row_predicted(setting: Setting) -> dict[str, Any]:
    model, x = _tiny(setting.device)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(200, x.shape[1], generator=generator).to(setting.device)
    with torch.no_grad():
        y = model(rows)
    y = y + y.std() * torch.randn(y.shape, generator=generator).to(y)
    ways = {
        "default": {},
        "first order": {"method": "linear"},
        "50 draws": {"method": Sampling(rates=[RATE], draws=50)},
    }
    made = {name: calibrate(model, (rows, y), progress=False, **options) for name, options in ways.items()}

    def plain() -> Tensor:
        with torch.no_grad():
            return model(x)

    draws = x.repeat(50, 1)

    def passed() -> Tensor:
        with torch.no_grad():
            return model(draws)

    def forward_and_backward() -> Tensor:
        hidden = model[1](model[0](x)).requires_grad_()
        return torch.autograd.grad(model[2](hidden).sum(), hidden)[0]

    runs: dict[str, Callable[[], Any]] = {"plain": plain, "one pass over 50 draws": passed}
    runs["forward and backward"] = forward_and_backward
    runs |= {name: partial(uq.predict, x) for name, uq in made.items()}
    for name, uq in made.items():
        program = Predictor(model, uq.calibration, engine="compiled")
        runs[f"{name}, compiled"] = partial(program.predict, x)
    return setting.turns(runs, "plain")


def calibration(setting: Setting) -> Iterator[Unit]:
    """The default of `calibrate` as a whole: ResNet-50, and a long table through a tiny network."""
    net = architectures(setting.small)[0]
    yield net.name, partial(_calibration, setting, net, 40 if setting.small else 1000)
    for rows in (10_000, 100_000) if setting.small else (1_000_000, 10_000_000):
        yield f"table of {rows} rows", partial(_table, setting, rows)


def _calibration(setting: Setting, net: Architecture, rows: int) -> dict[str, Any]:
    model, batch = net.made(setting.device), min(net.many, rows)
    x = net.rows(rows, setting.device)
    return _whole(setting, model, x, batch)


def _table(setting: Setting, rows: int) -> dict[str, Any]:
    model, x = _tiny(setting.device)
    return _whole(setting, model, torch.randn(rows, x.shape[1], device=setting.device), 65536)


def _whole(setting: Setting, model: nn.Module, x: Tensor, batch: int) -> dict[str, Any]:
    def plain() -> Tensor:
        with torch.no_grad():
            return torch.cat([model(part) for part in x.split(batch)])

    own = plain()
    y = own + own.std() * torch.randn(own.shape, device=own.device)
    times: dict[str, list[float]] = {"plain": [], "calibrate": []}
    bytes_: dict[str, int] = {}
    for turn in range(2):
        for name in ("plain", "calibrate") if turn else ("calibrate", "plain"):
            run = plain if name == "plain" else partial(calibrate, model, (x, y), batch_size=batch, progress=False)
            start = time.perf_counter()
            _, bytes_[name] = peak_bytes(run, setting.device) if setting.device.type == "cuda" else (run(), 0)
            times[name].append(time.perf_counter() - start)
    ratio = [a / b for a, b in zip(times["calibrate"], times["plain"], strict=True)]
    return {"times": times, "plain passes": ratio, "bytes": bytes_}


PARTS: dict[str, Callable[[Setting], Iterator[Unit]]] = {
    "first_order": first_order,
    "one_row": one_row,
    "calibration": calibration,
    "sampling": sampling,
    "programs": programs,
}
"""In the order in which they are measured."""
