"""`softsieve generate`: a language model writes, with its own output layer and with an adaptive one."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from softsieve._files import check_writable
from softsieve.cli.errors import one_line
from softsieve.cli.head import DTYPES
from softsieve.cli.progress import bar, error_console
from softsieve.errors import InputError

if TYPE_CHECKING:  # what takes long to import is imported when the command runs
    from rich.console import Console
    from torch import Tensor

    from softsieve.heads import AdaptiveSoftmax
    from softsieve.integrations.generation import Agreement, Choice, Written

_WARM_UP = 4  # tokens that each head answers before those that are timed
TOKENS_HELP = (
    "after every prompt: exactly so many with each head, so that times compare; what is shown stops where the model "
    "ends its text"
)
BOS_HELP = "begin every text with the token for that; if not given: as the tokenizer does"
CALIBRATION_HELP = (
    "a UTF-8 file, may be .gz or .xz, like what will be written; if there is neither this nor an index, the model "
    "writes a text itself, at temperature 1"
)
INDEX_HELP = "the saved index of a calibrated head; if not given, that in the model's folder"
K_HELP = "how many of the largest logits are exact; --top-k or 1, or as the index has it"
_TEXT, _HEAD, _CHOICE, _OTHER = "What to write", "The adaptive head", "How tokens are chosen", "Other"


class Pair(NamedTuple):
    """What the two heads wrote after a prompt."""

    prompt: str
    exact: Written
    adaptive: Written
    agreement: Agreement


def _option(panel: str, help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, **more)


def generate(
    model: Annotated[str, _option(_TEXT, "name or folder of a Hugging Face causal language model")],
    prompt: Annotated[list[str] | None, _option(_TEXT, "what to go on from; several")] = None,
    prompts: Annotated[Path | None, _option(_TEXT, "a UTF-8 file of prompts, one a line")] = None,
    tokens: Annotated[int, _option(_TEXT, TOKENS_HELP, min=1)] = 200,
    bos: Annotated[bool | None, _option(_TEXT, BOS_HELP)] = None,
    calibration: Annotated[Path | None, _option(_HEAD, CALIBRATION_HELP)] = None,
    index: Annotated[Path | None, _option(_HEAD, INDEX_HELP)] = None,
    queries: Annotated[int, _option(_HEAD, "tokens of the text to calibrate with", min=2)] = 4000,
    eps: Annotated[float | None, _option(_HEAD, "relative error of a probability; 0.3, or as the index has it")] = None,
    delta: Annotated[float | None, _option(_HEAD, "chance of a wrong answer; 0.01, or as the index has it")] = None,
    k: Annotated[int | None, _option(_HEAD, K_HELP, min=1)] = None,
    temperature: Annotated[float, _option(_CHOICE, "0: the largest logit, else drawn; 1: as the model says")] = 0.0,
    top_k: Annotated[int | None, _option(_CHOICE, "draw among so many of the largest", min=1)] = None,
    top_p: Annotated[float | None, _option(_CHOICE, "draw among the largest of so much probability together")] = None,
    seed: Annotated[int, _option(_CHOICE, "of everything that is drawn", min=0)] = 0,
    dtype: Annotated[str, _option(_OTHER, f"of the model: {', '.join(DTYPES)}")] = "fp32",
    threads: Annotated[int | None, _option(_OTHER, "of both heads; else as many as torch takes", min=1)] = None,
    save: Annotated[Path | None, _option(_OTHER, "a new folder for the model with the index of its head")] = None,
    out: Annotated[Path | None, _option(_OTHER, "a JSON file for the texts and figures", dir_okay=False)] = None,
) -> None:
    """Let a language model write with its own output layer and with an adaptive one: time, bytes, the same tokens?

    softsieve generate --model FOLDER --prompt "Once upon a time"
    """
    with one_line():
        _check(dtype, eps, delta, temperature, top_k, top_p)
        if calibration is not None and index is not None:
            raise InputError("calibration: expected a text or an index, found both")
        asked = _prompts(prompt or [], prompts)
        _check_places(save, out)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported, which is later
        if not sys.stderr.isatty():
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        import torch

        from softsieve._records import write_record
        from softsieve.integrations import generation, hidden_states
        from softsieve.integrations.adaptive_head import INDEX
        from softsieve.tasks.files import read_text

        _set_threads(threads)
        console = error_console()
        text = None if calibration is None else (str(calibration), read_text(calibration))
        tokenizer = hidden_states.load_tokenizer(model)
        first = hidden_states.first_token(tokenizer, bos=bos)
        with bar(console) as progress:
            progress("loading the model", 0)
            network = generation.load(model, dtype=getattr(torch, DTYPES[dtype]))
        _check_sizes(network, k=k, top_k=top_k)
        starts = [
            (one, generation.prompt_tokens(network, tokenizer, one, tokens=tokens, first=first, place=place))
            for place, one in asked
        ]
        if text is None and index is None and Path(model, INDEX).is_file():
            index = Path(model, INDEX)
        promise: dict[str, Any] = {"eps": eps, "delta": delta, "k": k}
        if index is not None:
            head, source = _from_index(network, index, promise, top_k, console)
        else:
            promise["k"] = max(k or 1, top_k or 1)
            head, source = _calibrated(network, tokenizer, text, queries, first, promise, seed, console)
        if save is not None:
            _save(save, network, tokenizer)
            console.print(f"saved: {save}")
        choice = generation.Choice(temperature, top_k, top_p)
        pairs = _write(network, tokenizer, starts, tokens, choice, seed, console)
        _say(pairs)
        if out is not None:
            name = Path(model).name if Path(model).is_dir() else model
            asked_for = {"dtype": dtype, "tokens": tokens, "calibration": source, "seed": seed, **choice._asdict()}
            write_record(out, "generate", {"model": name, **_facts(head), **asked_for}, _rows(pairs, tokenizer))
            console.print(f"written: {out}")


# What is refused


def _check(
    dtype: str,
    eps: float | None,
    delta: float | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    """Before a model is loaded."""
    from softsieve import _checks

    if dtype not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    for name, value in {"eps": eps, "delta": delta}.items():
        if value is not None:
            _checks.open_unit(name, value)
    if not 0 <= temperature <= 1e30:
        raise InputError(f"temperature: expected a number of at least 0, found {temperature:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p: expected a number above 0, at most 1, found {top_p:g}")
    if temperature == 0 and (top_k is not None or top_p is not None):
        name = "top_k" if top_k is not None else "top_p"
        raise InputError(f"{name}: expected a --temperature above 0 with it, found 0, which takes the largest logit")


def _check_sizes(network: Any, **sizes: int | None) -> None:
    from softsieve import _checks
    from softsieve.integrations.hidden_states import output_layer

    weight: Any = output_layer(network).weight
    for name, value in sizes.items():
        if value is not None:
            _checks.whole_number(name, value, 1, len(weight))


def _prompts(given: Sequence[str], file: Path | None) -> list[tuple[str, str]]:
    """What to call each prompt, and what it says."""
    from softsieve.tasks.files import read_lines

    found = [("prompt", prompt) for prompt in given]
    if file is not None:
        lines = read_lines(file)
        if not lines:
            raise InputError(f"{file}: expected prompts, one a line, found none")
        found += lines
    if not found:
        raise InputError("prompt: expected --prompt TEXT or --prompts FILE, found neither")
    return found


def _check_places(save: Path | None, out: Path | None) -> None:
    if save is not None and (save.is_file() or (save.is_dir() and any(save.iterdir()))):
        raise InputError(f"{save}: expected a new folder, found {'a file' if save.is_file() else 'one with files'}")
    for place in (save, out):
        if place is not None:
            check_writable(place)


# What is done


def _set_threads(threads: int | None) -> None:
    """As many for the adaptive head as for the exact one."""
    from importlib import import_module

    import torch

    numba = import_module("numba")
    if threads is not None:
        torch.set_num_threads(threads)
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def _from_index(
    network: Any, index: Path, promise: dict[str, Any], top_k: int | None, console: Console
) -> tuple[AdaptiveSoftmax, str]:
    """Give the model an adaptive head that was saved."""
    from softsieve.integrations.adaptive_head import accelerate_head

    head = accelerate_head(network, index=index, **promise).head
    most = max(head.calibrations)
    if top_k is not None and top_k > most:
        raise InputError(f"top_k: expected at most {most}, which {index} was calibrated for, found {top_k}")
    console.print(f"index: {index}")
    return head, "a saved index"


def _calibrated(
    network: Any,
    tokenizer: Any,
    text: tuple[str, str] | None,
    queries: int,
    first: int | None,
    promise: dict[str, Any],
    seed: int,
    console: Console,
) -> tuple[AdaptiveSoftmax, str]:
    """Give the model an adaptive head for a text, which has a place, or for what it writes itself."""
    import torch

    from softsieve.integrations import generation
    from softsieve.integrations.adaptive_head import accelerate_head

    source = f"{queries} tokens " + ("that the model wrote itself, at temperature 1" if text is None else "of a text")
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with bar(console) as progress:
            options: dict[str, Any] = {"count": queries, "first": first, "progress": progress}
            if text is None:
                states = generation.own_states(network, tokenizer, generator=generator, **options)
            else:
                states = generation.text_states(network, tokenizer, text[1], place=text[0], **options)
        with bar(console) as progress:
            head = accelerate_head(network, states, **promise, generator=generator, progress=progress).head
    console.print(f"calibrated in {time.perf_counter() - start:.0f} s with {source}")
    for warning in caught:  # such as: too few
        console.print(str(warning.message))
    return head, source


def _save(folder: Path, network: Any, tokenizer: Any) -> None:
    """All or nothing."""
    import transformers

    from softsieve.tasks.hf import no_bar
    from softsieve.training.checkpoint import write_folder

    def fill(part: Path) -> None:
        with no_bar(transformers.utils.logging):
            network.save_pretrained(str(part))
        tokenizer.save_pretrained(str(part))

    write_folder(folder.absolute(), fill)


def _write(
    network: Any,
    tokenizer: Any,
    starts: Sequence[tuple[str, Tensor]],
    tokens: int,
    choice: Choice,
    seed: int,
    console: Console,
) -> list[Pair]:
    """Both heads in turns, prompt after prompt; the text of the adaptive one is shown while it comes."""
    import torch

    from softsieve.heads import DriftWarning
    from softsieve.integrations import generation

    def write(ids: Tensor, count: int, stream: Callable[[int], object] = lambda token: None) -> Written:
        drawn = torch.Generator().manual_seed(seed)  # the same for both heads
        return generation.write(network, ids, tokens=count, choice=choice, generator=drawn, stream=stream)

    def both(prompt: str, ids: Tensor) -> Pair:
        with bar(console) as progress:
            with generation.exact_head(network):
                exact = write(ids, tokens, lambda token: progress("the exact head writes", 0.5 / tokens))
            agreement = generation.agreement(
                network, ids, exact.tokens, stream=lambda token: progress("the adaptive head reads it", 0.5 / tokens)
            )
        transcript = generation.Transcript(tokenizer, ids, generation.end_tokens(network, tokenizer))
        typer.echo(typer.style(prompt, bold=True), nl=False)
        adaptive = write(ids, tokens, lambda token: typer.echo(transcript.add(token), nl=False))
        typer.echo("\n")
        return Pair(prompt, exact, adaptive, agreement)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)  # those states are answered exactly, and counted
        with generation.exact_head(network):
            write(starts[0][1], _WARM_UP)
        write(starts[0][1], _WARM_UP)
        return [both(prompt, ids) for prompt, ids in starts]


# What is said


def _facts(head: AdaptiveSoftmax) -> dict[str, Any]:
    """What a record says of the adaptive head."""
    n, d = head.weight.shape
    return {"n": n, "d": d, "eps": head.eps, "delta": head.delta, "k": max(head.calibrations)}


def _say(pairs: Sequence[Pair]) -> None:
    from rich.console import Console
    from rich.table import Table

    from softsieve.integrations.generation import figures

    exact, adaptive = figures([pair.exact for pair in pairs]), figures([pair.adaptive for pair in pairs])
    agreed, steps = sum(pair.agreement.agreed for pair in pairs), sum(pair.agreement.steps for pair in pairs)
    table = Table()
    for name in ("", "exact head", "adaptive head", "gain"):
        table.add_column(name, justify="right" if name else "left")
    rates, times = (exact.tokens_per_second, adaptive.tokens_per_second), (exact.head_ms, adaptive.head_ms)
    read = exact.bytes_read, adaptive.bytes_read
    table.add_row("tokens/s", *(f"{rate:.1f}" for rate in rates), f"{rates[1] / rates[0]:.2f}x")
    table.add_row("ms a token in the head", *(f"{ms:.2f}" for ms in times), f"{times[0] / times[1]:.1f}x")
    table.add_row("share of time in the head", f"{exact.head_share:.1%}", f"{adaptive.head_share:.1%}", "")
    table.add_row("MB read a token in the head", *(f"{size / 1e6:.2f}" for size in read), f"{read[0] / read[1]:.1f}x")
    table.add_row("tokens answered exactly", *(f"{one.exactly} of {one.tokens}" for one in (exact, adaptive)), "")
    table.add_row("same greedy token as the exact head", "", f"{agreed} of {steps}", "")
    Console(soft_wrap=True, markup=False, highlight=False).print(table)


def _rows(pairs: Sequence[Pair], tokenizer: Any) -> list[dict[str, Any]]:
    """Each prompt with each head, and at the end, without a prompt, all of them together."""
    from softsieve.integrations.generation import figures

    rows: list[dict[str, Any]] = []
    for prompt, some in [*((pair.prompt, [pair]) for pair in pairs), (None, pairs)]:
        for head in ("exact", "adaptive"):
            runs: list[Written] = [getattr(pair, head) for pair in some]
            row = {"prompt": prompt, "head": head, **figures(runs)._asdict()}
            if head == "adaptive":
                row |= {name: sum(getattr(pair.agreement, name) for pair in some) for name in ("agreed", "steps")}
            if prompt is not None:
                row["text"] = tokenizer.decode(runs[0].tokens)
            rows.append(row)
    return rows
