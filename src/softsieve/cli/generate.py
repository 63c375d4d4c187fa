"""`softsieve generate`: a language model writes, with its own output layer and with an adaptive one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor

from softsieve import _checks
from softsieve._files import check_writable
from softsieve._records import write_record
from softsieve.cli.errors import one_line
from softsieve.cli.head import DTYPES
from softsieve.cli.head_bench import set_threads
from softsieve.cli.progress import bar, error_console, plain_console, quiet_hugging_face, table
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax, DriftWarning, QuantisedWeight
from softsieve.integrations import generation, hidden_states
from softsieve.integrations.adaptive_head import INDEX, accelerate_head
from softsieve.integrations.generation import Agreement, Choice, Written, figures
from softsieve.integrations.gguf_file import SUFFIX, read_gguf_weight
from softsieve.tasks.files import read_lines, read_text
from softsieve.tasks.hf import no_bar
from softsieve.training.checkpoint import write_folder

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
    model: Annotated[str, _option(_TEXT, "name or folder of a Hugging Face causal language model, or a .gguf file")],
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
        if save is not None and (save.is_file() or (save.is_dir() and any(save.iterdir()))):
            raise InputError(f"{save}: expected a new folder, found {'a file' if save.is_file() else 'one with files'}")
        if save is not None and Path(model).suffix == SUFFIX:
            raise InputError(
                f"save: expected a model of a folder, found {model}, whose rows a new folder would not have"
            )
        asked = _prompts(prompt or [], prompts)
        for place in filter(None, (save, out)):
            check_writable(place)
        quiet_hugging_face()
        set_threads(threads)
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
        rows = read_gguf_weight(Path(model)) if Path(model).suffix == SUFFIX else None
        if isinstance(rows, QuantisedWeight):
            promise["weight"] = rows
        writer = _Writer(network, tokenizer, seed, console)
        if index is not None:
            head, source = writer.load_head(index, promise, top_k)
        else:
            promise["k"] = max(k or 1, top_k or 1)
            head, source = writer.calibrate_head(text, promise, count=queries, first=first)
        if save is not None:
            writer.save(save)
        choice = generation.Choice(temperature, top_k, top_p)
        pairs = writer.write(starts, tokens, choice)
        _say(pairs)
        if out is not None:
            (n, d), name = head.weight.shape, hidden_states.label_of(model)
            facts = {"model": name, "n": n, "d": d, "eps": head.eps, "delta": head.delta, "k": max(head.calibrations)}
            options = {"dtype": dtype, "tokens": tokens, "calibration": source, "seed": seed, **choice._asdict()}
            write_record(out, "generate", facts | options, _rows(pairs, tokenizer))
            console.print(f"written: {out}")


# What is refused


def _check(
    dtype: str, eps: float | None, delta: float | None, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Before a model is loaded."""
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
    weight: Any = hidden_states.output_layer(network).weight
    for name, value in sizes.items():
        if value is not None:
            _checks.whole_number(name, value, 1, len(weight))


def _prompts(texts: Sequence[str], file: Path | None) -> list[tuple[str, str]]:
    """What to call each prompt, and what it says."""
    lines = [] if file is None else read_lines(file)
    if file is not None and not lines:
        raise InputError(f"{file}: expected prompts, one a line, found none")
    if not texts and file is None:
        raise InputError("prompt: expected --prompt TEXT or --prompts FILE, found neither")
    return [*(("prompt", text) for text in texts), *lines]


# What is done


class _Writer(NamedTuple):
    """A model that writes with either head."""

    network: Any
    tokenizer: Any
    seed: int
    console: Console

    def load_head(self, index: Path, promise: dict[str, Any], top_k: int | None) -> tuple[AdaptiveSoftmax, str]:
        """Give the model an adaptive head that was saved."""
        head = accelerate_head(self.network, index=index, **promise).head
        most = max(head.calibrations)
        if top_k is not None and top_k > most:
            raise InputError(f"top_k: expected at most {most}, which {index} was calibrated for, found {top_k}")
        self.console.print(f"index: {index}")
        return head, "a saved index"

    def calibrate_head(
        self, text: tuple[str, str] | None, promise: dict[str, Any], **options: Any
    ) -> tuple[AdaptiveSoftmax, str]:
        """Give the model an adaptive head for a text, which has a place, or for what it writes itself."""
        wrote = "that the model wrote itself, at temperature 1"
        source = f"{options['count']} tokens {wrote if text is None else 'of a text'}"
        generator = torch.Generator().manual_seed(self.seed)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with bar(self.console) as progress:
                options["progress"] = progress
                if text is None:
                    states = generation.own_states(self.network, self.tokenizer, generator=generator, **options)
                else:
                    states = generation.text_states(self.network, self.tokenizer, text[1], place=text[0], **options)
            with bar(self.console) as progress:
                head = accelerate_head(self.network, states, **promise, generator=generator, progress=progress).head
        self.console.print(f"calibrated in {time.perf_counter() - start:.0f} s with {source}")
        for warning in caught:  # such as: too few
            self.console.print(str(warning.message))
        return head, source

    def save(self, folder: Path) -> None:
        """All or nothing."""
        import transformers

        def fill(part: Path) -> None:
            with no_bar(transformers.utils.logging):
                self.network.save_pretrained(str(part))
            self.tokenizer.save_pretrained(str(part))

        write_folder(folder.absolute(), fill)
        self.console.print(f"saved: {folder}")

    def write(self, starts: Sequence[tuple[str, Tensor]], tokens: int, choice: Choice) -> list[Pair]:
        """Both heads in turns, prompt after prompt; the text of the adaptive one is shown while it comes."""
        network = self.network

        def write(ids: Tensor, count: int, stream: Callable[[int], object] = lambda token: None) -> Written:
            drawn = torch.Generator().manual_seed(self.seed)  # the same for both heads
            return generation.write(network, ids, tokens=count, choice=choice, generator=drawn, stream=stream)

        def both(prompt: str, ids: Tensor) -> Pair:
            with bar(self.console) as progress:

                def tell(what: str) -> Callable[[int], object]:
                    return lambda token: progress(what, 0.5 / tokens)

                with generation.exact_head(network):
                    exact = write(ids, tokens, tell("the exact head writes"))
                reads = tell("the adaptive head reads it")
                agreement = generation.agreement(network, ids, exact.tokens, stream=reads)
            transcript = generation.Transcript(self.tokenizer, ids, generation.end_tokens(network, self.tokenizer))
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


def _say(pairs: Sequence[Pair]) -> None:
    both = [figures([getattr(pair, head) for pair in pairs]) for head in ("exact", "adaptive")]
    exact, adaptive = both
    agreed, steps = sum(pair.agreement.agreed for pair in pairs), sum(pair.agreement.steps for pair in pairs)
    speed, times = adaptive.tokens_per_second / exact.tokens_per_second, exact.head_ms / adaptive.head_ms
    rows = [
        ("tokens/s", *(f"{one.tokens_per_second:.1f}" for one in both), f"{speed:.2f}x"),
        ("ms a token in the head", *(f"{one.head_ms:.2f}" for one in both), f"{times:.1f}x"),
        ("share of time in the head", *(f"{one.head_share:.1%}" for one in both), ""),
        (
            "MB read a token in the head",
            *(f"{one.bytes_read / 1e6:.2f}" for one in both),
            f"{exact.bytes_read / adaptive.bytes_read:.1f}x",
        ),
        ("tokens answered exactly", *(f"{one.exactly} of {one.tokens}" for one in both), ""),
        ("same greedy token as the exact head", "", f"{agreed} of {steps}", ""),
    ]
    columns = {name: itemgetter(place) for place, name in enumerate(("", "exact head", "adaptive head", "gain"))}
    plain_console().print(table(rows, columns))


def _rows(pairs: Sequence[Pair], tokenizer: Any) -> list[dict[str, Any]]:
    """Each prompt with each head, and at the end, without a prompt, all of them together."""
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
