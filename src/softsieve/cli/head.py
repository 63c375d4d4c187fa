"""`softsieve head`: output layers, here taken out of language models."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from softsieve._files import check_writable
from softsieve.cli.errors import one_line
from softsieve.cli.progress import bar, error_console
from softsieve.cli.script import App
from softsieve.errors import InputError

head = App(help="Output layers: taken out of models, indexed, calibrated, asked.", no_args_is_help=True)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@head.command()
def extract(
    model: Annotated[str, typer.Option(help="name or folder of a Hugging Face causal language model, or .gguf")],
    corpus: Annotated[list[str], typer.Option(help="a UTF-8 file, may be .gz or .xz; NAME=FILE names it; several")],
    out: Annotated[Path, typer.Option(help="the file to write, .safetensors")],
    queries: Annotated[int, typer.Option(min=2, help="hidden states of each text, from its beginning")] = 4000,
    test_share: Annotated[float, typer.Option(help="share of them, the last ones, that are for tests")] = 0.5,
    window: Annotated[int, typer.Option(min=2, help="tokens that the model reads at a time")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="windows that the model reads at a time")] = 8,
    dtype: Annotated[str, typer.Option(help=f"of what is written: {', '.join(DTYPES)}")] = "bf16",
    bos: Annotated[
        bool | None,
        typer.Option(help="begin every window with the token for that; if not given: as the tokenizer does"),
    ] = None,
) -> None:
    """Collect the output layer of a language model and the hidden states it is given over some texts.

    softsieve head extract --model NAME --corpus wikitext.txt --out head.safetensors
    """
    with one_line():
        if dtype not in DTYPES:
            raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
        if not 0 < test_share < 1:
            raise InputError(f"test_share: expected a number between 0 and 1, found {test_share}")
        check_place(out)
        quiet_hub()
        import torch

        from softsieve.integrations import hidden_states
        from softsieve.integrations.head_file import write_head
        from softsieve.tasks.files import read_text

        files = _named(corpus)
        texts = {name: read_text(path) for name, path in files.items()}
        tokenizer = hidden_states.load_tokenizer(model)
        tokens = {
            name: hidden_states.tokens_of(tokenizer, texts.pop(name), count=queries, place=str(path))
            for name, path in files.items()
        }
        first = hidden_states.first_token(tokenizer, bos=bos)
        console = error_console()
        with bar(console, "loading the model") as progress:
            precision = getattr(torch, DTYPES[dtype])
            network = hidden_states.load_model(model, dtype=precision)
            layer = hidden_states.collect(
                network,
                tokens,
                first=first,
                test_share=test_share,
                window=window,
                batch_size=batch_size,
                dtype=precision,
                progress=lambda rows: progress("hidden states", rows / (queries * len(tokens))),
            )
        start = "none" if first is None else str(first)
        notes = {"model": hidden_states.label_of(model), "window": str(window), "first_token": start}
        write_head(out, layer, notes=notes)
        size = " x ".join(str(side) for side in layer.weight.shape)
        console.print(f"{size}{'' if layer.bias is None else ' with bias'}, {dtype}: {out}")
        for name, states in layer.corpora.items():
            console.print(f"{name}: {len(states.calibration)} states to calibrate, {len(states.test)} to test")
        if layer.beta != 1:
            console.print(f"the model multiplies its logits by {layer.beta:.6g}: pass it on as beta")
        if layer.softcap is not None:
            console.print(
                f"the model soft-caps its logits at {layer.softcap:g}: the largest are the same ones, "
                "probabilities are those of the linear layer and not the model's"
            )


def _named(texts: list[str]) -> dict[str, Path]:
    """Files by the name of their text: what stands before the =, else the file's without its endings."""
    files: dict[str, Path] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        path = Path(text if not equals or Path(text).exists() else file)
        if path == Path(text):
            name = path.name
            for ending in (".gz", ".xz", ".txt"):
                name = name.removesuffix(ending)
        if not name:
            raise InputError(f"corpus: expected FILE or NAME=FILE, found {text!r}")
        if name in files:
            raise InputError(f"corpus: expected different names, found {name!r} more than once; NAME=FILE gives one")
        files[name] = path
    return files


def quiet_hub() -> None:
    """Have Hugging Face's packages say nothing of their own; they read this when they are imported, which is later."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def check_place(out: Path) -> None:
    """Before the work, not after it."""
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: expected a file .safetensors")
    if out.is_dir():
        raise InputError(f"{out}: expected a file, found a folder")
    check_writable(out)
