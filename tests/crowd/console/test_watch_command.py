"""`latedrop crowd watch` says in one line what is wrong with its words."""

from pathlib import Path

import pytest

from latedrop.cli import main

pytest.importorskip("fastapi", reason="the console is an extra")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "either sources to watch or --demo"),
        (["--demo", "0"], "either sources to watch or --demo"),
        (["0"], "--weights"),
        (["nowhere.mp4", "-w", "mall"], "found no file nowhere.mp4"),
        (["--demo", "--sure", "0.3"], "--sure above 0.5"),
        (["--demo", "--level", "2"], "level"),
        (["--demo", "--port", "99999"], "port from 0 to 65535"),
        (["--demo", "--keep", "1"], "at least 5 MB"),
        (["--demo", "--keep", "nan"], "at least 5 MB"),
        (["--demo", "--token", "short"], "8 or more printable"),
        (["--demo", "--token", "schlüssel-der-tür"], "8 or more printable"),
        (["--demo", "--view-token", "short"], "8 or more printable"),
        (["--demo", "--token", "the-same-one", "--view-token", "the-same-one"], "a different token for each role"),
        (["--demo", "--notify", "ftp://x"], "http"),
        (["--demo", "--propose", "0"], "--propose above 0"),
        (["--demo", "--memory", "."], "--memory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["crowd", "watch", *words])
    error = capsys.readouterr().err
    assert ended.value.code in (1, 2)
    assert said in error
    assert "Traceback" not in error
