"""Every plot draws what it is given, on the axes it is given, and leaves the rest of matplotlib alone."""

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from latedrop import plots
from latedrop.errors import ArgumentError, DataError, LatedropError

LEVELS = np.array([0.25, 0.5, 0.75])
X = np.array([2.0, 0.0, 1.0])

DRAW = {
    "calibration_curves": lambda ax=None: plots.calibration_curves({"raw": (LEVELS, LEVELS**2)}, ax),
    "intervals": lambda ax=None: plots.intervals(X, X, X - 1, X + 1, ax, target=X),
}
every_plot = pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.figure(layout="constrained").add_subplot()


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_every_public_plot_is_in_the_table():
    assert set(plots.__all__) - {"new_figure", "png"} == set(DRAW)


def test_a_figure_of_its_own_becomes_a_png_and_leaves_pyplot_alone():
    before = plt.get_fignums()
    assert plots.png(plots.new_figure(2, 1)).startswith(b"\x89PNG")
    assert plt.get_fignums() == before


@every_plot
def test_the_axes_given_are_drawn_on_and_returned(draw, ax, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("plots must not show themselves"))
    figures, settings = plt.get_fignums(), dict(matplotlib.rcParams)
    assert draw(ax) is ax
    assert ax.has_data()
    assert plt.get_fignums() == figures
    assert dict(matplotlib.rcParams) == settings


@every_plot
def test_without_axes_a_new_figure_is_made_labelled_and_not_cut_off(draw, ax):
    new = draw()
    assert new.figure is not ax.figure
    assert not ax.has_data()
    assert new.get_xlabel()
    assert new.get_ylabel()
    new.figure.canvas.draw()
    page, drawn = new.figure.bbox, new.figure.get_tightbbox().transformed(new.figure.dpi_scale_trans)
    assert page.x0 <= drawn.x0 <= drawn.x1 <= page.x1
    assert page.y0 <= drawn.y0 <= drawn.y1 <= page.y1


@every_plot
def test_a_missing_matplotlib_says_what_to_install(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(LatedropError, match=r"expected matplotlib.*pip install 'latedrop\[plots\]"):
        draw()


def test_importing_plots_does_not_import_matplotlib():
    code = "import sys, latedrop.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_calibration_curves_draw_the_curves_the_bisector_and_the_regions(ax):
    plots.calibration_curves({"raw": (LEVELS, LEVELS**2), "scaled": (torch.tensor(LEVELS), LEVELS)}, ax)
    assert legend(ax) == ["calibrated", "raw", "scaled"]
    assert sorted(texts(ax)) == ["overconfident", "underconfident"]
    bisector, raw, scaled = ax.lines
    assert bisector.get_xydata().tolist() == [[0, 0], [1, 1]]
    np.testing.assert_array_equal(raw.get_ydata(), LEVELS**2)
    assert raw.get_color() != scaled.get_color()
    assert raw.get_marker() != scaled.get_marker()
    assert raw.get_linestyle() != scaled.get_linestyle()
    over = next(text for text in ax.texts if text.get_text() == "overconfident")
    assert over.get_position()[1] < over.get_position()[0]


def test_intervals_are_sorted_by_x(ax):
    plots.intervals(X, 10 * X, 10 * X - 1, 10 * X + 1, ax, target=torch.tensor(X), xlabel="temperature [K]")
    mean = next(line for line in ax.lines if line.get_label() == "mean")
    assert mean.get_xydata().tolist() == [[0, 0], [1, 10], [2, 20]]
    assert ax.collections[-1].get_offsets().tolist() == [[0, 0], [1, 1], [2, 2]]
    assert legend(ax) == ["interval", "mean", "target"]
    assert ax.get_xlabel() == "temperature [K]"


def test_intervals_draw_wide_bands_under_narrow_ones(ax):
    plots.intervals(X, X, {0.5: (X - 1, X + 1), 0.995: (X - 3, X + 3), 0.9: (X - 2, X + 2)}, ax=ax)
    assert legend(ax) == ["99.5 % interval", "90 % interval", "50 % interval", "mean"]
    lightness = [band.get_facecolor()[0, :3].sum() for band in ax.collections]
    assert lightness == sorted(lightness, reverse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_of_any_float_dtype_are_drawn(ax, dtype):
    plots.calibration_curves({"raw": (torch.ones(3, dtype=dtype, requires_grad=True), torch.ones(3, dtype=dtype))}, ax)
    assert ax.has_data()


@pytest.mark.parametrize(
    ("draw", "error", "match"),
    [
        (lambda: plots.calibration_curves({}), ArgumentError, "at least one curve, found none; pass"),
        (lambda: plots.calibration_curves({"raw": (LEVELS, [0.1])}), DataError, r"abscissae of 'raw'.*\(1,\)"),
        (lambda: plots.intervals(X, X, X), ArgumentError, "low as ndarray and high as NoneType"),
        (lambda: plots.intervals(X, X, {0.9: (X, X)}, X), ArgumentError, "low as dict and high as ndarray"),
        (lambda: plots.intervals(X, X, {}), ArgumentError, "at least one band"),
        (lambda: plots.intervals(X, X[:2], X, X), DataError, r"found mean of shape \(2,\), x of shape \(3,\)"),
        (lambda: plots.calibration_curves({"a": ([], [])}), DataError, r"one axis of one length, not empty"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_a_figure_is_made(draw, error, match):
    with pytest.raises(error, match=match):
        draw()
    assert not plt.get_fignums()
