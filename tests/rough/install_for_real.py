"""Install the wheel from an index into an empty environment and use it. Takes minutes; not a part of ``make test``.

    python tests/rough/install_for_real.py FOLDER [EXTRA...]

FOLDER must not be there yet. Without extras it installs the core alone. torch comes first and pinned, as in the
Makefile: asked for as a range, pip may take a newer build with gigabytes of CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
USE = """
import doctest, sys
import torch, softsieve
print("softsieve", softsieve.__version__, "torch", torch.__version__)
block = open(sys.argv[1]).read().split("```python\\n")[1].split("```")[0]
test = doctest.DocTestParser().get_doctest(block, {}, "README", "README.md", 0)
found = doctest.DocTestRunner(verbose=False).run(test)
print("the first example of the README:", found)
sys.exit(found.failed > 0 or not found.attempted)
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Show a command and what it says; end when it fails."""
    print("$", *command, flush=True)  # noqa: T201
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, env=environment)


def main(folder: Path, extras: list[str]) -> None:
    """Build, install and use."""
    folder.mkdir(parents=True)
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / "bin" / "python"
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *constraints, "torch", cwd=folder)
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    [wheel] = folder.glob("softsieve-*.whl")
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    run(python, "-m", "pip", "install", "--quiet", *constraints, wanted, cwd=folder)
    run(python, "-m", "pip", "list", cwd=folder)
    run(python, "-m", "pip", "check", cwd=folder)
    run(python, "-c", USE, ROOT / "README.md", cwd=folder)
    run(python.with_name("softsieve"), "--help", cwd=folder)
    run(python.with_name("softsieve"), "doctor", cwd=folder)
    print("installed and used", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
