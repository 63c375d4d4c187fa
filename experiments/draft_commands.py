"""The command for heads of models that draft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.command_parts import results_option, say
from softsieve.cli.head_bench import Delta, Eps, Seed, Threads, set_threads
from softsieve.cli.progress import quiet_hugging_face, watched
from softsieve.comparisons.output import beside, write_results
from softsieve.errors import InputError


def drafts(
    model: Annotated[str, typer.Option(help="the draft: name or folder of a Hugging Face causal language model")],
    text: Annotated[list[str], typer.Option(help="NAME=FILE: UTF-8, may be .gz or .xz; several")],
    target: Annotated[str | None, typer.Option(help="a model with the same tokenizer; else the draft itself")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="of the draft, its first ones; else all")] = None,
    list_size: Annotated[int, typer.Option("--list", min=1, help="tokens of a static list")] = 32_000,
    counted: Annotated[int, typer.Option(min=1, help="tokens of the beginning of a text to count and calibrate")] = (
        200_000
    ),
    calibration: Annotated[int, typer.Option(min=2, help="tokens to calibrate with, spread over these")] = 4000,
    tokens: Annotated[int, typer.Option(min=1, help="to draft, spread over a quarter as many after these")] = 2000,
    window: Annotated[int, typer.Option(min=2, help="tokens that a model reads at a time")] = 256,
    eps: Eps = 0.3,
    delta: Delta = 0.01,
    dtype: Annotated[str, typer.Option(help="of the models: float32 or bfloat16")] = "float32",
    threads: Threads = None,
    seed: Seed = 0,
    out: Annotated[Path, results_option("drafts")] = Path("drafts"),
) -> None:
    """Tokens that a draft model proposes with its exact head, an adaptive one, and a static list of frequent tokens.

    Heads are fitted to each text and used on later parts of all. A token is accepted if it is the target's. Without a
    target that is the same model with all layers and its exact head: with no --layers either, what is refused is what
    the head loses.
    """
    with watched(out) as progress:
        quiet_hugging_face()
        import torch

        from experiments import drafts as suite
        from softsieve import _checks
        from softsieve._records import write_record
        from softsieve.integrations.hidden_states import load_model, load_tokenizer, measured_first_token
        from softsieve.tasks.files import read_text

        for name, value in {"eps": eps, "delta": delta}.items():
            _checks.open_unit(name, value)
        _checks.choice("dtype", dtype, ("float32", "bfloat16"))
        set_threads(threads)
        files = _files(text)
        contents = {name: read_text(path) for name, path in files.items()}
        tokenizer = load_tokenizer(model)
        if target is not None:
            suite.check_vocabulary(tokenizer, load_tokenizer(target), names=(_name(model), _name(target)))
        progress("loading the model", 0)
        network = load_model(model, dtype=torch.float32).to(getattr(torch, dtype))
        probe = torch.tensor(tokenizer(next(iter(contents.values()))[:2000], add_special_tokens=False).input_ids)
        first = measured_first_token(network, tokenizer, probe)
        sizes: dict[str, Any] = {"counted": counted, "calibration": calibration, "tokens": tokens}
        width = window - (first is not None)
        texts = {
            name: suite.cut(tokenizer, content, **sizes, size=width, place=str(files[name]))
            for name, content in contents.items()
        }
        judge = network if target is None else load_model(target, dtype=torch.float32).to(getattr(torch, dtype))
        expected: dict[str, torch.Tensor] = {}
        if target is not None or layers is not None:
            for name, parts in texts.items():
                progress(f"{name}: the target reads", 0)
                expected[name] = suite.greedy_tokens(judge, parts.held_out, first=first)
        if layers is not None:
            suite.keep_layers(network, layers)
        promise: dict[str, Any] = {"eps": eps, "delta": delta, "seed": seed}
        heads = suite.make_heads(network, texts, size=list_size, first=first, **promise, progress=progress)
        rows = []
        for name, parts in texts.items():
            states = suite.read_states(network, parts.held_out, first=first)
            found = suite.propose(
                heads, states, seed=seed, progress=lambda what, share: progress(what, share / len(texts))
            )
            rows += suite.summary(name, found, expected.get(name), window=width)
        n, d = network.get_output_embeddings().weight.shape
        named: dict[str, Any] = {
            "model": _name(model),
            "target": None if target is None else _name(target),
            "layers": layers,
        }
        named |= {"texts": {name: path.name for name, path in files.items()}, "n": n, "d": d, "list": list_size}
        about = {**named, **sizes, "window": window, "first": first, **promise, "dtype": dtype}
        write_results(out, "drafts", about, rows, suite.draw(rows))
        write_record(beside(out, ".json"), "drafts", about, rows)
    say(out, [_shown(row) for row in rows], more=[".json"])


def _name(model: str) -> str:
    return Path(model).name if Path(model).is_dir() else model


def _files(texts: list[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for text in texts:
        name, _, file = text.partition("=")
        if not name or not file:
            raise InputError(f"text: expected NAME=FILE, found {text!r}")
        if name in files:
            raise InputError(f"text: expected different names, found {name!r} more than once")
        files[name] = Path(file)
    return files


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    fallbacks, fitted = row["fallback_share"], row["calibration"]
    # An adaptive head that measured the product to be faster, when it was calibrated, answers with that.
    declined = row["head"] == "adaptive" and fallbacks is None
    return {
        "head": row["head"] if fitted is None else f"{row['head']} of {fitted}",
        "use": row["use"],
        "accepted": f"{row['acceptance']:.1%}",
        "of 4": f"{row['accepted_length']:.2f}",
        "ms": row["ms_mean"],
        "faster": "the product is" if declined else f"{row['mean_ratio']:.1f}x",
        "exactly": None if fallbacks is None else f"{fallbacks:.1%}",
    }
