"""Make the pictures of the gallery again: `python docs/make_gallery.py [NAME ...]`, from the repository's root.

Every example runs in a folder of its own; its picture goes to docs/images. Examples of libraries that are not installed
are left out, and said.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
STYLE = str(ROOT / "docs" / "matplotlibrc")
NAMED = {"magnet_core_loss": "trained_core_loss", "pitch_of_tones": "trained_pitch"}
"""Pictures of another page than the gallery."""


def main() -> None:
    """Run them, copy what they draw."""
    names = sys.argv[1:] or sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            script = ROOT / "examples" / f"{name}.py"
            done = subprocess.run(
                [sys.executable, script],
                cwd=folder,
                env=os.environ | {"MPLBACKEND": "Agg", "MATPLOTLIBRC": STYLE},
                check=False,
            )
            made = Path(folder, "output", f"{name}.png")
            if done.returncode == 0 and made.is_file():
                shutil.copy(made, IMAGES / f"{NAMED.get(name, f'gallery_{name}')}.png")
            print(f"{name}: {'done' if done.returncode == 0 else 'failed'}", flush=True)


if __name__ == "__main__":
    main()
