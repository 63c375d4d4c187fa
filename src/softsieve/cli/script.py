"""What is the same in all commands: one name for one option, the names that scripts use for it, files of options.

``--learning_rate``, ``--learning-rate`` and ``--lr`` are one option in every command that has it. `NAMES` has the other
names: those of Hugging Face's scripts, of the published AS-Softmax code, and of earlier versions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from softsieve.cli.errors import one_line
from softsieve.cli.help import print_help
from softsieve.errors import InputError, shown
from softsieve.tasks.files import parse_json, read_text

Command = TypeVar("Command", bound=Callable[..., Any])
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
CONFIG = "--config"
LENGTH_HELP = "words or tokens of a text that the model reads; 512, with an encoder 128"
CONFIG_HELP = "a file .toml or .json of options by their names; what is said on the command line wins"
NAMES = {  # another name -> the one name, the first that the command has
    "--learning-rate": ("--lr",),
    "--num-train-epochs": ("--epochs",),
    "--per-device-train-batch-size": ("--batch-size",),
    "--per-device-eval-batch-size": ("--eval-batch-size",),
    "--model-name-or-path": ("--model",),
    "--output-dir": ("--out",),
    "--overwrite-output-dir": ("--overwrite",),
    "--resume-from-checkpoint": ("--resume",),
    "--max-seq-length": ("--max-length",),
    "--dataloader-num-workers": ("--workers",),
    "--evaluation-strategy": ("--eval-strategy",),
    "--metric-for-best-model": ("--metric",),
    "--early-stopping-patience": ("--patience",),
    "--min-as-delta": ("--delta",),
    "--task": ("--kind", "--data"),
    "--text": ("--corpus",),
}


class ScriptCommand(TyperCommand):
    """Takes underscores for dashes, other names of options, flags followed by True or False, and a file of options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """With what scripts write put into what Typer reads."""
        flags = {name for p in self.params if getattr(p, "is_flag", False) for name in p.opts}
        with one_line():
            plain = list(plain_arguments(args, flags, self.rename))
            return super().parse_args(ctx, [*self._from_config(ctx, plain, flags), *plain])

    def rename(self, name: str) -> str:
        """The one name of an option of this command, "" for an argument that stands for itself."""
        options = {name for p in self.params for name in p.opts}
        arguments = {f"--{name}" for name in options if not name.startswith("-")}
        if name in options:
            return name
        one = next((one for one in NAMES.get(name, ()) if one in options | arguments), name)
        return "" if one in arguments else one

    def _from_config(self, ctx: Any, plain: Sequence[str], flags: set[str]) -> list[str]:
        """Arguments that the file says and the command line does not."""
        place = next((after for name, after in pairwise(plain) if name == CONFIG), None)
        place = next((one.partition("=")[2] for one in plain if one.startswith(f"{CONFIG}=")), place)
        options = {name: p for p in self.params for name in p.opts if name.lstrip("-") not in ("config", "help")}
        if place is None or CONFIG not in {name for p in self.params for name in p.opts}:
            return []
        given = {one.partition("=")[0].replace("--no-", "--") for one in plain}
        said = self.make_parser(ctx).parse_args(list(plain))[0]
        given |= {p.name for p in self.params if p.param_type_name == "argument" and said.get(p.name)}
        arguments: list[str] = []
        for key, value in read_config(Path(place)).items():
            name = self.rename("--" + key.replace("_", "-")) or key
            if name not in options:
                raise InputError(f"{place}: {key}: expected an option of this command, found none of that name")
            if name not in given:
                several = getattr(options[name], "multiple", False)
                arguments += _arguments(f"{place}: {key}", name, value, flag=name in flags, several=several)
        return arguments

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Names whole, however narrow the terminal."""
        print_help(self, ctx)


class App(typer.Typer):
    """A group of commands, each a `ScriptCommand`."""

    def command(self, *names: Any, **options: Any) -> Callable[[Command], Command]:
        """As of Typer."""
        return super().command(*names, **{"cls": ScriptCommand, **options})


def plain_arguments(args: Sequence[str], flags: Iterable[str], rename: Callable[[str], str] = str) -> Iterator[str]:
    """Arguments with dashes for underscores in names, flags without values, and other options with them.

    ``rename`` gives an option its one name.

    Example:
        >>> args = ["--fp16", "False", "--do_eval", "--save_steps=9", "--resume", "--do_train", "True"]
        >>> list(plain_arguments(args, {"--fp16", "--do-eval", "--do-train"}))
        ['--no-fp16', '--do-eval', '--save-steps=9', '--resume', 'True', '--do-train']
    """
    rest, flags = list(args), set(flags)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("--") and len(name) > 2:
            name = name.replace("_", "-")
            name = f"--no-{rename('--' + name[5:])[2:]}" if name.startswith("--no-") else rename(name)
            if not name:  # an argument
                if equals:
                    yield value
                continue
        if name in flags and not equals and rest and rest[0].lower() in TRUTH:
            equals, value = "=", rest.pop(0)
        if name in flags and value.lower() in TRUTH:
            yield name if TRUTH[value.lower()] else f"--no-{name[2:]}"
            continue
        yield name + equals + value
        if name == "--resume" and not equals and (not rest or rest[0].startswith("-")):
            yield "True"


def read_config(path: Path) -> dict[str, Any]:
    """What a file of options says, by name.

    Raises:
        InputError: when it cannot be read, or is no table of names.
    """
    if path.suffix not in (".toml", ".json"):
        raise InputError(f"{path}: expected a file .toml or .json")
    text = read_text(path)
    options = parse_json(text, path) if path.suffix == ".json" else _parse_toml(text, path)
    if not isinstance(options, dict):
        raise InputError(f"{path}: expected options by name, found {shown(options)}")
    return options


def _parse_toml(text: str, path: Path) -> Any:
    if sys.version_info < (3, 11):
        raise InputError(f"{path}: expected a file .json: Python before 3.11 reads no .toml")
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: invalid TOML ({error})") from None


def _arguments(place: str, name: str, value: Any, *, flag: bool, several: bool) -> list[str]:
    """An option of a file as it would be written on the command line."""
    if flag:
        if not isinstance(value, bool):
            raise InputError(f"{place}: expected true or false, found {shown(value)}")
        return [name if value else f"--no-{name[2:]}"]
    values = value if several and isinstance(value, list) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise InputError(f"{place}: expected a text or a number, found {shown(one)}")
    return [f"{name}={one}" if name.startswith("--") else str(one) for one in values]
