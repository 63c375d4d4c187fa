"""One name for one option, in every command; the help, and files of options."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks.commands import app as benchmarks
from experiments.commands import app as experiments
from softsieve import __version__
from softsieve.cli import app
from softsieve.cli.devices import choose_device
from softsieve.cli.script import NAMES, App

# Words that mean what another option means, and so may name none.
OTHERS = {name.removeprefix("--").replace("-", "_") for name in NAMES} - {"task", "text"}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(get_command(app)))


def help_at(*path: str, columns: int, of: Any = app) -> str:
    result = CliRunner().invoke(of, [*path, "--help"], env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)})
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_every_name_whole(path: tuple[str, ...]) -> None:
    text = help_at(*path, columns=80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for one in COMMANDS[path].params:
        name = one.opts[0].replace("-", "_").replace("__", "--", 1) if one.opts[0].startswith("-") else one.name.upper()
        assert getattr(one, "hidden", False) or re.search(rf"[ │]{re.escape(name)}[ .]", text), name


def test_groups_and_checkout_commands_are_whole_too() -> None:
    for text in (help_at(columns=80), help_at("head", columns=80)):
        assert "…" not in text
    for group in (benchmarks, experiments):
        for path, _ in commands(get_command(group)):
            assert "…" not in help_at(*path, columns=80, of=group), path


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_command_has_another_name_for_an_option(path: tuple[str, ...]) -> None:
    assert not {one.name for one in COMMANDS[path].params} & OTHERS


def test_options_that_commands_share() -> None:
    """What an option is called in one command it is called in all."""
    shared: dict[str, set[tuple[str, ...]]] = {
        "lr": {("train",), ("compare",)},
        "epochs": {("train",), ("compare",), ("demo",)},
        "model": {("train",), ("compare",), ("predict",), ("generate",), ("head", "extract")},
        "data": {("train",), ("compare",), ("predict",)},
        "device": {("train",), ("compare",), ("predict",)},
        "config": {("train",), ("compare",), ("predict",)},
        "max_length": {("train",), ("compare",)},
        "workers": {("train",), ("predict",)},
        "precision": {("train",), ("compare",)},
    }
    for name, those in shared.items():
        assert those <= {path for path, command in COMMANDS.items() if name in {one.name for one in command.params}}


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"softsieve {__version__}\n")


# Other names


def alone(command: Callable[..., None]) -> App:
    app = App()
    app.command()(command)
    return app


def said(*arguments: str) -> dict[str, Any]:
    """What a command with some of every kind of option gets."""
    got: dict[str, Any] = {}

    def command(
        model: str,
        lr: float = 0.1,
        epochs: int = 3,
        out: Path = Path("run"),
        overwrite: bool = False,
        kind: str = "text",
        seed: Annotated[list[int] | None, typer.Option()] = None,
        resume: str | None = None,
        config: Path | None = None,
    ) -> None:
        got.update(locals())
        del got["got"]

    result = CliRunner().invoke(alone(command), arguments)
    if result.exit_code:
        return {"code": result.exit_code, "error": result.stderr}
    return got


def test_every_other_name_is_an_option_of_some_command() -> None:
    known = {name for command in COMMANDS.values() for one in command.params for name in one.opts}
    for name, ones in NAMES.items():
        for one in ones:
            assert one in known, name
    for path, command in COMMANDS.items():
        for name, ones in NAMES.items():
            if set(ones) & {opt for one in command.params for opt in one.opts}:
                assert command.rename(name) in (name, *ones), (path, name)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["m", "--learning_rate", "3", "--num-train-epochs=7"], {"lr": 3.0, "epochs": 7}),
        (["--model_name_or_path", "bert", "--output_dir", "there"], {"model": "bert", "out": Path("there")}),
        (["--model", "m"], {"model": "m"}),
        (["--model=m", "--task", "image"], {"model": "m", "kind": "image"}),
        (["m", "--overwrite_output_dir", "--resume_from_checkpoint"], {"overwrite": True, "resume": "True"}),
        (["m", "--overwrite_output_dir", "False"], {"overwrite": False}),
        (["m", "--no_overwrite_output_dir"], {"overwrite": False}),
        (["m", "--seed", "1", "--seed", "2"], {"seed": [1, 2]}),
    ],
)
def test_other_names(arguments: list[str], expected: dict[str, Any]) -> None:
    got = said(*arguments)
    assert {name: got.get(name) for name in expected} == expected, got


def test_compare_takes_the_names_of_earlier_versions() -> None:
    rename = COMMANDS["compare",].rename
    old = ("--task", "--learning-rate", "--max-length", "--batch-size")
    assert [rename(name) for name in old] == ["--data", "--lr", "--max-length", "--batch-size"]
    assert COMMANDS["head", "extract"].rename("--text") == "--corpus"
    assert COMMANDS["predict",].rename("--text") == "--text"


# Files of options


TOML = pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"learning_rate": 3, "model": "m", "overwrite": true, "seed": [1, 2]}'),
        pytest.param("a.toml", 'lr = 3.0\nmodel = "m"\noverwrite = true\nseed = [1, 2]\n', marks=TOML),
    ],
)
def test_a_file_says_what_the_command_line_does_not(name: str, text: str) -> None:
    Path(name).write_text(text)
    got = said("--config", name)
    assert (got["lr"], got["model"], got["overwrite"], got["seed"], got["epochs"]) == (3.0, "m", True, [1, 2], 3)
    got = said(f"--config={name}", "--learning_rate", "5", "--no-overwrite", "--seed", "9", "--epochs", "2")
    assert (got["lr"], got["model"], got["overwrite"], got["seed"], got["epochs"]) == (5.0, "m", False, [9], 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"rate": 3}', "a.json: rate: expected an option of this command, found none of that name"),
        ("a.json", '{"config": "a.json"}', "a.json: config: expected an option of this command"),
        ("a.json", "[1]", "a.json: expected options by name, found [1]"),
        ("a.json", "{", "a.json: invalid JSON"),
        ("a.json", '{"overwrite": "yes"}', "a.json: overwrite: expected true or false, found 'yes'"),
        ("a.json", '{"epochs": true}', "a.json: epochs: expected a text or a number, found True"),
        ("a.json", '{"epochs": [1]}', "a.json: epochs: expected a text or a number, found [1]"),
        ("a.json", '{"resume": null}', "a.json: resume: expected a text or a number, found None"),
        ("a.yaml", "lr: 3", "a.yaml: expected a file .toml or .json"),
        pytest.param("a.toml", "lr = ", "a.toml: invalid TOML", marks=TOML),
    ],
)
def test_files_that_are_refused(name: str, text: str, message: str) -> None:
    Path(name).write_text(text)
    got = said("m", "--config", name)
    assert got["code"] == 1, got
    assert got["error"].startswith(f"softsieve: {message}")
    assert got["error"].count("\n") == 1


def test_a_missing_file_and_a_value_of_another_type() -> None:
    assert said("m", "--config", "none.json")["error"] == "softsieve: none.json: no such file\n"
    Path("a.json").write_text('{"epochs": 0.5}')
    assert said("m", "--config", "a.json")["code"] == 2


# Devices


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    result = CliRunner().invoke(app, ["train", "--data", "x.csv", "--device", "cuda:9"])
    assert result.exit_code == 1
    assert result.stderr.startswith("softsieve: device: expected one of cpu")
    assert result.stderr.endswith("found 'cuda:9'\n")
    for command in (["predict", "run", "--text", "a"], ["compare", "--data", "x.csv"]):
        result = CliRunner().invoke(app, [*command, "--device", "gpu"])
        assert (result.exit_code, "found 'gpu'" in result.stderr) == (1, True), result.output


def test_a_run_repeats_by_its_options(reviews: Path) -> None:
    first = ["train", "--data", str(reviews), "--learning_rate", "2e-3", "--bf16", "--skip_solved", "--seed", "3"]
    few = ["--max_train_samples", "40", "--max_eval_samples", "6", "--device", "cpu", "--quiet"]
    assert CliRunner().invoke(app, [*first, *few, "--num_train_epochs", "2"]).exit_code == 0
    options = json.loads(Path("softsieve-run/options.json").read_text())
    assert (options["lr"], options["epochs"], options["batch_size"], options["data"]) == (2e-3, 2, 16, str(reviews))
    assert "out" not in options
    result = CliRunner().invoke(app, ["train", "--config", "softsieve-run/options.json", "--out", "again"])
    assert result.exit_code == 0, result.output
    assert "rows: 40 training, 6 validation" in result.stdout
    weights = [Path(run, "model", "model.safetensors").read_bytes() for run in ("softsieve-run", "again")]
    assert weights[0] == weights[1]


def test_fewer_rows_keep_all_classes(reviews: Path) -> None:
    Path("odd.csv").write_text(reviews.read_text() + "an odd one,odd\n")
    options = ["--data", "odd.csv", "--validation_share", "0", "--max_train_samples", "9", "--epochs", "1"]
    result = CliRunner().invoke(app, ["train", *options])
    assert result.exit_code == 0, result.output
    assert "rows: 9 training; 3 classes" in result.stdout
