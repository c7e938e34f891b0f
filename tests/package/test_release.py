"""Contents of a release: one version everywhere, types for others, files that name only what exists."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import latedrop
import latedrop_crowd

ROOT = Path(__file__).parents[2]

if not (ROOT / "Makefile").is_file():
    pytest.skip("the files of a release are in the repository, not in the package", allow_module_level=True)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version_everywhere() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == latedrop.__version__ == latedrop_crowd.__version__
    assert re.findall(r"^version: (.+)$", read("CITATION.cff"), re.MULTILINE) == [latedrop.__version__]


@pytest.mark.slow
def test_a_typed_program_from_outside(tmp_path: Path) -> None:
    """mypy --strict on a program of a user, beside a package that is installed."""
    pytest.importorskip("mypy")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    (packages / "here.pth").write_text(
        f"{Path(latedrop.__file__).parents[1]}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8"
    )
    program = tmp_path / "program.py"
    program.write_text(read(".ci/smoke.py") + WRONG, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, program.name],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = re.findall(r"^program\.py:\d+: error: .*\[(.+)\]$", done.stdout, re.MULTILINE)
    assert sorted(errors) == ["arg-type", "arg-type", "arg-type", "attr-defined", "call-arg"], done.stdout + done.stderr


WRONG = """

def wrong(model: nn.Module, x: Tensor) -> None:
    latedrop.calibrate(model, (x, x), progress="many")
    latedrop.calibrate(model, (x, x), method=latedrop.Sampling(draws="many"))
    latedrop.calibrate(model, (x, x), batches=latedrop.Batches("many"))
    latedrop.calibrate(model, (x, x), draws=20)
    uq: latedrop.Predictor = latedrop.calibrate(model, (x, x), task="regression")
    uq.predict(x).probabilities
"""


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_skip_that_is_not_listed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skips = script("skips")
    with pytest.raises(SystemExit, match="expected the results of `make test`"):
        skips.main(tmp_path)
    (tmp_path / "test.xml").write_text(
        '<testsuites><testcase><skipped message="needs a CUDA device"/></testcase>'
        '<testcase><skipped message="needs a CUDA device"/></testcase><testcase/></testsuites>',
        encoding="utf-8",
    )
    skips.main(tmp_path)
    assert capsys.readouterr().out == "2 skipped in test.xml\n     2  needs a CUDA device\n"
    whole = """<a><skipped message="collection skipped">('x.py', 3, "Skipped: no 'y'")</skipped></a>"""
    (tmp_path / "slow.xml").write_text(whole, encoding="utf-8")
    with pytest.raises(SystemExit, match="expected only skips"):
        skips.main(tmp_path)
    assert "1  NOT LISTED: no 'y'" in capsys.readouterr().out


def test_data_are_absent_only_where_there_are_none(tmp_path: Path) -> None:
    reasons, listed = Counter({"UCSD is not at ../shared/data/ucsd": 1}), read(".ci/skips.txt")
    assert script("skips").unlisted(reasons, listed, tmp_path) == set(reasons)
    assert script("skips").unlisted(reasons, listed, tmp_path / "none") == set()


def test_a_file_that_a_wheel_leaves_out_is_told(tmp_path: Path) -> None:
    dist = script("dist")
    (tmp_path / "src" / "package" / "page").mkdir(parents=True)
    for name in ("package/code.py", "package/page/index.html"):
        (tmp_path / "src" / name).write_text("", encoding="utf-8")
    for kind in ("whole", "half", "more"):
        with zipfile.ZipFile(tmp_path / f"{kind}.whl", "w") as wheel:
            wheel.writestr("package/code.py", "")
            if kind != "half":
                wheel.writestr("package/page/index.html", "")
            if kind == "more":
                wheel.writestr("studies/study.py", "")
    source = tmp_path / "src"
    dist.check_whole(tmp_path / "whole.whl", source)
    with pytest.raises(AssertionError, match=r"half\.whl lacks package/page/index\.html"):
        dist.check_whole(tmp_path / "half.whl", source)
    with pytest.raises(AssertionError, match=r"more\.whl also has studies"):
        dist.check_whole(tmp_path / "more.whl", source)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("name", [".github/workflows/ci.yml", ".pre-commit-config.yaml", ".ci/run"])
def test_every_make_target_exists(name: str) -> None:
    named = set(re.findall(r"(?:run: |entry: |^)make ([a-z]+)", read(name), re.MULTILINE))
    assert named
    assert named <= make_targets()


def test_the_workflow_runs_everywhere_that_the_package_claims() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["check"]
    versions = re.findall(r"Python :: (3\.\d+)\"", read("pyproject.toml"))
    assert job["strategy"]["matrix"]["python"] == versions
    assert {name.partition("-")[0] for name in job["strategy"]["matrix"]["os"]} == {"ubuntu", "macos", "windows"}
    commands = {step["run"] for step in job["steps"] if "run" in step and "if" not in step}
    own = set(re.findall(r"^make ([a-z]+)", read(".ci/run"), re.MULTILINE)) - {"slow"}
    assert own <= {command.split()[1] for command in commands}


ADVISORY = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
KNOWN = [{"name": "one", "version": "1.0", "vulns": [ADVISORY]}, {"name": "two", "version": "3", "vulns": []}]
UNKNOWN = [{"name": "one", "version": "1.0", "skip_reason": "not found"}]


@pytest.mark.parametrize(
    ("answer", "said", "strict"),
    [
        (KNOWN, "one 1.0: PYSEC-1; fixed in: 2.0", 1),
        (KNOWN[1:], "1 of the pinned versions are known to the index; 0 advisories", 0),
        (UNKNOWN, "0 of the pinned versions are known", 1),
        (None, "not done: no network", 1),
    ],
)
def test_an_audit_breaks_a_build_only_where_it_is_asked_to(
    answer: Any, said: str, strict: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = script("audit")

    def run(words: Any, **_: Any) -> Any:
        if answer is None:
            return subprocess.CompletedProcess(words, 1, "", "no network")
        return subprocess.CompletedProcess(words, 0, json.dumps({"dependencies": answer}), "")

    monkeypatch.setattr(audit.subprocess, "run", run)
    for words, code in (["audit"], 0), (["audit", "--strict"], strict):
        monkeypatch.setattr(sys, "argv", words)
        assert audit.main() == code
        assert said in capsys.readouterr().out


def test_every_extra_is_documented() -> None:
    section = read("pyproject.toml").split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    page = read("docs/install.md")
    assert [extra for extra in sorted(extras) if f"| `{extra}` |" not in page] == []
