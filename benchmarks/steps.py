"""Time each step on a GPU in half precision: draws, first order, the default, calibration, compiled calls.

    python -m benchmarks.steps                           # on an H200 some ten minutes
    PYTHONPATH=../before/src:. python -m benchmarks.steps --out before.json  # of another version

*By hand* is one plain pass over as many copies of the rows as there are draws. All work on some rows takes turns, in an
order that changes. Compiling comes last, in a process for each network: its first call is what a user waits for.
"""

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.nets import mlp
from benchmarks.timing import first_line, machine, markdown_table, medians, stored, timed, turns_within, write

RATE, DRAWS, ROWS, ROUNDS, SECONDS, VALIDATION = 0.05, 50, (1, 8, 64), 7, 6, 128
NETS = ("ResNet-50", "ViT-B", "BERT-base", "ConvNeXt-T", "MLP", "LSTM")
WORK = ("plain", "by hand", "draws", "first order", "default")
RECORDED = [("MLP", "draws", 1), ("MLP", "first order", 1), ("MLP", "default", 1), ("LSTM", "default", 8)]
RECORDED += [(name, "draws", rows) for name in ("ResNet-50", "ViT-B", "BERT-base", "ConvNeXt-T") for rows in (1, 8)]
RECORDED += [("ResNet-50", "first order", 8), ("ResNet-50", "default", 8), ("ResNet-50", "default", 64)]
COMPILED = [("MLP", "default", 1), ("ResNet-50", "default", 8), ("ResNet-50", "first order", 8)]
PROGRAMS = [(*one, "recorded") for one in RECORDED] + [(*one, "compiled") for one in COMPILED]
CALIBRATED = [("ResNet-50", 1000), ("MLP", 64), ("MLP", 2048)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--engines", nargs="+", default=["recorded", "compiled"], help="programs that are measured")
    parser.add_argument("--out", default="steps", help="name of the JSON file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = stored(options.out) if len(options.nets) < len(NETS) else {}
    record |= {"machine": machine(device), "draws": DRAWS}
    record |= {part: record.get(part, {}) for part in ("ms", "calibrated", "compiled")}
    for name in options.nets:
        case = Case(name)
        for rows in ROWS:
            runs = {work: case.call(work, rows) for work in WORK if work != "by hand" or rows < max(ROWS)}
            times, _, failed = turns_within(runs, repeats=ROUNDS, seconds=SECONDS, device=device)
            milliseconds = {work: 1000 * middle for work, middle in medians(times).items()}
            record["ms"] |= {f"{name}, {rows}, {work}": value for work, value in (milliseconds | failed).items()}
            write(options.out, record)
    for name, rows in (one for one in CALIBRATED if one[0] in options.nets):
        record["calibrated"][f"{name}, {rows}"] = [Case(name).calibrated(rows)[1] for _ in range(3)]
        write(options.out, record)
    for one in (one for one in PROGRAMS if one[0] in options.nets and one[3] in options.engines):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            record["compiled"]["{}, {}, {}, {}".format(*one)] = pool.submit(compiled, *one).result()
        write(options.out, record)
    print(table(record))


def compiled(name: str, work: str, rows: int, engine: str) -> dict[str, float] | str:
    """Return seconds of a first call of a program, with empty caches, and milliseconds of a later one."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
        case = Case(name)
        try:
            run = case.call(work, rows, engine)
            first = timed(run, case.device)[1]
            later, _, _ = turns_within({work: run}, repeats=ROUNDS, seconds=SECONDS, device=case.device)
        except Exception as error:
            return first_line(error)
        most = torch.cuda.max_memory_allocated() / 2**30 if case.device.type == "cuda" else float("nan")
    return {"seconds": first, "ms": 1000 * medians(later)[work], "gibibytes": most}


class Case:
    """A network with random weights in half precision, its inputs, and calibrations of both kinds."""

    def __init__(self, name: str) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        model, self.make, self.readout = built(name)
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        for head in (module for module in model.modules() if isinstance(module, nn.Linear)):
            nn.init.trunc_normal_(head.weight, std=0.02) if not bool(head.weight.any()) else None  # that of ViT-B is 0
        self.model = model.to(self.device, self.dtype).eval()
        self.sites = latedrop.find_sites(self.model, self.inputs(3))
        self.network = latedrop.Network(self.model)
        self.options: dict[str, Any] = {"sites": self.sites, "readout": self.readout}

    def inputs(self, rows: int) -> Any:
        """Return inputs of some rows on the device."""
        return mapped(self.make(rows), lambda t: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype))

    def calibrated(self, rows: int, method: Any = "terms") -> tuple[Any, float]:
        """Return a calibration to targets whose errors grow with the variance, and how many seconds it took."""
        x = self.inputs(rows)
        parts = [latedrop.linearize(self.network, part, **self.options) for part in split(x, 64)]
        mean = torch.cat([part.mean for part in parts])
        spread = torch.cat([part.variance(RATE) for part in parts]).sqrt()
        targets = (mean + spread * torch.randn_like(spread)).split(64)
        data = zip(split(x, 64), targets, strict=True)
        options: dict[str, Any] = {"readout": self.readout, "method": method, "progress": False}
        return timed(lambda: latedrop.calibrate(self.model, data, **options), self.device)

    def call(self, work: str, rows: int, engine: Any = "auto") -> Callable[[], Any]:
        x = self.inputs(rows)
        if work in ("plain", "by hand"):
            return partial(self.passed, x, DRAWS if work == "by hand" else 1)
        if work == "draws":
            return lambda: latedrop.sample(self.network, x, RATE, DRAWS, engine=engine, **self.options)
        if work == "first order" and engine == "auto":
            return lambda: latedrop.linearize(self.network, x, **self.options)
        predictor, _ = self.calibrated(VALIDATION, "linear" if work == "first order" else "terms")
        predictor.engine = engine
        return lambda: predictor.predict(x)

    def passed(self, x: Any, times: int) -> None:
        copies = mapped(x, lambda t: torch.cat([t] * times))
        with torch.no_grad():
            self.model(**copies) if isinstance(copies, dict) else self.model(copies)


def split(x: Any, size: int) -> Iterator[Any]:
    """Yield inputs in parts of some rows."""
    rows = len(next(iter(x.values()))) if isinstance(x, dict) else len(x)
    for start in range(0, rows, size):
        yield mapped(x, lambda tensor, start=start: tensor[start : start + size])


def mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return {key: change(value) for key, value in x.items()} if isinstance(x, dict) else change(x)


def built(name: str) -> tuple[nn.Module, Callable[[int], Any], str | None]:
    """Return a network of one output, what makes its inputs, and the readout."""
    if name == "MLP":
        return mlp(13, hidden=(100, 100)), lambda rows: torch.randn(rows, 13), None
    if name == "LSTM":
        return LastStep(), lambda rows: torch.randn(rows, 48, 6), None
    if name == "BERT-base":
        from transformers import BertConfig, BertForSequenceClassification

        def texts(rows: int) -> dict[str, Tensor]:
            ids = torch.randint(1000, (rows, 128))
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        return BertForSequenceClassification(BertConfig(num_labels=1)), texts, "logits"
    from torchvision import models

    called = {"ResNet-50": "resnet50", "ConvNeXt-T": "convnext_tiny", "ViT-B": "vit_b_16"}[name]
    return models.get_model(called, num_classes=1), lambda rows: torch.randn(rows, 3, 224, 224), None


class LastStep(nn.Module):
    """A linear layer, a recurrent one, and the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.recurrent, self.head = nn.Linear(6, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.first(x).tanh())
        return self.head(states[:, -1])


def table(record: dict[str, Any]) -> str:
    cases = dict.fromkeys(", ".join(key.split(", ")[:2]) for key in record["ms"])
    ordered = sorted(cases, key=lambda case: int(case.split(", ")[1]))
    rows = [[case, *(_cell(record["ms"].get(f"{case}, {work}")) for work in WORK)] for case in ordered]
    return markdown_table(["network, rows", *WORK], rows)


def compiled_table(record: dict[str, Any]) -> str:
    rows = []
    for key, run in record["compiled"].items():
        name, work, count, engine = key.split(", ")
        steps = [record["ms"].get(f"{name}, {count}, {each}") for each in ("plain", "by hand", work)]
        figures = [*steps, *(run[each] for each in ("ms", "seconds", "gibibytes"))] if isinstance(run, dict) else [run]
        rows.append([f"{name}, {count} rows, {work}", *map(_cell, figures[:3]), engine, *map(_cell, figures[3:])])
    head = ["", "plain", "by hand", "step by step", "engine", "program", "first call [s]", "memory [GiB]"]
    return markdown_table(head, rows)


def calibrated_table(record: dict[str, Any]) -> str:
    rows = [[*key.split(", "), _cell(median(times))] for key, times in record["calibrated"].items()]
    return markdown_table(["network", "rows", "calibrate [s]"], rows)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value or "-")[:60]


if __name__ == "__main__":
    main()
