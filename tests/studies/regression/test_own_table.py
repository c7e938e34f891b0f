"""A user's own table: what is read of it, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from latedrop.errors import ArgumentError, DataError, LatedropError
from studies.__main__ import main
from studies.driver import parsed, read_record, run
from studies.regression.data import LEAST_ROWS, own_set
from studies.uci import study as uci
from studies.uci.study import STUDY, Settings


def written(path: Path, rows: int = 120, *, between: str = ",", seed: int = 0) -> Path:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 2))
    y = x[:, 0] + 0.2 * random.normal(size=rows)
    lines = [between.join(("a", "price", "b"))]
    lines += [between.join(f"{value:.6f}" for value in (u, v, w)) for u, v, w in zip(x[:, 0], y, x[:, 1], strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("between", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_the_target_is_the_last_column(tmp_path: Path, between: str) -> None:
    item, table = own_set(written(tmp_path / "houses.csv", between=between), "price")
    assert (item.name, item.rows, item.columns, item.splits) == ("houses", 120, 3, 20)
    assert np.corrcoef(table[:, 0], table[:, 2])[0, 1] > 0.9
    assert abs(np.corrcoef(table[:, 1], table[:, 2])[0, 1]) < 0.5


def test_larger_tables_have_fewer_epochs_and_splits(tmp_path: Path) -> None:
    small, large = (own_set(written(tmp_path / "t.csv", rows), "price")[0] for rows in (100, 20_000))
    assert small.epochs == 1000
    assert large.epochs == round(5000 / 225)  # 14400 rows in steps of 64
    assert large.splits == 5


def changed(path: Path, line: int, text: str) -> Path:
    lines = written(path).read_text(encoding="utf-8").splitlines()
    lines[line] = text
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (3, "1.0,2.0,red", "red"),
        (3, "1.0,2.0,", "expected a number in every cell of .*found a gap, NaN or inf in row 3"),
        (3, "1.0,2.0", "line 4"),
        (0, "a,cost,b", "price"),
    ],
    ids=["text", "gap", "short", "no target"],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, line: int, text: str, message: str) -> None:
    with pytest.raises(LatedropError, match=message):
        own_set(changed(tmp_path / "t.csv", line, text), "price")


def test_too_little_to_learn_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"expected {LEAST_ROWS} or more rows .*found {LEAST_ROWS - 1}"):
        own_set(written(tmp_path / "t.csv", LEAST_ROWS - 1), "price")
    (tmp_path / "t.csv").write_text("price,a\n" + "3,1\n" * 200)
    with pytest.raises(DataError, match=r"a target that varies .*found 3 in every row\. Pass another --target"):
        own_set(tmp_path / "t.csv", "price")


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    table = str(written(tmp_path / "t.csv"))
    for words in (["--csv", table], ["--target", "price"]):
        with pytest.raises(ArgumentError, match="expected --csv FILE and --target COLUMN together"):
            run(STUDY, parsed(STUDY, ["--out", str(tmp_path / "out"), *words]))
    with pytest.raises(ArgumentError, match="expected --csv alone"):
        run(
            STUDY, parsed(STUDY, ["--csv", table, "--target", "price", "--sets", "yacht", "--out", str(tmp_path / "o")])
        )


@pytest.mark.slow
def test_the_whole_study_on_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(uci, "QUICK", Settings(splits=2, deep_draws=5, epochs=0.005))
    out, table = tmp_path / "out", written(tmp_path / "houses.csv")
    command = ["uci", "--csv", str(table), "--target", "price", "--quick", "--out", str(out), "--device", "cpu"]
    assert main(command) == 0
    record = read_record(out / "houses.json", uci.SCHEMA)
    assert record["rows"] == {"train": 87, "validation": 21, "test": 12}
    assert record["published_splits"] is False
    assert len(record["methods"]["default"]["nll"]) == 2
    assert "houses" in (out / "tables.md").read_text(encoding="utf-8")
    monkeypatch.setattr(uci, "measure", lambda *_: pytest.fail("computed again"))
    assert main(command) == 0
    capsys.readouterr()
    written(table, seed=1)  # another table of the same name
    assert main(command) == 1
    assert "expected results with table_sha256" in capsys.readouterr().err
