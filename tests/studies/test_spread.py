"""Units of a study: in order here, as they finish on a cluster of two workers, with the same results."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from latedrop.errors import ArgumentError, DataError
from studies.spread import Cluster, spread


def squared(number: int) -> int:
    return number**2


def refused() -> int:
    raise DataError("expected another number; found this one.")


def killed_once(mark: Path) -> int:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def test_here_one_after_the_other() -> None:
    jobs = {str(n): partial(squared, n) for n in (3, 1, 2)}
    found = spread(jobs, Cluster())
    assert next(found) == ("3", 9)
    assert list(found) == [("1", 1), ("2", 4)]


def test_what_workers_are_asked_for() -> None:
    assert Cluster("auto").resources() == {"num_cpus": 1}
    assert Cluster("auto", 0.5).resources() == {"num_cpus": 1, "num_gpus": 0.5}
    with pytest.raises(ArgumentError, match="--gpus with --ray"):
        Cluster(None, 1)
    for wrong in (-1.0, float("nan"), 100.0):
        with pytest.raises(ArgumentError, match="--gpus from 0 to 64"):
            Cluster("auto", wrong)


def test_units_ask_ray_for_gpus(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what `ray.remote` is told."""
    told: list[dict[str, Any]] = []

    class Remote:
        def remote(self, job: Any) -> Any:
            return job

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "remote", lambda **options: told.append(options) or (lambda run: Remote()))
    monkeypatch.setattr(ray, "wait", lambda waiting, num_returns: (waiting[:1], waiting[1:]))
    monkeypatch.setattr(ray, "get", lambda job: job())
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    assert dict(spread({"a": partial(squared, 5)}, Cluster("auto", 0.25))) == {"a": 25}
    assert told == [{"num_cpus": 1, "num_gpus": 0.25, "max_retries": 3}]
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ArgumentError, match=r"a cluster with 0\.25 GPUs or more for each unit; found 0 in all"):
        dict(spread({"a": partial(squared, 5)}, Cluster("auto", 0.25)))


@pytest.mark.slow
def test_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    jobs = {str(n): partial(squared, n) for n in range(5)}
    assert dict(spread({**jobs, "killed": partial(killed_once, tmp_path / "mark")}, Cluster("local"))) == {
        **{str(n): n**2 for n in range(5)}, "killed": 7,
    }  # fmt: skip
    with pytest.raises(DataError, match="expected another number"):
        list(spread({"a": refused}, Cluster("local")))
    assert cluster.is_initialized()  # whoever began it ends it


@pytest.mark.slow
def test_a_study_on_a_cluster_writes_what_it_writes_here(cluster: Any, tmp_path: Path) -> None:
    import json

    import numpy as np

    from studies.uci.study import Request, run

    table = np.random.default_rng(0).normal(size=(100, 3)).round(3)
    np.savetxt(tmp_path / "own.csv", table, delimiter=",", header="a,b,y", comments="")
    records = []
    for ray in (None, "local"):
        out = tmp_path / str(ray)
        asked = Request(out, csv=tmp_path / "own.csv", target="y", quick=True, splits=1, ray=ray, progress=False)
        (path,) = run(asked)
        assert path.parent == out
        records.append(json.loads(path.read_text()))
        assert records[-1].pop("seconds")["total"] > 0
    assert records[0] == records[1]
