"""Density maps: a head is a mass of 1, wherever it is, whatever is cut off."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from latedrop.errors import ArgumentError, DataError
from latedrop_crowd.density import density_map, heads_inside, roi_cells
from rounding import assert_same_doubles, rounding

SHAPES = st.tuples(st.integers(4, 41), st.integers(4, 41))
COORDINATES = st.floats(-30.0, 60.0, allow_nan=False)
POINTS = st.lists(st.tuples(COORDINATES, COORDINATES), max_size=12)
SIGMAS = st.floats(1e-3, 1e3)


def region(shape: tuple[int, int], seed: int) -> npt.NDArray[np.bool_]:
    return np.random.default_rng(seed).random(shape) < 0.6


@settings(max_examples=150, deadline=None)
@given(POINTS, SHAPES, SIGMAS, st.one_of(st.none(), st.integers(0, 99)), st.sampled_from([1, 2, 3, 4]))
def test_sum_is_the_number_of_heads_inside(points, shape, sigma, seed, stride) -> None:
    roi = None if seed is None else region(shape, seed)
    density = density_map(points, shape, sigma, roi, stride=stride)
    nearest = [(math.floor(x + 0.5), math.floor(y + 0.5)) for x, y in points]
    inside = [0 <= c < shape[1] and 0 <= r < shape[0] and (roi is None or bool(roi[r, c])) for c, r in nearest]
    assert heads_inside(points, shape, roi).tolist() == inside
    assert density.dtype == np.float32
    assert density.shape == (shape[0] // stride, shape[1] // stride)
    assert density.min() >= 0
    assert float(density.sum(dtype=np.float64)) == pytest.approx(sum(inside), abs=rounding())
    if roi is not None:
        assert not density[~roi_cells(roi, stride)].any()


@pytest.mark.parametrize("sigma", [1.5, 4.0])
def test_interior_agrees_with_scipy(sigma: float) -> None:
    heads = np.array([(60, 40), (64, 43), (64, 43), (90, 55)])
    impulses = np.zeros((100, 140))
    np.add.at(impulses, (heads[:, 1], heads[:, 0]), 1.0)
    expected = gaussian_filter(impulses, sigma, truncate=9.0)
    assert_same_doubles(density_map(heads, (100, 140), sigma), expected)


def test_between_pixels_agrees_with_the_formula() -> None:
    rows, columns = np.mgrid[:30, :40]
    kernel = np.exp(-((columns - 0.3) ** 2 + (rows - 20.4) ** 2) / (2 * 3.0**2))
    roi = columns + rows > 15
    assert_same_doubles(density_map([(0.3, 20.4)], (30, 40), 3.0), kernel / kernel.sum())
    expected = np.where(roi, kernel, 0) / kernel[roi].sum()
    assert_same_doubles(density_map([(0.3, 20.4)], (30, 40), 3.0, roi), expected)


def test_a_kernel_far_narrower_than_a_pixel_is_one_pixel() -> None:
    density = density_map([(7.4, 3.6)], (9, 12), 1e-3)
    assert density[4, 7] == 1
    assert density.sum() == 1


def test_left_over_rows_and_columns_belong_to_the_last_cells() -> None:
    full = density_map([(20, 12)], (15, 23), 3.0)
    grid = density_map([(20, 12)], (15, 23), 3.0, stride=4)
    assert grid.shape == (3, 5)
    assert grid[0, 0] == pytest.approx(full[:4, :4].sum())
    assert grid[2, 4] == pytest.approx(full[8:, 16:].sum())
    ones = np.zeros((15, 23), dtype=bool)
    ones[14, 22] = True
    assert np.argwhere(roi_cells(ones)).tolist() == [[2, 4]]


@settings(max_examples=50, deadline=None)
@given(SHAPES, st.integers(0, 99), st.sampled_from([2, 3, 4]))
def test_roi_cells_have_a_pixel_of_the_region(shape, seed, stride) -> None:
    roi = np.random.default_rng(seed).random(shape) < 0.05
    cells = np.zeros((shape[0] // stride, shape[1] // stride), dtype=bool)
    for row, column in np.argwhere(roi):
        cells[min(row // stride, cells.shape[0] - 1), min(column // stride, cells.shape[1] - 1)] = True
    assert np.array_equal(roi_cells(roi, stride), cells)


def test_lists_arrays_and_tensors_are_the_same() -> None:
    points, roi = [(3.0, 4.0), (10.0, 8.0)], region((16, 20), 3) | True
    expected = density_map(points, (16, 20), 2.0, roi)
    for made in (np.array(points, dtype=np.float32), torch.tensor(points, requires_grad=True), np.array(points)):
        assert_same_doubles(density_map(made, torch.Size([16, 20]), 2.0, torch.from_numpy(roi)), expected)
    assert_same_doubles(density_map(points, (16, 20), 2, roi.astype(np.uint8)), expected)


@pytest.mark.parametrize("empty", [[], np.zeros((0, 2)), torch.zeros(0, 2), np.array([])])
def test_no_people(empty) -> None:
    density = density_map(empty, (9, 13), 4.0, stride=4)
    assert density.shape == (2, 3)
    assert not density.any()
    assert len(heads_inside(empty, (9, 13))) == 0


def test_a_region_of_another_size_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"expected a region of interest of the frame's 8 x 9 pixels; found shape \(9, 8\)"
    ):
        density_map([(1, 2)], (8, 9), 2.0, np.ones((9, 8), dtype=bool))
    with pytest.raises(DataError, match=r"expected a region of interest \(H, W\)"):
        roi_cells(np.ones(8))


HEADS = [(1.0, 2.0), (4.0, 4.0)]
REFUSED: list[tuple[object, object, dict[str, object], str]] = [
    ([(1, 2), (math.nan, 3)], (8, 8), {}, "expected finite points; found NaN or inf in 1 of 2"),
    ([(1, 2, 3)], (8, 8), {}, r"expected points \(P, 2\)"),
    (np.zeros((0, 3)), (8, 8), {}, r"expected points \(P, 2\)"),
    ([(1, 2), (3,)], (8, 8), {}, "expected points as numbers"),
    (HEADS, (8, 9), {"sigma": 0.0}, "expected sigma above 0 pixels"),
    (HEADS, (8, 9), {"sigma": math.nan}, "expected sigma above 0 pixels"),
    (HEADS, (8.5, 9), {}, r"expected the frame's shape as \(H, W\)"),
    (HEADS, (1, 8, 9), {}, r"expected the frame's shape as \(H, W\)"),
    (HEADS, (8, 9), {"stride": 0}, "expected a stride between 1 and the frame's shorter side, 8 pixels"),
    (HEADS, (8, 9), {"stride": 1.5}, "expected a stride between 1 and the frame's shorter side, 8 pixels"),
]


@pytest.mark.parametrize(("points", "shape", "options", "match"), REFUSED)
def test_what_is_refused(points, shape, options, match) -> None:
    with pytest.raises((ArgumentError, DataError), match=match):
        density_map(points, shape, **options)
