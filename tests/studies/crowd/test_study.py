"""The crowd study in small: its measures are the library's, it goes on where it was, and says what it cannot do."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors")
pytest.importorskip("scipy")


import latedrop
from latedrop import metrics
from latedrop.calibration import scale
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop_crowd.density import roi_cells
from latedrop_crowd.layouts import open_set
from latedrop_crowd.mcnn import MCNN, Trained, load_weights, save_weights
from latedrop_crowd.scenes import make_scenes
from studies import pages as study_pages
from studies.__main__ import main
from studies.crowd import claims as crowd_claims
from studies.crowd import study as crowd
from studies.crowd.measures import COVERAGES, KINDS, Predicted, conformal, fit, judge
from studies.crowd.stages import Settings, load, sampled
from studies.crowd.study import STUDY
from studies.driver import parsed, read_record, run

DATA = Path(__file__).parents[4] / "shared" / "data"
RATES = (0.005, 0.05)
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks that were never trained: one plain, one that says it is embedded."""
    folder = tmp_path_factory.mktemp("weights")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain, other = MCNN(), MCNN()
    save_weights(folder / "scenes.safetensors", Trained(plain.eval(), None, {"set": "scenes", "rate": 0.0}))
    save_weights(
        folder / "scenes-embedded-0.1.safetensors", Trained(other.eval(), None, {"set": "scenes", "rate": 0.1})
    )
    return folder


def words(out: Path, weights: Path, *more: str) -> list[str]:
    return ["--quick", "--weights", str(weights), "--out", str(out), "--device", "cpu", *more]


def again(out: Path, weights: Path, *more: str) -> list[Path]:
    return run(STUDY, parsed(STUDY, words(out, weights, *more)))


def read(out: Path) -> dict[str, Any]:
    return read_record(out / "scenes.json", crowd.SCHEMA)


def patch_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(crowd, "QUICK", Settings(draws=3, rates=RATES, frames=4))
    patch.setattr(crowd, "make_scenes", partial(make_scenes, shape=(64, 72)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_small(monkeypatch)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Path]:
    """The results of `--quick`, as a user runs it."""
    out = tmp_path_factory.mktemp("crowd")
    with pytest.MonkeyPatch.context() as patch:
        patch_small(patch)
        patch.setattr(study_pages, "find_spec", lambda name: None)  # figures have a test of their own
        assert main(["crowd", *words(out, weights)]) == 0
    return out


def pairs(rows: int = 400, seed: int = 0) -> tuple[Predicted, Predicted]:
    """Errors of a spread that the variance half knows; a few variances are 0."""
    generator = torch.Generator().manual_seed(seed)

    def one() -> Predicted:
        variance = torch.rand(rows, generator=generator) ** 4 * 0.3
        mean = torch.randn(rows, generator=generator)
        target = mean + torch.randn(rows, generator=generator) * (0.1 + variance).sqrt()
        variance[::100] = 0
        return Predicted(mean, variance, target, rows // 4)

    return one(), one()


def test_measures_are_those_of_the_library() -> None:
    held_out, test = pairs()
    fitted = fit(held_out)
    positive = held_out.variance[held_out.variance > 0]
    assert fitted.least == pytest.approx(float(positive.min()))
    lifted = [torch.where(part.variance > 0, part.variance, positive.min()) for part in (held_out, test)]
    rows = held_out.mean, lifted[0], held_out.target
    assert fitted.scale == pytest.approx(float(scale.optimal_scale(*rows)))
    assert fitted.relaxed_scale == pytest.approx(float(scale.relaxed_scale(*rows)))
    judgement = judge(test, fitted, intervals=True)
    assert judgement["zero_variances"] == 4
    assert judgement["rmse"] == pytest.approx(float(metrics.rmse(test.mean, None, test.target)), rel=1e-5)
    assert judgement["mae"] == pytest.approx(float(metrics.mae(test.mean, None, test.target)), rel=1e-5)
    ideal = metrics.ideal_nll(test.mean.double(), None, test.target.double(), constant=False)
    assert judgement["nll_ideal"] == pytest.approx(float(ideal))
    variances = {
        "unscaled": lifted[1].double(),
        "scaled": lifted[1].double() * fitted.scale,
        "relaxed": lifted[1].double() * fitted.relaxed_scale,
        "floor": lifted[1].double() * fitted.floor_scale + fitted.floor,
    }
    for kind in KINDS:
        rows = test.mean.double(), variances[kind], test.target.double()
        assert judgement[f"nll_{kind}"] == pytest.approx(float(metrics.nll(*rows, constant=False)))
        assert judgement[f"ma_{kind}"] == pytest.approx(float(metrics.miscalibration_area(*rows)))
        _, observed = metrics.calibration_curve(*rows)
        np.testing.assert_allclose(judgement["curves"][kind], observed, atol=1e-5)
        for level, inside, width in zip(COVERAGES, judgement["coverage"][kind], judgement["width"][kind], strict=True):
            assert inside == pytest.approx(float(metrics.coverage(*rows, level=level)))
            assert width == pytest.approx(float(metrics.interval_width(*rows, level=level)))


def test_the_floor_is_never_worse() -> None:
    held_out, _ = pairs()
    on_held = judge(held_out, fit(held_out))
    assert on_held["nll_floor"] < on_held["nll_scaled"] < min(on_held["nll_unscaled"], on_held["nll_relaxed"])


def test_conformal_is_that_of_intervals() -> None:
    held_out, test = pairs()
    std = {"validation": held_out.variance.sqrt() + 1, "test": test.variance.sqrt() + 1}
    error = {"validation": held_out.target - held_out.mean, "test": test.target - test.mean}
    scores = conformal(error, std)
    fitted = scale.conformal([error["validation"] / std["validation"]], (1.0,), (0.0,))
    for place, level in enumerate(COVERAGES):
        radius = fitted.quantiles((1 + level) / 2)[0] * std["test"]
        assert scores["width"][place] == pytest.approx(float(2 * radius.mean()), rel=1e-5)
        assert scores["coverage"][place] == pytest.approx(float((error["test"].abs() <= radius).double().mean()))
    few = conformal({name: values[:10] for name, values in error.items()})
    assert few["coverage"][-1] is None
    assert few["coverage"][0] is not None


def test_every_measure_of_every_rate_and_part(quick: Path) -> None:
    record = read(quick)
    assert record["rates"] == list(RATES)
    assert len(record["sites"]) == 10
    assert record["frames"] == {"validation": 4, "test": 4}
    for columns in (*record["injected"].values(), *record["sampling_free"].values()):
        for part in ("validation", "test"):
            for kind in KINDS:
                assert len(columns[part][f"nll_{kind}"]) == len(columns[part][f"ma_{kind}"]) == len(RATES)
            assert (np.array(columns[part]["nll_ideal"]) <= np.array(columns[part]["nll_scaled"])).all()
        held_out = columns["validation"]
        assert (np.array(held_out["nll_floor"]) <= np.array(held_out["nll_scaled"]) + 1e-9).all()
    assert set(record["rejection"]["controls"]) == {"random", "lowest_mass", "low_density", "shift"}
    assert len(record["series"]["truth"]) == 4
    assert record["networks"]["scenes-embedded-0.1"]["about"]["rate"] == 0.1


def test_the_numbers_are_those_of_the_library(quick: Path, weights: Path) -> None:
    record, rate = read(quick), RATES[1]
    trained = load_weights(weights / "scenes.safetensors")
    item = make_scenes(0, 4, 4, shape=(64, 72))

    def moments(part: tuple[int, ...]) -> tuple[latedrop.Moments, Tensor, Tensor]:
        images = torch.stack([item.image(index) for index in part])
        maps = torch.stack([item.density(index).flatten() for index in part])
        counts = torch.tensor([float(item.count(index)) for index in part])
        return latedrop.sample(trained.model, images, rate, 3, readout=trained.both), maps, counts

    (held_out, held_maps, held_counts), (test, maps, counts) = moments(item.validation), moments(item.test)
    for target, take, truth, held_truth in (
        ("count", np.s_[:, -1], counts, held_counts),
        ("pixel", np.s_[:, :-1], maps, held_maps),
    ):
        least = held_out.variance[take][held_out.variance[take] > 0].min()
        variance = [
            torch.where(part.variance[take] > 0, part.variance[take], least).double() for part in (held_out, test)
        ]
        factor = scale.optimal_scale(held_out.mean[take], variance[0], held_truth)
        actual, rows = record["injected"][target]["test"], (test.mean[take].double(), truth.double())
        expected = metrics.nll(rows[0], variance[1] * factor, rows[1], constant=False)
        assert actual["nll_scaled"][1] == pytest.approx(float(expected), rel=1e-4)
        assert actual["rmse"][1] == pytest.approx(float(metrics.rmse(rows[0], None, rows[1])), rel=1e-4)
    # The first-order variance grows with the odds alone: one scaled measure for all rates.
    linear = record["sampling_free"]["count"]["test"]
    assert linear["nll_scaled"][0] == pytest.approx(linear["nll_scaled"][1])
    np.testing.assert_allclose(record["series"]["truth"], counts)


@pytest.mark.parametrize(("sigma", "cells"), [(3.0, 2.0), (6.0, 3.0), (8.0, 4.0)])
def test_a_region_is_false_two_kernel_widths_from_a_head(sigma: float, cells: float) -> None:
    item = replace(make_scenes(0, 2, 2, shape=(64, 72)), sigma=sigma)
    settings = Settings(draws=2, rates=(0.01,))
    study = load(item, Trained(MCNN().eval()), settings)
    fit = {"least": [1e-9], "relaxed_scale": [1.0]}
    record = {"chosen": {"pixel": {"scaled": 0}}, "rates": [0.01], "injected": {"pixel": {"fit": fit}}}
    actual, _ = crowd.reject(study, record, lambda passes: None)
    assert actual["near_cells"] == cells


def test_only_the_region_of_interest_counts() -> None:
    if not (DATA / "ucsd").is_dir():
        pytest.skip("UCSD is not at ../shared/data/ucsd")
    item = open_set("ucsd", DATA / "ucsd")
    assert item.roi is not None
    cells = torch.from_numpy(roi_cells(item.roi))
    trained = Trained(MCNN().eval(), cells, {"set": "ucsd"})
    settings = Settings(draws=2, every=100, frames=2)
    study = load(item, trained, settings)
    test = study.parts["test"]
    assert study.inside.sum() == cells.sum() < cells.numel()
    assert test.places == (item.test[0], item.test[100])
    torch.testing.assert_close(test.density.sum(1), test.count, rtol=1e-4, atol=1e-4)
    assert [len(points) for points in test.points] == test.count.tolist()
    drawn = sampled(study, study.trained, 0.01, lambda passes: None)["test"]
    torch.testing.assert_close(drawn.mean.sum(1), drawn.count, rtol=1e-4, atol=1e-3)
    assert drawn.mean.shape == test.density.shape
    with pytest.raises(DataError, match="expected weights made for the region of interest of ucsd"):
        load(item, Trained(trained.model, cells[:-1], {}), settings)


def test_other_settings_or_weights_are_never_mixed(quick: Path, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"expected results with settings .*'seed': 3.*Pass another --out, or --fresh"):
        again(quick, weights, "--seed", "3")
    for path in weights.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.manual_seed(1)
    save_weights(tmp_path / "scenes.safetensors", Trained(MCNN().eval(), None, {"set": "scenes"}))
    with pytest.raises(FileError, match="expected results with networks"):
        again(quick, tmp_path)


def test_what_cannot_be_run_is_said(tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentError, match="expected --sets of mall, ucsd, pets, own, scenes; found subway"):
        again(tmp_path, weights, "--sets", "mall,subway")
    with pytest.raises(ArgumentError, match="expected --draws of at least 2; found 1"):
        again(tmp_path, weights, "--draws", "1")
    with pytest.raises(FileError, match=r"expected a folder at .*Check --weights"):
        again(tmp_path, tmp_path / "nowhere")
    (tmp_path / "mall.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match="found none"):
        again(tmp_path / "out", tmp_path, "--sets", "mall,ucsd", "--data", str(tmp_path))
    said = capsys.readouterr().err
    assert f"mall: skipped, no folder mall in --data {tmp_path}" in said
    assert "ucsd: skipped, expected weights at" in said


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"set": "mall"}, "expected weights trained on scenes; they say mall"),
        ({"set": "scenes", "folds": 5}, "expected weights of scenes that have not seen its validation frames"),
    ],
    ids=["another set", "all frames"],
)
def test_weights_of_another_training_are_refused(tmp_path: Path, about: dict[str, Any], message: str) -> None:
    save_weights(tmp_path / "scenes.safetensors", Trained(MCNN().eval(), None, about))
    with pytest.raises(DataError, match=message):
        again(tmp_path / "out", tmp_path)


@needs_matplotlib
def test_pages_and_figures_come_from_the_json_alone(tmp_path: Path, quick: Path) -> None:
    (tmp_path / "scenes.json").write_bytes((quick / "scenes.json").read_bytes())
    assert main(["crowd", "--figures", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert "| injected, scaled |" in page
    assert "embedded at 0.1" in page
    for name in ("rates_pixel", "rates_count", "calibration"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({name}.png)" in page
    claims = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert all(claim.text in claims for claim in crowd_claims.CLAIMS)
    assert "decide little" in claims  # only some of the frames were measured
