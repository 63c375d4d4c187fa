"""Every code block on the site runs: Python as it stands, commands on small files of the same names.

What cannot be run here is in a list below, with the reason, and is at least read as the command line reads it.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import commands as benchmarks
from experiments import commands as experiments
from softsieve.cli import app
from softsieve.heads.cascade import crossover
from softsieve.integrations.vllm.settings import read_settings
from tests.docs.site_blocks import ROOT, Block, blocks_of, commands_in, mentioned, pages, split
from tests.docs.stand_ins import names_of

PAGES = pages()
LANGUAGES = ("python", "console", "text")  # text: formulas and output, which say nothing that could run
RECORDS = "results/"  # its pages are written by `softsieve compare`, with their command in a block without a language

# Commands that are read by the command line but not run, by page, with the reason.
ONLY_READ = {
    "cli.md": "examples of the help texts; the guides have the same commands, and these run",
    "guides/vllm.md": "vLLM and a model to serve; tests/integrations/test_vllm_engine.py runs the same",
    "results/clinc150-minilm.md": "a record: a GPU, a pretrained encoder, CLINC150",
    "results/clinc150-mpnet.md": "a record: a GPU, a pretrained encoder, CLINC150",
    "results/clinc150-mpnet-today.md": "a record: a GPU, a pretrained encoder, CLINC150",
    "results/conll2003-mpnet.md": "a record: a GPU, a pretrained encoder, CoNLL-2003",
    "results/reuters-mpnet.md": "a record: a GPU, a pretrained encoder, Reuters",
    "results/conll2003-minilm.md": "a record: a GPU, a pretrained encoder, CoNLL-2003",
    "results/eurlex57k.md": "a record: hours, EURLEX57K",
    "results/eurlex57k-5seeds.md": "a record: hours, EURLEX57K",
    "results/eurlex57k-minilm.md": "a record: a GPU, a pretrained encoder, EURLEX57K",
    "results/eurosat.md": "a record: hours, EuroSAT",
    "results/fsdd.md": "a record: hours, the spoken digits",
    "results/multilabel.md": "a record: hours, Reuters and GoEmotions",
    "results/sighan15.md": "a record: hours, SIGHAN 2015",
    "results/skipping.md": "a record: hours, four data sets",
    "results/skipping-cifar10.md": "a record: half an hour, CIFAR-10",
    "results/skipping-eurosat.md": "a record: minutes, EuroSAT",
    "results/skipping-more.md": "a record: three data sets",
    "results/skipping-times.md": "a record: three data sets",
    "results/skipping-times-more.md": "a record: three data sets",
    "results/sst5-minilm.md": "a record: a GPU, a pretrained encoder, SST-5",
    "results/sst5-mpnet.md": "a record: a GPU, a pretrained encoder, SST-5",
}
# What is added to commands so that they take a second: the same commands, with less to do.
SMALLER = {
    "softsieve train": "--epochs 2 --save_steps 2 --quiet",
    "softsieve compare": "--epochs 2 --seeds 1",
    "python -m benchmarks linear": '--rival "torch eager"',
    "softsieve generate": "--tokens 6 --queries 300 --delta 0.1",
    "softsieve serve": "--port 0",
    "softsieve head bench": "--calibration 300 --test-queries 10 --delta 0.1",
    "python -m experiments next-item": "--epochs 1 --seeds 1 --size 8 --layers 1",
    "python -m experiments perplexity": "--calibration 400 --tokens 40 --delta 0.1",
}
PROGRAM = "softsieve"
APPS = {PROGRAM: app, "python -m benchmarks": benchmarks.app, "python -m experiments": experiments.app}
RENAMED = {"FOLDER": "SmolLM2-135M"}  # what stands for a name of the reader's


def with_blocks(*languages: str) -> list[str]:
    return [page for page in PAGES if any(block.language in languages for block in blocks_of(page))]


# -- what is there -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_languages_are_known(page: str) -> None:
    for block in blocks_of(page):
        allowed = (*LANGUAGES, "") if page.startswith(RECORDS) else LANGUAGES
        assert block.language in allowed, f"{page}:{block.line}: a block of language {block.language!r}"
        if block.language == "console":
            assert commands_in(block), f"{page}:{block.line}: no command in it"


def test_blocks_are_found_wherever_they_stand() -> None:
    first, second = "```python\nx = 1\n\ny = 2\n```", "    ```console\n    $ make \\\n      demo\n    out\n    ```"
    found, rest = split(f"a\n{first}\n!!! note\n{second}\n`b`\n")
    assert found == [
        Block("", 3, "python", "x = 1\n\ny = 2\n"),
        Block("", 9, "console", "$ make \\\n  demo\nout\n"),
    ]
    assert commands_in(found[1]) == ["make    demo"]
    assert rest == "a\n!!! note\n`b`"
    with pytest.raises(ValueError, match="does not end"):
        split("```python\nx\n")


def test_lists_name_pages_and_commands_that_are_there() -> None:
    assert set(ONLY_READ) <= set(PAGES)
    written = [command for page in PAGES for command in shell_commands(page)]
    for start in SMALLER:
        assert any(command.startswith(start) for command in written), start


# -- Python ------------------------------------------------------------------------------------------------------------


class Runner(doctest.DocTestRunner):
    """Stops at the first example that does not give what it says."""

    def report_failure(self, out: Any, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        place = f"{test.filename}:{(test.lineno or 0) + example.lineno + 1}"
        raise AssertionError(f"{place}: {example.source}expected {example.want}found {got}")

    def report_unexpected_exception(
        self, out: Any, test: doctest.DocTest, example: doctest.Example, exc_info: Any
    ) -> None:
        raise AssertionError(f"{test.filename}: {example.source}") from exc_info[1]


def run_python(block: Block, names: dict[str, Any]) -> None:
    if ">>> " not in block.code:
        lines = "\n" * (block.line - 1)  # so that errors name the line of the page
        exec(compile(lines + block.code, block.page, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.code, names, block.page, block.page, block.line - 1)
    Runner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False).run(test, clear_globs=False)
    names.update(test.globs)


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python(page: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 64)  # a matter of the machine
    if any("lightning" in block.code for block in blocks_of(page)):
        pytest.importorskip("lightning")
    if page == "linear.md":
        dist.init_process_group("gloo")
    names = {"__name__": "page", **names_of(page)}
    for block in blocks_of(page):
        if block.language == "python":
            run_python(block, names)


def test_the_page_of_several_processes_on_two(tmp_path: Path) -> None:
    """As the test above runs it, it has one process, with which little can go wrong."""
    blocks = [block.code for block in blocks_of("guides/distributed.md") if block.language == "python"]
    script = tmp_path / "page.py"
    script.write_text("\n".join([*blocks, "import pathlib", 'pathlib.Path(f"done{rank}of{ranks}").touch()']))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    settings = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    environment = {**os.environ, **settings, **threads, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("done*")} == {"done0of2", "done1of2"}
    assert {path.name for path in (tmp_path / "sharded").iterdir()} == {
        f"rank-{rank}-of-2.safetensors" for rank in (0, 1)
    }


@pytest.mark.parametrize(
    ("code", "fails"),
    [(">>> 1 + 1\n2\n", False), (">>> 1 + 1\n3\n", True), (">>> 1 / 0\n0\n", True), ("assert 1 == 1\n", False)],
)
def test_blocks_can_fail(code: str, fails: bool) -> None:
    block = Block("page.md", 5, "python", code)
    if fails:
        with pytest.raises(AssertionError, match=r"page\.md"):
            run_python(block, {})
    else:
        run_python(block, {})
    with pytest.raises(NameError):
        run_python(block._replace(code="missing\n"), {})


def test_names_go_from_block_to_block() -> None:
    names: dict[str, Any] = {}
    for code in (">>> a = 1\n", "b = a + 1\n", ">>> b\n2\n"):
        run_python(Block("page.md", 1, "python", code), names)


# -- commands ----------------------------------------------------------------------------------------------------------


def shell_commands(page: str) -> list[str]:
    """The commands of a page, in order."""
    found = (block for block in blocks_of(page) if block.language in ("console", ""))
    return [command for block in found for command in commands_in(block)]


def read(words: Sequence[str], program: str = PROGRAM) -> None:
    """Parse a command of ours, names and values of options included.

    Raises:
        Exception: as the command line does, for what it would refuse.
    """
    command, rest = get_command(APPS[program]), list(words)
    while hasattr(command, "commands"):
        assert rest, f"{' '.join(words)}: a command is missing"
        name = rest.pop(0)
        assert name in command.commands, f"{' '.join(words)}: no command {name!r}"
        command = command.commands[name]
    command.make_context(words[-1], rest)


def program_of(words: list[str]) -> list[str]:
    """The words of a command with the name of its program, which may be three of them, as the first.

    >>> program_of(["python", "-m", "benchmarks", "losses"]), program_of(["softsieve", "demo"])
    (['python -m benchmarks', 'losses'], ['softsieve', 'demo'])
    """
    three = " ".join(words[:3])
    return [three, *words[3:]] if three in APPS else words


def run(page: str, command: str) -> None:
    """Run a command, or see that it could be."""
    command = " ".join(command.split("  #", maxsplit=1)[0].split())
    program, *words = program_of([RENAMED.get(word, word) for word in shlex.split(command)])
    if program in APPS:
        read(words, program)
        if page not in ONLY_READ:
            more = next((more for start, more in SMALLER.items() if command.startswith(start)), "")
            if words[0] == "serve":
                start_server([*words, *shlex.split(more)])
                return
            done = CliRunner().invoke(APPS[program], [*words, *shlex.split(more)])
            assert done.exit_code == 0, f"{command}: {done.output} {done.exception!r}"
    elif program in OTHERS:
        OTHERS[program](words)
    else:
        raise AssertionError(f"{page}: {command}: nothing is known of {program!r}")


SERVERS: dict[str, subprocess.Popen[str]] = {}  # by address, those of the page under test


def start_server(words: list[str]) -> None:
    """A process that goes on serving while the next commands of the page run."""
    command = [sys.executable, "-u", "-c", "from softsieve.cli import app; app()", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline() if process.stdout is not None else ""
    address = re.search(r"http://[\d.]+:\d+", line)
    SERVERS[address[0] if address else line] = process
    assert address, line


@pytest.fixture(autouse=True)
def _no_servers() -> Iterator[None]:
    yield
    with ExitStack() as stack:
        for process in SERVERS.values():
            stack.enter_context(process)
            process.terminate()
    SERVERS.clear()


def ask_server(words: list[str]) -> None:
    """What `curl` would ask of the server that the page has started, by the address it really has."""
    url, *options = words
    place, _, path = url.removeprefix("http://").partition("/")
    assert place == "127.0.0.1:8000"
    assert SERVERS, "no server was started"
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given.keys() <= {"-H", "-d"}
    headers = dict([given["-H"].split(": ", 1)]) if "-H" in given else {}
    body = given["-d"].encode() if "-d" in given else None
    request = urllib.request.Request(f"{next(iter(SERVERS))}/{path}", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200


def read_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in words:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"make: no target {target!r}"


def read_pip(words: list[str]) -> None:
    assert words[0] == "install"
    _, _, after = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    extras = re.findall(r"^(\w+) = \[", after.partition("\n[")[0], re.MULTILINE)
    for what in words[1:]:
        place, _, names = what.rstrip("]").partition("[")
        assert place in (".", "softsieve"), f"pip: {what}"
        assert set(names.split(",")) - {""} <= set(extras), f"pip: {what}"


def read_python(words: list[str]) -> None:
    assert words[:2] == ["-m", "pytest"]
    assert all((ROOT / path).exists() for path in words[2:])


def read_mkdocs(words: list[str]) -> None:
    assert words == ["build", "--strict"]  # which another test does
    assert (ROOT / "mkdocs.yml").exists()


def read_torchrun(words: list[str]) -> None:
    """Its processes are started by tests of the training loop; here it is about the command line."""
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words)
    assert (given.training_script, given.no_python) == ("softsieve", True)
    read(given.training_script_args)


def read_accelerate(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    given = launch_command_parser().parse_args(words[1:])
    assert (given.training_script, given.no_python) == ("softsieve", True)
    read(given.training_script_args)


def read_vllm(words: list[str]) -> None:
    """It is in an environment of its own (`make test-vllm`); here it is about what the plug-in is told."""
    command, _, *options = words
    assert command == "serve"
    for name, value in zip(options[::2], options[1::2], strict=True):
        assert name in ("--additional-config", "--tensor-parallel-size"), name
        if name == "--additional-config":
            read_settings(json.loads(value), {})


OTHERS = {
    "curl": ask_server,
    "make": read_make,
    "pip": read_pip,
    "python": read_python,
    "mkdocs": read_mkdocs,
    "torchrun": read_torchrun,
    "vllm": read_vllm,
    "accelerate": read_accelerate,
}


@pytest.mark.parametrize("page", [page for page in PAGES if shell_commands(page)])
def test_commands(page: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 64)
    for command in shell_commands(page):
        run(page, command)


@pytest.mark.parametrize(
    "command",
    [
        "softsieve trian --data reviews.csv",
        "softsieve train --dtaa reviews.csv",
        "softsieve train --seed one",
        "softsieve head",
        "softsieve predict no-such-run --text hello",
        "make coffee",
        "pip install '.[coffee]'",
        "pip install coffee",
        "python -m pytest tests/coffee",
        "torchrun --nproc-per-node 2 --no-python softsieve train --dtaa reviews.csv",
        "accelerate launch --no_python softsieve train --dtaa reviews.csv",
        "accelerate launch --coffee softsieve train",
        "curl example.org",
    ],
)
def test_commands_can_fail(command: str, desk: Path) -> None:
    with pytest.raises((Exception, SystemExit)):
        run("page.md", command)


def alternatives(command: str) -> list[list[str]]:
    """A command as its program and the words after that; `a|b` is two.

    >>> alternatives("softsieve head build|query")
    [['softsieve', 'head', 'build'], ['softsieve', 'head', 'query']]
    """
    program, *rest = program_of(shlex.split(command))
    found: list[list[str]] = [[program]]
    for word in rest:
        found = [[*words, one] for words in found for one in word.split("|")]
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if mentioned(page)])
def test_commands_in_sentences_exist_with_their_options(page: str) -> None:
    for command in mentioned(page):
        for words in alternatives(command):
            if "COMMAND" not in words:
                check_mention(words)


def check_mention(words: list[str]) -> None:
    """A command that may lack what it takes, and stop at a group; what is there must be right."""
    command, rest = get_command(APPS[words[0]]), words[1:]
    while hasattr(command, "commands") and rest:
        assert rest[0] in command.commands, f"{' '.join(words)}: no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    if not hasattr(command, "commands"):
        try:
            command.make_context(words[0], rest)
        except Exception as error:
            if type(error).__name__ != "MissingParameter":
                raise


@pytest.mark.parametrize("command", ["softsieve haed build", "python -m benchmarks losses --shapes 2x2"])
def test_mentions_can_fail(command: str) -> None:
    with pytest.raises(Exception, match=r"haed|shapes"):
        check_mention(program_of(shlex.split(command)))
