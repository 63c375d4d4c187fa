"""The doctor: what it says, that it notices what is broken, and that it survives what crashes."""

from __future__ import annotations

import getpass
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import softsieve
from softsieve import _probes, doctor, reference
from softsieve import _records as record
from softsieve.cli import app
from softsieve.extras import EXTRAS, extra_of, missing

WIDE = {"COLUMNS": "240", "TERM": "dumb"}
SECTIONS = ("Versions", "Devices", "What computes", "Extras", "Numbers")
# A child that does not compute: what it does at a name is said by the body.
CHILD = """
import json, os, signal, sys, time
for name in sys.argv[1:]:
    print("a library prints this")
    print(json.dumps({"begin": name}), flush=True)
    state, detail = "works", "fine"
    BODY
    print(json.dumps({"name": name, "state": state, "detail": detail, "remedy": ""}), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the probes tried by a script with this body."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)

    def use(body: str) -> None:
        script = tmp_path / "child.py"
        script.write_text(CHILD.replace("BODY", body))
        monkeypatch.setattr(doctor, "CHILD", (sys.executable, str(script)))

    return use


def test_all_that_is_installed_here_works_in_seconds_and_nobody_is_named() -> None:
    _probes.cascade("cpu")  # the first time on a machine, kernels are compiled
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", "from softsieve.cli import app; app()", "doctor", "--json"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert found["sound"] is True
    assert list(found) == ["sound", "versions", "machine", "gpus", "backends", "extras", "numbers"]
    assert found["versions"]["torch"] == torch.__version__
    assert {"python", "softsieve", "numba", "accelerate", "lightning", "safetensors"} <= set(found["versions"])
    assert found["machine"]["processors"] == os.cpu_count()
    for section in ("backends", "extras", "numbers"):
        assert all(set(one) == {"name", "state", "detail", "remedy"} for one in found[section])
    states = {one["name"]: one["state"] for section in ("backends", "extras", "numbers") for one in found[section]}
    assert {"works"} == {states[name] for name in ("losses, torch on the CPU", "cascade, numba on the CPU", "train")}
    assert len(found["numbers"]) == len(_probes.NUMBERS) * (1 + torch.cuda.is_available())
    for name in (str(Path.home()), str(Path(sys.prefix)), socket.gethostname(), getpass.getuser()):
        assert name in ("/", "root") or name not in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 40  # some 13 on two cores


def test_with_the_core_alone_it_says_what_the_extras_would_give(tmp_path: Path) -> None:
    """Imports of all else are blocked, in the processes that it starts, too."""
    blocked = {module for extra in EXTRAS.values() for module in extra.packages.values()} | {
        "triton",
        "psutil",
        "huggingface_hub",
    }
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        f"BLOCKED = {blocked}\n"
        "class Core(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] in BLOCKED else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Core\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "from softsieve.cli import app; app()", "doctor"],
        capture_output=True, text=True, check=False, env={**os.environ, **WIDE, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "broken" not in done.stdout
    for name, extra in EXTRAS.items():
        assert extra.gives in done.stdout
        assert f"pip install 'softsieve[{name}]'" in done.stdout
    assert "All that is installed works." in done.stdout


def test_the_table_has_all_sections_and_says_states_in_words(child: Callable[[str], None]) -> None:
    child("if name == 'report': state, detail = 'not here', 'would give reports'")
    result = CliRunner().invoke(app, ["doctor"], env=WIDE)
    assert result.exit_code == 0, result.output
    assert [line.strip() for line in result.output.splitlines() if line.strip() in SECTIONS] == list(SECTIONS)
    assert all(f"│ {name}" in result.output for name in (*_probes.BACKENDS, *EXTRAS, "python", "commit"))
    assert "not here │ would give reports" in result.output


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if name == 'train': state, detail = 'broken', 'ImportError: no such symbol'", "train: ImportError: no such"),
        ("if name == 'train': os.kill(os.getpid(), signal.SIGSEGV)", "train: ended the process with SIGSEGV (status 1"),
        ("if name == 'train': sys.exit('glibc is too old')", "train: ended the process with status 1: glibc is too"),
        ("if name == 'train': sys.stdout.flush(); os._exit(0)", "train: ended the process with status 0"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named_and_the_rest_is_tried_all_the_same(
    child: Callable[[str], None], body: str, words: str
) -> None:
    child(body)
    result = CliRunner().invoke(app, ["doctor"], env=WIDE)
    assert result.exit_code == 1
    assert f"broken: {words}" in result.output
    assert "All that is installed works" not in result.output
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["sound"] is False
    states = [one["state"] for section in ("backends", "extras", "numbers") for one in found[section]]
    assert states.count("broken") == 1
    assert states.count("works") == len(states) - 1


def test_an_illegal_instruction_leads_to_what_must_be_set(child: Callable[[str], None]) -> None:
    child(
        "if name.startswith('bf16') and os.environ.get('ONEDNN_MAX_CPU_ISA') != 'AVX512_CORE_BF16':"
        " os.kill(os.getpid(), signal.SIGILL)"
    )
    result = CliRunner().invoke(app, ["doctor"], env=WIDE)
    assert result.exit_code == 1
    assert (
        "bf16 products on the CPU: ended the process with SIGILL (status 132); with ONEDNN_MAX_CPU_ISA" in result.output
    )
    assert "try: export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, before torch is imported" in result.output


def test_what_crashes_whatever_is_set_stays_broken(child: Callable[[str], None]) -> None:
    child("if name == 'b': os.kill(os.getpid(), signal.SIGILL)")
    found = doctor.tried(["a", "b", "c"])
    assert [one.state for one in found.values()] == ["works", "broken", "works"]
    assert found["b"].remedy == ""


def test_what_hangs_is_ended(child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATIENCE", 0.5)
    child("if name == 'a': time.sleep(30)")
    found = doctor.tried(["a", "b"])
    assert found["a"].detail == "did not end within 0.5 s"
    assert found["b"].state == "works"


def test_messages_of_libraries_lose_folders_and_names(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "my-laptop")
    child(f"detail = '{Path.home()}/secret/x.so of my-laptop, C:\\\\\\\\Users\\\\\\\\me\\\\\\\\y.dll'")
    [found] = doctor.tried(["a"]).values()
    assert found.detail == ".../x.so of ..., .../y.dll"


# -- each check of numbers can fail ------------------------------------------------------------------------------------


def _off(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any, **options: Any) -> Any:
        return function(*args, **options) * 1.2

    return wrong


@pytest.mark.parametrize(
    ("name", "module", "broken"),
    [
        ("cross-entropy against its definition", softsieve, "as_cross_entropy"),
        ("delta = 1 against F.cross_entropy", softsieve, "as_cross_entropy"),
        ("multi-label loss against its definition", softsieve, "as_multilabel_loss"),
        ("linear loss against that of the logits", softsieve, "linear_as_cross_entropy"),
        ("cross-entropy against its definition", reference, "as_cross_entropy"),
    ],
)
def test_a_loss_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, module: Any, broken: str) -> None:
    call = _probes.probes()[f"{name}, cpu"]
    assert _probes.attempt(call)["state"] == "works"
    monkeypatch.setattr(module, broken, _off(getattr(module, broken)))
    found = _probes.attempt(call)
    assert found["state"] == "broken"
    assert "off, expected at most" in found["detail"]


def test_a_head_that_answers_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = softsieve.AdaptiveSoftmax.topk
    monkeypatch.setattr(softsieve.AdaptiveSoftmax, "topk", lambda self, x, **options: true(self, -x, **options))
    found = _probes.attempt(_probes.probes()["adaptive head against exact answers, cpu"])
    assert found["state"] == "broken"
    assert "exact: " in found["detail"]


def test_a_file_that_changes_a_head_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(path: Path) -> softsieve.AdaptiveSoftmax:
        head: softsieve.AdaptiveSoftmax = _probes._head("coordinates", "cpu")[0]
        return head

    monkeypatch.setattr(softsieve.AdaptiveSoftmax, "load", other)
    assert _probes.attempt(_probes.probes()["adaptive head saved and loaded, cpu"])["state"] == "broken"


# -- extras ------------------------------------------------------------------------------------------------------------


def test_the_extras_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {
        name: {re.split(r"[^\w-]", line)[0] for line in lines}
        for name, lines in project["optional-dependencies"].items()
        if name not in ("docs", "dev")  # for work on the package itself
    }
    assert {name: set(extra.packages) for name, extra in EXTRAS.items()} == declared


def test_missing_modules_lead_to_the_extra_that_has_them() -> None:
    assert extra_of("PIL.Image") == "train"
    assert extra_of(None) is None
    assert missing("plotly") == "the package plotly: pip install 'softsieve[report]'"
    assert missing("torch") == "the package torch: pip install torch"


def test_no_commit_is_claimed_by_a_copy_in_somebody_elses_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], cwd=tmp_path, check=True)
    installed = tmp_path / ".venv" / "softsieve" / "_records.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    monkeypatch.delenv("SOFTSIEVE_COMMIT", raising=False)
    monkeypatch.setattr(record, "__file__", str(installed))
    assert record.provenance()["commit"] is None
