"""Files of images: read whole, refused where damaged; repeats share no rows."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from latedrop.errors import DataError, FileError
from studies.classification.data import SETS, Images, ImageSet, load, parts

pytest.importorskip("sklearn", reason="needs scikit-learn")


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()


def written(folder: Path, *, pack: bool = False) -> dict[str, np.ndarray]:
    """A set of 6 training and 4 test images in IDX files."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    files = {}
    for part, rows in (("train", 6), ("t10k", 4)):
        files[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (rows, 5, 7))
        files[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, rows)
    for name, values in files.items():
        content = idx(values)
        (folder / (f"{name}.gz" if pack else name)).write_bytes(gzip.compress(content) if pack else content)
    return files


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "gzip"])
def test_idx_files(tmp_path: Path, pack: bool) -> None:
    values = written(tmp_path / "mnist", pack=pack)
    loaded = load("mnist", tmp_path)
    assert loaded is not None
    assert loaded.x["train"].shape == (6, 1, 5, 7)
    np.testing.assert_array_equal(loaded.x["test"][:, 0], values["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(loaded.y["train"], values["train-labels-idx1-ubyte"])


def test_what_is_absent_or_damaged(tmp_path: Path) -> None:
    assert load("mnist", None) is None
    assert load("mnist", tmp_path) is None
    folder = tmp_path / "mnist"
    written(folder)
    images, labels = folder / "t10k-images-idx3-ubyte", folder / "t10k-labels-idx1-ubyte"
    whole = images.read_bytes()
    for content in (whole[:-1], b"", idx(np.zeros(3)), b"hello, this is no such file"):
        images.write_bytes(content)
        with pytest.raises(DataError, match="expected an IDX file of bytes with 3 axes"):
            load("mnist", tmp_path)
    images.write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(DataError, match="found a damaged one"):
        load("mnist", tmp_path)
    images.write_bytes(whole)
    labels.write_bytes(idx(np.array([1, 2, 3])))
    with pytest.raises(DataError, match="expected a label from 0 to 9 for each of the 4 images"):
        load("mnist", tmp_path)
    labels.unlink()
    with pytest.raises(FileError, match="found neither"):
        load("mnist", tmp_path)


def test_repeats_share_no_rows() -> None:
    item = ImageSet("small", "mnist", "mlp", train=4, validation=2, test=3)
    x = torch.arange(40).reshape(-1, 1, 1, 1).byte()
    images = Images({"train": x, "test": x + 100}, {"train": torch.arange(40) % 10, "test": torch.arange(40) % 10})
    repeats = [parts(item, images, repeat, seed=0) for repeat in range(5)]
    rows = torch.cat([each.x[name].flatten() for each in repeats for name in ("train", "validation", "test")]) * 255
    assert len(rows.round().unique()) == 5 * 9
    assert item.overlap == 0
    again = parts(item, images, 0, seed=1)
    assert not torch.equal(again.x["train"], repeats[0].x["train"])
    with pytest.raises(DataError, match="expected 30 training and 15 test rows of mnist"):
        parts(item, Images({k: v[:11] for k, v in images.x.items()}, {k: v[:11] for k, v in images.y.items()}), 2, 0)


def test_digits_are_split_anew() -> None:
    images, item = load("digits", None), SETS["digits-mlp"]
    assert images is not None
    first, second = (parts(item, images, repeat, seed=0) for repeat in (0, 1))
    assert sum(len(y) for y in first.y.values()) == len(images.y["train"])
    assert not torch.equal(first.y["test"], second.y["test"])
    assert item.overlap == pytest.approx(597 / 1200)
    assert float(first.x["train"].max()) == 1


def pictures(folder: Path, suffix: str) -> np.ndarray:
    """Two pictures of each of ten classes, for training and testing; those of the test part."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (2, 2, 10, 32, 32, 3)).astype(np.uint8)
    for part, rows in zip(("train", "test"), pixels, strict=True):
        for number, label in np.ndindex(2, 10):
            place = folder / part / f"class {label}"
            place.mkdir(parents=True, exist_ok=True)
            image.fromarray(rows[number, label]).save(place / f"{number:04}{suffix}")
    return pixels[1]


def test_cifar_as_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10"
    expected = pictures(folder, ".png")
    loaded = load("cifar-10", tmp_path)
    assert loaded is not None
    assert loaded.y["train"].tolist() == [*range(10)] * 2  # mixed, as rows in a block should be
    np.testing.assert_array_equal(loaded.x["test"].permute(0, 2, 3, 1), expected.reshape(-1, 32, 32, 3))
