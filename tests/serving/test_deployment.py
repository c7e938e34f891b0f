"""The container file of docs/serving.md: it is well formed, and its commands run."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import latedrop

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
CODE = "import sys; from latedrop.cli import main; main(sys.argv[1:])"
TOKEN = "a-token-of-the-tests-1"


def steps() -> list[tuple[str, str]]:
    """Instructions of the container file, and their arguments."""
    block = re.search(r"^```dockerfile\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in block[1].replace("\\\n", "").splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the paths that the container file copies."""
    from safetensors.torch import save_file

    where = tmp_path_factory.mktemp("deployed")
    code = "from torch import nn\n\ndef Net():\n    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))\n"
    (where / "my_model.py").write_text(code)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(80, 3)
    uq = latedrop.calibrate(net, (x, net(x).detach() + 0.1 * torch.randn(80, 1)), progress=False)
    uq.save(where / "cal.json")
    save_file(net.state_dict(), where / "net.safetensors")
    return where


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_the_container_runs_what_it_copies(folder: Path) -> None:
    instructions = dict(steps())
    assert steps()[0][0] == "FROM"
    assert set(instructions) <= {"FROM", "RUN", "USER", "WORKDIR", "COPY", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "CMD"}
    copied = instructions["COPY"].split()[:-1]
    assert all((folder / name).exists() for name in copied)
    command, *words = json.loads(instructions["CMD"])
    assert command == "latedrop"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**os.environ, "LATEDROP_TOKEN": TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *words, "--port", port],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "serving my_model:Net at" in process.stderr.readline()
        _healthy(instructions, port)
        process.send_signal(getattr(signal, instructions["STOPSIGNAL"]))
        assert process.wait(60) in (0, -signal.SIGTERM)  # which systemd and Docker take for an end in order
    finally:
        process.kill()
        process.stderr.close()


def _healthy(instructions: dict[str, str], port: str) -> None:
    """Check that the container's own check passes, once the service is up."""
    _, python, *check = shlex.split(instructions["HEALTHCHECK"])
    assert python == "python"
    checked = [word.replace(f":{instructions['EXPOSE']}/", f":{port}/") for word in check]
    for _ in range(20):
        if subprocess.run([sys.executable, *checked], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.5)
    raise AssertionError("the check fails")
