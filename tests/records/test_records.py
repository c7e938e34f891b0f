"""Every record: a golden file of each, random edits with a checksum made to fit, and messages that name the field."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import latedrop
from latedrop.errors import DataError, FileError
from latedrop.prediction.detector import Detector
from latedrop.records import FORMAT, Format, checksum_of, plain
from latedrop.stored_tensors import inline
from records.examples import GOLDEN, KINDS, by_rates, by_terms, classifier, rows

NAN, INF = float("nan"), float("inf")
STRANGE: list[Any] = [None, True, "x", "", -1, 0, 0.5, NAN, INF, -INF, 1e300, 10**400, 10**12, [], [[]], {}, [NAN]]


def golden(name: str) -> dict[str, Any]:
    """The record in a golden file, as plain data."""
    if name not in KINDS:
        pytest.skip("people counting needs scipy")
    return json.loads((GOLDEN / f"{name}.json").read_text())[KINDS[name].key]


def resealed(kind: Format[Any], data: Any) -> str:
    return json.dumps({kind.key: data, **({"checksum": checksum_of(data)} if kind.sealed else {})})


def changed(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy of plain data with another value at a place."""
    copy: dict[str, Any] = json.loads(json.dumps(data))
    inner: Any = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("name", [*KINDS])
class TestGolden:
    def test_it_loads_and_is_written_as_it_was(self, name: str) -> None:
        data, kind = golden(name), KINDS[name]
        record = kind.read(GOLDEN / f"{name}.json")
        assert isinstance(record, kind.kind)
        assert plain(record, inline) == {key: value for key, value in data.items() if key != "format"}
        assert kind.to_json(record, inline) == (GOLDEN / f"{name}.json").read_text()

    def test_every_field_must_be_there_and_no_other(self, name: str) -> None:
        data, kind = golden(name), KINDS[name]
        for field in set(data) - {"format"}:
            rest = {key: value for key, value in data.items() if key != field}
            with pytest.raises(DataError, match=rf"expected a field {kind.name}\.{field}; it is missing"):
                kind.from_json(resealed(kind, rest))
        objects = [(), *(path for path in places(data) if isinstance(at(data, path), dict))]
        free = {"shares", "curves", "versions", "columns", "about", "frames", "usual", "monitors", "weights", "rate"}
        for path in objects:
            if not free & set(path):  # names in these are data
                with pytest.raises(DataError, match=r"unheard_of|a tensor"):
                    kind.from_json(resealed(kind, changed(data, (*path, "unheard_of"), 1)))

    def test_an_edit_without_a_new_checksum(self, name: str, tmp_path: Path) -> None:
        data, kind = golden(name), KINDS[name]
        path = tmp_path / "file.json"
        path.write_text(json.dumps({kind.key: {**data, "more": 1}, "checksum": checksum_of(data)}))
        with pytest.raises(FileError, match=r"file\.json: expected the content that was saved; the checksum"):
            kind.read(path)

    @pytest.mark.parametrize("version", [None, True, 0, 1, FORMAT + 1, "2", [2]])
    def test_another_version_says_what_to_do(self, name: str, version: Any) -> None:
        data, kind = golden(name), KINDS[name]
        with pytest.raises(DataError, match=f"in format {FORMAT}, that of this version; found format .*") as raised:
            kind.from_json(resealed(kind, {**data, "format": version}))
        assert str(raised.value).endswith(kind.again)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "an empty file"),
            (b"[" * 200_000, "lists inside lists"),
            (b'{"latedrop":' * 100_000, "lists inside lists|expected the JSON"),
            (b"[1, 2]", "found something else"),
            (b'"text"', "found something else"),
            (b"null", "found something else"),
            (b"9" * 10_000, "expected the JSON"),
            (b"\x00\x01\x80\xff", "found a file that is not UTF-8 text"),
            ('{"a": "ü"}'.encode("utf-16"), "found a file that is not UTF-8 text"),
        ],
    )
    def test_other_files(self, name: str, tmp_path: Path, content: bytes, message: str) -> None:
        golden(name)
        path = tmp_path / "file.json"
        path.write_bytes(content)
        with pytest.raises(FileError, match=message) as raised:
            KINDS[name].read(path)
        assert "file.json" in str(raised.value)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutated(data: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy of plain data with one to three random edits: other values, less, more, twice, or in another order."""
    copy: dict[str, Any] = json.loads(json.dumps(data))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        every = [path for path in places(copy) if path != ("format",)]
        # Records have long lists; every depth and every field gets its share.
        path = chance.choice([p for p in every if p[0] == chance.choice(every)[0]] or every)
        inner, key = at(copy, path[:-1]), path[-1]
        old, way = inner[key], chance.randrange(6)
        if way == 0:
            inner.pop(key)
        elif way == 1 and isinstance(inner, list):
            inner.insert(key, old)
        elif way == 1:
            inner[f"{key}2"] = old
        elif way == 2 and isinstance(old, (int, float)) and not isinstance(old, bool) and abs(old) < 1e300:
            inner[key] = chance.choice((old * 1.5, -old, old + 1, float(old)))
        elif way == 2 and isinstance(old, str) and old:
            spot = chance.randrange(len(old))
            inner[key] = old[:spot] + chance.choice("aZ0 =:.") + old[spot + 1 :]
        elif way == 3:
            inner[key] = json.loads(json.dumps(at(copy, chance.choice(every)) if chance.random() < 0.5 else [old]))
        elif way == 4 and isinstance(old, list) and len(old) > 1:
            chance.shuffle(old)
        else:
            inner[key] = chance.choice(STRANGE)
        if not [path for path in places(copy) if path != ("format",)]:
            break
    return copy


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 70), *(pytest.param(seed, 560, marks=pytest.mark.slow) for seed in (1, 2))]
)
@pytest.mark.parametrize("name", [*KINDS])
def test_random_edits_are_refused_in_our_words_or_mean_the_same(name: str, seed: int, count: int) -> None:
    """All in all 630 quick ones and 10,080 slow ones, each with a checksum that fits."""
    data, kind, chance = golden(name), KINDS[name], random.Random(f"{name} {seed}")
    loaded = 0
    for _ in range(count):
        edited = mutated(data, chance)
        try:
            text = resealed(kind, edited)
            record = kind.from_json(text)
        except DataError:
            continue
        assert {"format": FORMAT, **plain(record, inline)} == edited
        repr(record), str(record)
        loaded += 1
    assert loaded < count


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.sealed])
def test_random_damage_of_bytes_is_noticed(name: str) -> None:
    data, kind, chance = golden(name), KINDS[name], random.Random(name)
    text = (GOLDEN / f"{name}.json").read_text()
    for _ in range(60):
        spot, size = chance.randrange(len(text)), chance.choice((0, 1, 1, 20))
        damaged = text[:spot] + chance.choice(["", "0", "x", '"', "}", " ", "NaN"]) + text[spot + size :]
        try:
            record = kind.from_json(damaged)
        except DataError:
            continue
        assert {"format": FORMAT, **plain(record, inline)} == data  # a space between two fields


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("rates", "table.0.scale", [-1.0, 1.0], r"calibration.table\[0\].scale\[0\] to be at least 0; found -1.0"),
        ("rates", "table.0.scale", [1.0], r"table\[0\].scale to be 2 numbers, one per output or for all; found \(1.0,"),
        ("rates", "least_variance.0", 0.0, r"calibration.least_variance\[0\] to be at least"),
        ("rates", "sites", [], r"calibration.sites to .*at least 1 item"),
        ("rates", "sites.0.kind", "pixel", r"calibration.sites\[0\].kind to be 'element' or 'channel'; found 'p"),
        ("rates", "method", "magic", "calibration.method to be 'terms', 'sample', 'linear' or 'propagate'; found 'm"),
        ("rates", "draws", 1, "calibration.draws to be 2 or more; found 1"),
        ("rates", "rate", {"nowhere": 0.1}, r"calibration.rate to be rates of its sites .*; found \['nowhere'\]"),
        ("rates", "rate", 0.2, "calibration.rate to be a rate of its table; found 0.2"),
        ("rates", "output_shape", [2**20, 2**20], "calibration.output_shape to be a shape of at most"),
        ("rates", "table.0.rmse", [0.1], r"calibration.table\[0\].rmse to be 2 numbers"),
        ("rates", "curves.scaled", [0.1], "calibration.curves.scaled to be 99 numbers; found 1"),
        ("rates", "intervals.scores.0", [2.0, 1.0], r"calibration.intervals.scores\[0\] to be numbers that nev"),
        ("per_site", "shares", {"2": 1.0}, r"calibration.shares to be one of every site \['2', '4'\]"),
        ("terms", "terms.coefficients.0", [1.0], r"calibration.terms.coefficients\[0\] to be one number for each"),
        ("terms", "terms.features.sites.0", "nowhere", r"calibration.terms.features.sites to be some of the s"),
        ("terms", "terms.features", None, "calibration.terms.features to be the sites that terms look at"),
        ("terms", "terms.floors", [1.0, 2.0], "calibration.terms.coefficients to be 2 rows, as floors; found 1"),
        ("terms", "terms.choice", "other", "calibration.terms.choice to be the name of a candidate; found 'other'"),
        ("terms", "terms.terms.1.root.data", "?", r"calibration.terms.terms\[1\].root.data to be bytes"),
        ("terms", "terms.terms.1.ridge", -1.0, r"in calibration.terms.terms\[1\]: expected a ridge above 0"),
        ("terms", "seen", "xyz", "calibration.seen"),
        ("classes", "features.sites.0", "another", "calibration.features.sites to be some of the sites"),
        ("classes", "rate", 0.5, "calibration.draws to be how many draws are averaged, 2 or more; found 0"),
        ("classes", "guard.terms.0", "forest", "calibration.guard.terms to be the names of terms"),
        ("classes", "features", None, "calibration.features to be the sites that the leverage looks at"),
        ("classes", "sets.scores", [[0.2, 0.1]], r"calibration.sets.scores\[0\] to be scores in rising order"),
        ("classes", "sets.scores", [[0.1], [0.2]], "calibration.sets.scores to be one list, or 3; found '2 lists'"),
        ("classes", "rule.risk", 2.0, "calibration.rule.risk to be at most 1"),
        ("detector", "names", ["entropy"], "detector.combination to be there with several scores"),
        ("detector", "neighbours", None, "detector.neighbours to be there with that score, and only then; found None"),
        ("stream", "tracker.theta", [1e9], r"state.tracker.theta\[0\] to be at most 700"),
        ("stream", "tracker.theta", [0.0, 0.0], "state.tracker"),
        ("stream", "tracker.squares", [-1.0], "state.tracker.squares"),
        ("stream", "tracker.weight", 1e9, "state.tracker.weight"),
        ("stream", "tracker.means", [[0.0]], "state.tracker.means"),
        ("stream", "tracker.losses", None, "state.tracker.losses"),
        ("terms", "terms.usual.strangeness", [1], "usual"),
        ("terms", "terms.usual.strangeness.0", -1, "usual"),
        ("terms", "terms.usual.shares.floor", [0], "usual"),
        ("stream", "waiting.0.2", [0.0], r"state.waiting\[0\]\[2\]\[0\] to be at least"),
        ("stream", "held", [10**6], "state.held to be at most 4, as there were labels"),
        ("onnx", "model.level", 2.0, "metadata.model.level to be at most 1"),
        ("crowd", "pixels.rate", {"2": 0.4, "4": 0.4}, "crowd.pixels.rate to be a rate of its table"),
        ("crowd", "roi", [], "crowd.roi to be an object"),
        ("crowd", "count", {}, "expected a field crowd.count.rate; it is missing"),
        ("crowd", "count.custom_readout", "mean_of", "crowd.count.custom_readout to be Trained.count_of; found 'm"),
        ("crowd", "recalibration.dof", 1.0, "crowd.recalibration.dof to be at least 2.001"),
    ],
)
def test_a_file_names_the_field(name: str, place: str, value: Any, message: str, tmp_path: Path) -> None:
    file, kind = tmp_path / "file.json", KINDS.get(name)
    path = tuple(int(part) if part.isdigit() else part for part in place.split("."))
    data = changed(golden(name), path, value)
    file.write_text(resealed(kind, data))
    with pytest.raises(FileError, match=message) as raised:
        kind.read(file)
    assert str(raised.value).startswith(f"{file}: ")


def test_infinity_and_nan_are_no_numbers_of_a_file() -> None:
    data, kind = golden("rates"), KINDS["rates"]
    for value in (NAN, INF, -INF):
        with pytest.raises(DataError, match="is no number of JSON"):
            kind.from_json(resealed(kind, changed(data, ("constant", 0), value)))
    with pytest.raises(DataError, match="1e999 is no number of JSON"):
        kind.from_json(resealed(kind, changed(data, ("constant", 0), 12345.5)).replace("12345.5", "1e999"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        plain({"a": NAN})


class TestLoad:
    @pytest.mark.filterwarnings("ignore:conformal intervals keep the scale")
    def test_all_come_back_to_their_models(self, tmp_path: Path) -> None:
        x = rows(20, 9)
        for make in (by_terms, by_rates, classifier):
            uq = make()
            uq.save(tmp_path / "c.json")
            again, expected = latedrop.load(tmp_path / "c.json", uq.model).predict(x), uq.predict(x)
            for name, value in expected.to_dict().items():
                assert torch.equal(again.to_dict()[name], value), name
        detector = classifier().detector(rows(50, 5), ["novelty", "neighbours"])
        detector.save(tmp_path / "d.json")
        assert torch.equal(Detector.load(tmp_path / "d.json", detector.uq)(x).p_value, detector(x).p_value)


def test_calibration_and_prediction_work_without_pydantic(tmp_path: Path) -> None:
    """And so does writing; reading says what is missing."""
    code = """
import sys
sys.modules["pydantic"] = sys.modules["pydantic_core"] = None
import torch, latedrop
net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
x = torch.linspace(-1, 1, 64)[:, None]
uq = latedrop.calibrate(net, (x, x**2), reference=x, progress=False)
uq.predict(x).interval(0.9)
uq.save("c.json")
try:
    latedrop.load("c.json", net)
except latedrop.LatedropError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "expected pydantic to read files; it is not installed" in done.stdout, done.stderr
