"""Evaluations against the metrics, and the report as a reader, a screen reader and an attacker would find it."""

import base64
import hashlib
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import latedrop
from latedrop import metrics
from latedrop.errors import ArgumentError
from latedrop.evaluation.evaluation import compare, evaluate, verdict
from latedrop.report import table, write_report
from quick import quick
from rounding import rounding

VOID = {"meta", "img", "br", "input"}


pytestmark = pytest.mark.filterwarnings("ignore:the best rate, 0.05, is the smallest")


def data(rows: int = 120, outputs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 3)
    return x, x[:, :1].sin().repeat(1, outputs) + 0.3 * torch.randn(rows, outputs)


QUICK = quick([0.05, 0.1, 0.2], 20)


def predicted(outputs: int = 1, held: Any = None, scale: Any = None, **settings: Any) -> tuple[Any, torch.Tensor]:
    """The prediction of 60 test rows, with its calibration, and their target."""
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, outputs))
    x, y = data(60, outputs)
    uq = QUICK(net, data(outputs=outputs), **settings)
    uq = uq if scale is None else uq.scaled(scale)
    return (uq if held is None else uq.conformal(held)).predict(x), y


def page_of(path: Path, prediction: latedrop.Prediction, target: torch.Tensor, **settings: Any) -> str:
    settings = {"title": "A model", "calibration": prediction.calibration, **settings}
    write_report(path, prediction=prediction, target=target, **settings)
    return path.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Tags that open and close in order, and the attributes of the images."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.headings: list[str] = []
        self.attributes: set[str] = set()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.figures: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(page)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        named = dict(attrs)
        if tag == "img":
            self.images.append(named)
        self.links += [str(named["href"])] if "href" in named else []
        if tag == "svg" and named.get("role") == "img":
            self.figures.append(str(named["aria-label"]))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] in ("h1", "h2", "h3", "h4"):
            self.headings.append(data)
        if {"td", "th"} & set(self.stack):
            self.tables[-1][-1][-1] += data


def test_evaluation_is_what_the_metrics_say() -> None:
    mean, target = torch.randn(2, 50)
    variance = torch.rand(50) + 0.5
    evaluation = evaluate(mean, variance, target, label="mine", rate=0.1, scale=[2.0], level=0.8)
    scored = mean, variance, target
    assert evaluation.rmse == pytest.approx(float(metrics.rmse(*scored)))
    assert evaluation.nll == pytest.approx(float(metrics.nll(*scored)))
    assert evaluation.ma == pytest.approx(float(metrics.miscalibration_area(*scored)), abs=rounding(torch.float64))
    assert evaluation.coverage == pytest.approx(float(metrics.coverage(*scored, level=0.8)))
    assert evaluation.width == pytest.approx(float(metrics.interval_width(*scored, level=0.8)))
    assert evaluation.observed == pytest.approx(metrics.calibration_curve(*scored)[1].tolist())
    assert (evaluation.rows, evaluation.scale, evaluation.level) == (50, (2.0,), 0.8)


def test_given_intervals_replace_the_gaussian_ones() -> None:
    zeros, ones = torch.zeros(4), torch.ones(4)
    target = torch.tensor([0.5, -0.5, 2.0, 3.0])
    evaluation = evaluate(zeros, ones, target, label="box", interval=lambda _: (-ones, 2 * ones), levels=[0.5, 0.75])
    assert (evaluation.coverage, evaluation.width, evaluation.nll) == (0.75, 3.0, None)
    assert evaluation.observed == (0.75, 0.75)
    assert evaluation.ma == pytest.approx(0.125)


@pytest.mark.parametrize("per_output", [True, False])
def test_compare_of_one_output(per_output: bool) -> None:
    p, target = predicted(outputs=2, per_output=per_output, held=data(80, 2))
    rows = [compare(p, target, output=k) for k in (0, 1)]
    ends = p.interval(0.9)
    for k, of_output in enumerate(rows):
        for row, choice in zip(of_output[1:3], ("optimal", "relaxed"), strict=True):
            scales = p.calibration.chosen(choice)[0]
            variance = p.calibration.variance(p.raw_variance, choice)[:, k]
            assert row.scale == (scales[k if per_output else 0],)
            assert row.nll == pytest.approx(float(metrics.nll(p.mean[:, k], variance, target[:, k])))
        assert of_output[3].label == "conformal"
        assert of_output[3].width == pytest.approx(float((ends[1] - ends[0])[:, k].mean()))
    together = compare(p, target)
    assert together[0].nll == pytest.approx((rows[0][0].nll + rows[1][0].nll) / 2, rel=rounding())


def test_compare_has_every_variance_a_scale_of_ones_own_and_fitted_intervals() -> None:
    prediction, target = predicted(scale=3.0, held=data(40))
    rows = compare(prediction, target)
    assert [row.label for row in rows] == ["raw", "scaled", "relaxed", "scale 3", "conformal", "constant"]
    assert [row.scale for row in rows[:2]] == [(1.0,), prediction.calibration.row.scale]
    assert rows[2].scale == prediction.calibration.row.relaxed_scale
    assert rows[0].nll == pytest.approx(float(metrics.nll(prediction.mean, prediction.raw_variance, target)))
    low, high = prediction.interval(0.9)
    assert rows[-2].coverage == pytest.approx(float(((low <= target) & (target <= high)).float().mean()))
    assert max(rows[-2].levels) <= 40 / 41


def test_table_text() -> None:
    prediction, target = predicted()
    rows = compare(prediction, target)
    changed = replace(rows[0], nll=None, coverage=0.12345, coverage_error=0.02)
    head, first, *_ = table([changed, replace(rows[1], rate={"0": 0.1})], "m/s")
    named = dict(zip(head, first, strict=True))
    assert head[3:7] == ["RMSE [m/s]", "NLL", "gain [nats]", "MA"]
    assert head[7:] == ["coverage at 90 %", "width at 90 % [m/s]", "rank correlation"]
    assert (named[""], named["NLL"], named["coverage at 90 %"]) == ("raw", "-", "12.3 % ± 2.0")
    assert table([replace(rows[1], rate={"0": 0.1})])[1][1] == "per site"
    assert "coverage at its level" in table([rows[0], replace(rows[1], level=0.5)])[0]
    assert table(rows[3:])[0][:2] == ["", "RMSE"]  # of a constant alone, rate and scale say nothing


@pytest.mark.parametrize(("factor", "expected"), [(1e6, r"[\d,]{5,}"), (1e-6, r"\d\.\d{3}e-\d"), (1.0, r"\d\.\d{3,4}")])
def test_numbers_have_sensible_digits(factor: float, expected: str) -> None:
    prediction, target = predicted()
    rows = [replace(row, rmse=factor * row.rmse, width=factor * row.width) for row in compare(prediction, target)]
    head, *lines = table(rows)
    for line in lines:
        assert re.fullmatch(expected, line[head.index("RMSE")])


def test_page_stands_alone_and_its_policy_lets_only_our_script_run(tmp_path: Path) -> None:
    page = page_of(tmp_path / "report.html", *predicted(), unit="m")
    outline = Outline(page)
    assert not {"link", "iframe", "object", "base", "form"} & outline.tags
    assert not {"srcset", "onload", "onerror", "style"} & outline.attributes
    assert not re.search(r"https?:|url\(|@import", page)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_page_says_what_a_reader_needs(tmp_path: Path) -> None:
    prediction, target = predicted()
    given = {"unit": "m", "names": ["height"], "about": "Ours.", "reproduce": {"seed": "7"}}
    page = page_of(tmp_path / "report.html", prediction, target, inputs=data(60)[0], **given)
    outline = Outline(page)
    assert outline.headings[0] == "A model"
    assert all(len(words) > 20 for words in outline.figures)
    for row in compare(prediction, target):
        assert f"<td>{row.nll:.3f}</td>" in page
    for text in ("RMSE\n[m]", "height [m]", "Ours.", latedrop.__version__, torch.__version__, "<html lang="):
        assert text in page
    assert 'name="viewport"' in page


def test_verdict_comes_first_with_a_word_beside_each_colour(tmp_path: Path) -> None:
    prediction, target = predicted()
    page = page_of(tmp_path / "report.html", prediction, target)
    judged = verdict(prediction, target)
    assert page.index(judged.sentence) < page.index("<h2")
    for finding in judged.findings:
        assert f'<span class="light {finding.grade}">{finding.grade}</span>' in page
        assert finding.advice in page


@pytest.mark.parametrize("settings", [{}, {"method": "terms"}], ids=["sample", "terms"])
def test_a_constant_is_in_every_table_of_scores_and_every_figure(tmp_path: Path, settings: dict[str, Any]) -> None:
    prediction, target = predicted(**settings)
    page = page_of(tmp_path / "report.html", prediction, target, inputs=data(60)[0])
    for figure in re.findall(r"<figure><h3>(?!Shares).*?</figure>", page, re.DOTALL):
        assert "constant" in figure, re.search("<h3>(.*?)</h3>", figure)
    scores = {"NLL", "90\xa0%", "inside", "candidate", "row"}
    tables = [table for table in Outline(page).tables if set(table[0]) & scores]
    assert len(tables) >= 3
    for lines in tables:
        assert any("constant" in cell for line in lines for cell in line), lines[0]


def test_of_many_methods_the_one_in_use_and_the_constant_are_drawn(tmp_path: Path) -> None:
    page = page_of(tmp_path / "report.html", *predicted(scale=3.0, held=data(40)))
    (figure,) = re.findall(r"<figure><h3>What the intervals hold.*?</figure>", page, re.DOTALL)
    assert re.findall(r"</svg>([a-z ]+)</li>", figure) == ["scaled", "conformal", "constant"]


def test_worst_rows_are_those_furthest_off(tmp_path: Path) -> None:
    prediction, target = predicted()
    target[17] += 50
    page = page_of(tmp_path / "report.html", prediction, target, inputs={"weight": torch.arange(60.0)})
    (worst,) = [lines for lines in Outline(page).tables if "deviations off" in lines[0]]
    assert worst[1][0] == "17"
    assert worst[1][-1] == "17"  # its weight


def test_rows_far_off_do_not_squash_the_others(tmp_path: Path) -> None:
    """A target and a deviation a million times the others: they are cut off and counted."""
    prediction, target = predicted(method="terms")
    prediction, target = replace(prediction, raw_variance=prediction.raw_variance.clone()), target.clone()
    usual = float(target.abs().max())
    target[7] += 1e6
    prediction.raw_variance[3] = 1e8
    page = page_of(tmp_path / "report.html", prediction, target)
    (figure,) = re.findall(r"<figure><h3>Intervals of some rows.*?</figure>", page, re.DOTALL)
    ticks = [float(text.replace(",", "")) for text in re.findall(r'class="tick end"[^>]*>([^<]+)<', figure)]
    assert max(ticks) < 10 * usual
    assert "beyond the figure" in figure


def test_levels_are_those_of_the_evaluation(tmp_path: Path) -> None:
    prediction, target = predicted()
    page = page_of(tmp_path / "report.html", prediction, target)
    (levels,) = [lines for lines in Outline(page).tables if "68\xa0%" in lines[0]]
    assert len(levels[0]) == 7
    for line, row in zip(levels[1:], compare(prediction, target), strict=True):
        shown = [float(cell.partition(" %")[0]) for cell in line[1:]]
        places = [row.levels.index(pytest.approx(float(head.partition("\xa0")[0]) / 100)) for head in levels[0][1:]]
        assert shown == pytest.approx([100 * row.observed[k] for k in places], abs=0.051)


def test_long_names_do_not_leave_their_axis(tmp_path: Path) -> None:
    name, unit = "a name that is rather long, " * 4, "and a unit beside it"
    page = page_of(tmp_path / "r.html", *predicted(), names=[name], unit=unit)
    labels = re.findall(r'<text class="axis middle"[^>]*>([^<]*)</text>', page)
    assert [label for label in labels if label.endswith("a unit beside it]") and "…" in label]
    assert max(map(len, labels)) < 60


def test_several_outputs_have_sections_of_their_own_and_of_many_the_worst(tmp_path: Path) -> None:
    page = page_of(tmp_path / "report.html", *predicted(outputs=3), names=["a", "b", "c"], unit=["m", "kg", "s"])
    outline = Outline(page)
    assert outline.links == ["#output-0", "#output-1", "#output-2"]
    assert [heading for heading in outline.headings if heading.endswith("]")] == ["a [m]", "b [kg]", "c [s]"]
    assert outline.headings.count("On test rows") == 3
    prediction, target = predicted(outputs=9)
    target[:, 7] += 30
    outline = Outline(page_of(tmp_path / "report.html", prediction, target))
    assert len(outline.links) == 6
    assert "#output-7" in outline.links


@pytest.mark.filterwarnings("ignore:only .* validation rows")
def test_many_values_are_thinned_and_said_to_be(tmp_path: Path) -> None:
    x, y = data(20_000)
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1))
    uq = latedrop.calibrate(net, data(), progress=False)
    page = page_of(tmp_path / "report.html", uq.predict(x), y, inputs=x)
    assert "40 of 20,000 rows, in order of their prediction" in page
    assert len(page) < 400_000


@pytest.mark.parametrize(
    "settings",
    [
        {"method": latedrop.FirstOrder(floor=True)},
        {"method": "propagate"},
        {"method": latedrop.Sampling(rates=[{"*": 0.1}, {"*": 0.2}])},
        {"method": latedrop.Sampling(rates=[0.1])},
        {"outputs": 2},
        {"method": latedrop.Sampling(mean="model")},
        {"intervals": "isotonic"},
        {"held": data(40)},
        {"scale": 2.0},
        {"method": "terms"},
    ],
    ids="-".join,
)
def test_every_kind_of_calibration_has_a_page(tmp_path: Path, settings: dict[str, Any]) -> None:
    page = page_of(tmp_path / "report.html", *predicted(**settings))
    assert "How it was fitted" in Outline(page).headings


def test_page_without_test_rows(tmp_path: Path) -> None:
    path, (prediction, _) = tmp_path / "report.html", predicted()
    write_report(path, title="t", calibration=prediction.calibration)
    outline = Outline(path.read_text(encoding="utf-8"))
    assert "On test rows" not in outline.headings
    assert "How it was fitted" in outline.headings
    with pytest.raises(ArgumentError, match="expected prediction and target together"):
        write_report(path, title="t", calibration=prediction.calibration, prediction=prediction)


def test_a_page_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction, target = predicted()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    Outline(page_of(tmp_path / "report.html", prediction, target))
