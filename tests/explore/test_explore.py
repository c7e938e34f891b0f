"""What `latedrop explore` serves: the same numbers as `judge` and `explain`, at every level, to this machine alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="the page is an extra")
pytest.importorskip("uvicorn", reason="the page is an extra")
testclient = pytest.importorskip("fastapi.testclient", reason="httpx asks")

import worn  # noqa: E402
from latedrop.cli import main  # noqa: E402
from latedrop.cli.exploring import explore_line  # noqa: E402
from latedrop.explore.server import make_app  # noqa: E402
from latedrop.prediction.predictor import Predictor  # noqa: E402
from rounding import assert_same_up_to_rounding, rounding  # noqa: E402

NETS = """
from torch import nn

def maps():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))

def classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
"""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, Path, Any]:
    """The predictor, its folder, and what the command would serve."""
    import latedrop.explore.server as server

    folder = tmp_path_factory.mktemp("worn")
    uq = worn.write(folder, outputs=2)
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(server, "serve", lambda explored, port, say: found.append(explored))
        with pytest.raises(SystemExit) as stop:
            main(worn.words(folder, outputs=2))
    assert not stop.value.code
    return uq, folder, found[0]


@pytest.fixture
def ask(known: tuple[Predictor, Path, Any]) -> Callable[[str], Any]:
    client = testclient.TestClient(make_app(known[2]), base_url="http://127.0.0.1:1", client=("127.0.0.1", 5))
    found: Callable[[str], Any] = client.get
    return found


def rows(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.from_numpy(np.loadtxt(folder / "test.csv", delimiter=",", skiprows=1, dtype=np.float32))
    return table[:, :4], table[:, 4:]


@pytest.mark.parametrize("level", [0.5, 0.93])
def test_intervals_of_any_level(known: tuple[Predictor, Path, Any], ask: Callable[[str], Any], level: float) -> None:
    x, y = rows(known[1])
    low, high = known[0].predict(x).interval(level)
    found = ask(f"/api/outputs/1?level={level}").json()
    assert_same_up_to_rounding(found["low"], low[:, 1])
    assert_same_up_to_rounding(found["high"], high[:, 1])
    held = ((low <= y) & (y <= high))[:, 1].double().mean()
    assert found["coverage"] == pytest.approx(float(held))
    slices = {one["name"]: one["groups"] for one in found["slices"]}
    assert set(slices) == {"std", "prediction", "strangeness", *worn.NAMES}
    for groups in slices.values():
        assert sum(g["rows"] * g["coverage"] for g in groups) == pytest.approx(len(x) * float(held))


def test_a_row_is_explained(known: tuple[Predictor, Path, Any], ask: Callable[[str], Any]) -> None:
    x, _ = rows(known[1])
    found = ask("/api/outputs/1/rows/277").json()
    assert found["place"] == 279  # lines begin with 1, and the first has the names
    assert found["inputs"] == pytest.approx(dict(zip(worn.NAMES, x[277].tolist(), strict=True)), rel=rounding())
    assert found["shares"] == pytest.approx(known[0].explain(x[277:278], output=1).sites, abs=rounding())
    worst = ask("/api/outputs/1?level=0.9").json()["worst"][0]
    prediction = known[0].predict(x[worst["row"] : worst["row"] + 1])
    assert worst["mean"] == pytest.approx(float(prediction.mean[0, 1]), rel=rounding())


def test_what_is_not_there_is_refused_in_words(ask: Callable[[str], Any]) -> None:
    for path in ("outputs/2?level=0.9", "outputs/0?level=1", "outputs/0?level=nan", "outputs/0/rows/300",
                 "outputs/0/rows/-1", "outputs/x"):  # fmt: skip
        answer = ask(f"/api/{path}")
        assert answer.status_code in (400, 422)
        assert answer.json()["error"].startswith("expected")
    assert ask("/page/..%2frows.py").status_code == 404


def test_a_level_that_conformal_rows_cannot_give(known: tuple[Predictor, Path, Any]) -> None:
    from dataclasses import replace

    uq, folder, explored = known
    x, y = rows(folder)
    few = uq.conformal((x[:30], y[:30]))
    app = make_app(replace(explored, predictor=few, prediction=few.predict(x).cpu()))
    client = testclient.TestClient(app, base_url="http://127.0.0.1:1", client=("127.0.0.1", 5))
    assert client.get("/api/outputs/0?level=0.9").status_code == 200
    answer = client.get("/api/outputs/0?level=0.99")
    assert answer.status_code == 400
    assert "at least 99 conformal rows" in answer.json()["error"]


def test_only_this_machine_is_answered(known: tuple[Predictor, Path, Any]) -> None:
    app = make_app(known[2])
    assert testclient.TestClient(app, base_url="http://127.0.0.1:1").get("/").status_code == 403
    local = testclient.TestClient(app, base_url="http://rows.example", client=("127.0.0.1", 5))
    foreign = local.get("/api/about")
    assert foreign.status_code == 403
    assert "found one to 'rows.example'" in foreign.json()["error"]
    assert "token" not in foreign.json()["error"]
    mine = testclient.TestClient(app, base_url="http://127.0.0.1:1", client=("127.0.0.1", 5))
    assert mine.get("/", headers={"Host": "[::1"}).status_code == 403
    assert mine.get("/", headers={"Origin": "http://["}).status_code == 403
    answer = mine.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    head = mine.head("/")
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(answer.content)))


def test_the_report_names_the_command(known: tuple[Predictor, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder, _ = known
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        main([*worn.words(folder, "evaluate", 2), "--report", "a page.html", "--json"])
    page = (folder / "a page.html").read_text()
    (line,) = [part.partition("</code>")[0] for part in page.split("<code>") if part.startswith("latedrop explore")]
    assert line == " ".join(["latedrop", *worn.words(folder, "explore", 2)])


@pytest.mark.parametrize(
    ("typed", "data", "line"),
    [
        ("latedrop evaluate m:n c.json --data t.csv", "t.csv", "latedrop explore m:n c.json --data t.csv"),
        ("latedrop evaluate m:n --report=x.html c.json --plot p.png --data t.csv --json --drop-nan", "t.csv",
         "latedrop explore m:n c.json --data t.csv --drop-nan"),
        ("latedrop evaluate m:n 'a b.json' --require 'gain>=0' --data t.csv", "t.csv",
         "latedrop explore m:n 'a b.json' --data t.csv"),
        ("latedrop evaluate m:n c.json --data -", "-", ""),
        ("", "t.csv", ""),
    ],
    ids=["plain", "with others", "quoted", "stdin", "from Python"],
)  # fmt: skip
def test_the_command_of_the_same_rows(typed: str, data: str, line: str) -> None:
    assert explore_line(typed, data) == line


def test_maps_and_classes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    import latedrop

    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(200, 1, 6, 6)
        nets: dict[str, Any] = {}
        exec(NETS, nets)
        folded, flat = nets["maps"](), nets["classes"]()
        y = folded(x).detach() + 0.1 * torch.randn(200, 1, 6, 6)
        labels = (flat(x).detach() + 0.5 * torch.randn(200, 3)).argmax(1)
        latedrop.calibrate(folded, (x, y), progress=False).save("maps.json")
        latedrop.calibrate(flat, (x, labels), progress=False).save("classes.json")
    (tmp_path / "nets.py").write_text(NETS)
    torch.save(folded.state_dict(), "maps.pt")
    torch.save(flat.state_dict(), "classes.pt")
    np.savez("maps.npz", x=x.numpy(), y=y.numpy())
    np.savez("classes.npz", x=x.numpy(), y=labels.numpy())
    for name, said in (("maps", "expected one number, or some, for each row"), ("classes", "found one of classes")):
        with pytest.raises(SystemExit) as stop:
            main(["explore", f"nets:{name}", f"{name}.json", "--weights", f"{name}.pt", "--data", f"{name}.npz"])
        assert stop.value.code == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
