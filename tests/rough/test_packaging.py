"""The package as it is installed: what is in it, and that it works with its dependencies alone, and with each extra.

Nothing is downloaded: an environment of its own sees the packages of this one that its requirements lead to, no others.
`install_for_real.py` does it with pip and an index.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
pytest.importorskip("hatchling")

MISSING = {  # what a command says without its extra
    "train --data reviews.csv": "train",
    "predict run --text good": "train",
    "compare --task reviews.csv --seeds 1": "train",
    "generate --model nowhere --prompt a": "train",
    "head extract --model nowhere --text reviews.csv --out head.safetensors": "train",
    "demo": "train",
    "report tests.json": "report",
}
LIGHTNING = """
import torch, lightning.pytorch as pl
from softsieve import ASCrossEntropyLoss, ASSpeed
from softsieve.integrations.lightning import DeltaCallback, SkipCallback, SpeedCallback

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.loss = torch.nn.Linear(4, 4), ASCrossEntropyLoss(return_stats=True)
    def training_step(self, batch, batch_idx):
        index, x, y = batch
        loss, stats = self.loss(self.layer(x), y)
        return {"loss": loss, "solved": stats.solved, "index": index}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

rows = torch.arange(32)
data = torch.utils.data.TensorDataset(rows, torch.eye(4)[rows % 4], rows % 4)
skip = SkipCallback(32)
trainer = pl.Trainer(max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                     enable_model_summary=False, enable_checkpointing=False,
                     callbacks=[DeltaCallback(ratio=0.5), SpeedCallback(ASSpeed(max_steps=2)), skip])
trainer.fit(Module(), torch.utils.data.DataLoader(data, 8, sampler=skip.sampler))
print("fitted", trainer.current_epoch)
"""
RIVALS = """
import torch
from softsieve.losses import make_objective
for name in ("sparsemax", "entmax-1.5"):
    logits = torch.randn(5, 7, requires_grad=True)
    make_objective(name)(logits, torch.arange(5)).loss.backward()
    assert logits.grad.isfinite().all()
import faiss
print("rivals", faiss.IndexFlatIP(4).d)
"""
CORE = """
import doctest, sys
import softsieve, as_sm, softsieve.heads, softsieve.losses, softsieve.training, softsieve.reference
assert "site-packages" in softsieve.__file__, softsieve.__file__
optional = {"accelerate", "datasets", "entmax", "faiss", "lightning", "matplotlib", "PIL", "plotly", "sklearn"}
optional |= {"scipy", "transformers", "triton"}
assert not optional & set(sys.modules)
for name in optional:
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} can be imported")
print("imported", softsieve.__version__)
block = open(sys.argv[1]).read().split("```python\\n")[1].split("```")[0]
test = doctest.DocTestParser().get_doctest(block, {}, "README", "README.md", 0)
print(doctest.DocTestRunner(verbose=False).run(test))
names = [name for module in (softsieve, softsieve.losses, softsieve.training) for name in module.__all__]
for module in ("losses.cross_entropy", "losses.linear", "losses.modules", "losses.multilabel", "losses.schedule",
               "losses.objectives", "training.sampler", "training.speed", "training.infobatch",
               "training.selective", "training.seta"):
    loaded = __import__(f"softsieve.{module}", fromlist=["x"])
    found = doctest.testmod(loaded, extraglobs={"torch": __import__("torch")}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed, module
print("core works")
"""


# -- building ----------------------------------------------------------------------------------------------------------


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The wheel of the tree, the sdist, and the wheel of the sdist."""
    direct, through = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("sdist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    _run([*build, str(direct), "--wheel", str(ROOT)])
    _run([*build, str(through), str(ROOT)])  # the sdist, and the wheel from that
    [wheel], [sdist], [other] = direct.glob("*.whl"), through.glob("*.tar.gz"), through.glob("*.whl")
    return wheel, sdist, other


def _content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_all_of_the_source_and_nothing_else(built: tuple[Path, Path, Path]) -> None:
    found = _content(built[0])
    expected = {
        str(path.relative_to(SOURCE)): path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    own = {name: content for name, content in found.items() if ".dist-info/" not in name}
    assert own.keys() == expected.keys()
    assert own == expected
    assert {"as_sm.py", "softsieve/py.typed", "softsieve/data/digits.csv.gz"} <= own.keys()
    assert {Path(name).suffix for name in own} <= {".py", ".typed", ".gz", ".txt", ".css", ".js", ".j2", ".html"}
    notes = {name.partition(".dist-info/")[2] for name in found if ".dist-info/" in name}
    assert notes == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path, Path]) -> None:
    wheel, sdist, other = built
    assert _content(wheel) == _content(other)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "CHANGELOG.md", "tests/rough/test_packaging.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/", "dist/"))]


# -- environments ------------------------------------------------------------------------------------------------------


def _requirements(wheel: Path, extra: str | None) -> list[Requirement]:
    lines = next(text for name, text in _content(wheel).items() if name.endswith("/METADATA")).decode().splitlines()
    needed = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    return [
        one
        for one in needed
        if one.marker is None or one.marker.evaluate({"extra": ""}) or (extra and one.marker.evaluate({"extra": extra}))
    ]


def _closure(needed: list[Requirement]) -> set[str]:
    """Names of all distributions that these lead to, of those that are here."""
    found: set[tuple[str, str]] = set()
    waiting = [(one.name, extra) for one in needed for extra in ("", *one.extras)]
    while waiting:
        name, extra = waiting.pop()
        if (canonicalize_name(name), extra) in found:
            continue
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # a requirement of another system, or one that nobody needed here
        found.add((canonicalize_name(name), extra))
        for one in map(Requirement, lines):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                waiting += [(one.name, more) for more in ("", *one.extras)]
    return {name for name, _ in found}


def _show(names: set[str], site: Path) -> None:
    """Let the packages of these distributions be found in a folder."""
    for name in names:
        there = distribution(name)
        for top in {file.parts[0] for file in there.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(there.locate_file(top))))


class Environment:
    """A virtual environment with the wheel, its requirements and those of an extra."""

    def __init__(self, folder: Path, wheel: Path, extra: str | None) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        [self.site] = folder.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(self.python)]
        _run([*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel)])
        _show(_closure(_requirements(wheel, extra)), self.site)
        self._reuse_compiled()
        self.folder = folder / "work"
        self.folder.mkdir()
        words = ("good", "bad")
        lines = [f"a {words[i % 2]} film number {i},{words[i % 2]}" for i in range(40)]
        (self.folder / "reviews.csv").write_text("\n".join(["text,label", *lines]) + "\n")
        (self.folder / "tests.json").write_text(
            json.dumps({"suite": "tests", "settings": {}, "provenance": {}, "results": [{"file": "a", "passed": 1}]})
        )

    def _reuse_compiled(self) -> None:
        """What numba has compiled of the same source: it knows a source by its time."""
        for source in (SOURCE / "softsieve" / "kernels").glob("*_numba.py"):
            copy = self.site / "softsieve" / "kernels" / source.name
            shutil.copystat(source, copy)
            (copy.parent / "__pycache__").mkdir(exist_ok=True)
            for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.nb?"):
                shutil.copy2(compiled, copy.parent / "__pycache__")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
        environment |= {"COLUMNS": "200", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        return subprocess.run(
            [str(self.python), *command], cwd=self.folder, capture_output=True, text=True, check=False, env=environment
        )

    def softsieve(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.python.with_name("softsieve")), *arguments)


def environment(tmp_path: Path, built: tuple[Path, Path, Path], extra: str | None) -> Environment:
    return Environment(tmp_path / "environment", built[0], extra)


def _fine(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_extras_everything_of_the_core_works_and_the_rest_says_what_it_needs(
    tmp_path: Path, built: tuple[Path, Path, Path]
) -> None:
    core = environment(tmp_path, built, None)
    said = _fine(core.run("-c", CORE, str(ROOT / "README.md")))
    assert "TestResults(failed=0" in said
    assert "core works" in said
    assert "doctor" in _fine(core.softsieve("--help"))
    for command, extra in MISSING.items():
        done = core.softsieve(*command.split())
        assert done.returncode == 1, command
        [line] = done.stderr.strip().splitlines()  # and no traceback
        assert line.endswith(f"pip install 'softsieve[{extra}]'"), (command, line)
    found = json.loads(_fine(core.softsieve("doctor", "--json")))
    assert found["sound"] is True
    assert {one["name"]: one["state"] for one in found["extras"]} == dict.fromkeys(
        ("train", "lightning", "rivals", "quantised", "report", "export", "serve"), "not here"
    )


def test_with_train_alone_a_classifier_is_trained_and_asked(tmp_path: Path, built: tuple[Path, Path, Path]) -> None:
    made = environment(tmp_path, built, "train")
    assert made.run("-c", "import lightning").returncode == 1
    options = ["--output_dir", "run", "--num_train_epochs", "2", "--skip_solved"]
    _fine(made.softsieve("train", "--data", "reviews.csv", *options))
    assert (made.folder / "run" / "model" / "model.safetensors").is_file()
    assert "good" in _fine(made.softsieve("predict", "run", "--text", "a good film"))


@pytest.mark.parametrize(
    ("extra", "code", "words"), [("lightning", LIGHTNING, "fitted 3"), ("rivals", RIVALS, "rivals 4")]
)
def test_with_an_extra_alone_its_part_works(
    tmp_path: Path, built: tuple[Path, Path, Path], extra: str, code: str, words: str
) -> None:
    pytest.importorskip({"lightning": "lightning", "rivals": "entmax"}[extra])
    made = environment(tmp_path, built, extra)
    assert made.run("-c", "import accelerate").returncode == 1
    assert words in _fine(made.run("-W", "ignore", "-c", code))


def test_with_report_alone_a_page_is_written(tmp_path: Path, built: tuple[Path, Path, Path]) -> None:
    pytest.importorskip("plotly")
    made = environment(tmp_path, built, "report")
    assert made.run("-c", "import sklearn").returncode == 1
    _fine(made.softsieve("report", "tests.json", "--out", "page.html"))
    assert "<html" in (made.folder / "page.html").read_text()


def test_with_docs_alone_the_site_builder_starts(tmp_path: Path, built: tuple[Path, Path, Path]) -> None:
    pytest.importorskip("mkdocs")
    made = environment(tmp_path, built, "docs")
    assert "version" in _fine(made.run("-m", "mkdocs", "--version"))
    _fine(made.run("-c", "import material, mkdocstrings_handlers.python"))
