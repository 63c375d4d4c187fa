"""The command that fine-tunes a language model with and without its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.command_parts import results_option, say
from softsieve.cli.head_bench import Threads, set_threads
from softsieve.cli.progress import plain_console, watched
from softsieve.comparisons.output import beside, write_results, write_table


def lm_finetune(
    model: Annotated[str, typer.Argument(help="a causal language model of Hugging Face: name or folder")],
    text: Annotated[Path, typer.Argument(help="UTF-8 text, whose last tenth is held out; may be .gz or .xz")],
    delta: Annotated[list[float], typer.Option(min=0, max=1, help="of the loss without logits; several")] = [  # noqa: B006
        1.0,
        0.5,
        0.1,
    ],
    steps: Annotated[int, typer.Option(min=1, help="of each training")] = 60,
    batch: Annotated[int, typer.Option(min=1, help="windows in a step")] = 4,
    length: Annotated[int, typer.Option(min=2, help="tokens in a window")] = 128,
    held_out: Annotated[int, typer.Option(min=1, help="windows of the last tenth")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="in which the ways are timed, in turn")] = 8,
    rate: Annotated[float, typer.Option(help="of AdamW")] = 2e-5,
    precision: Annotated[str, typer.Option(help="float32, or bfloat16 by autocast")] = "float32",
    lora: Annotated[int, typer.Option(min=0, help="rank of LoRA on attention and output layer; 0: train all")] = 0,
    compiled: Annotated[bool, typer.Option(help="also time torch.compile")] = True,
    seed: Annotated[int, typer.Option(help="of the windows")] = 0,
    threads: Threads = None,
    out: Annotated[Path, results_option("lm-finetune")] = Path("lm-finetune"),
) -> None:
    """Fine-tune a language model: seconds and memory of a step, loss curve, held-out perplexity and accuracy.

    Dense logits, torch.compile, and the loss without logits at each delta, which is plain cross-entropy at 1. Seconds
    and memory are of forward and backward pass, all ways in turn on one model. The curves are in OUT.curves.csv; apart
    is how far the losses of delta 1 are from the dense ones at most.
    """
    with watched(out) as progress:
        import torch

        from experiments import lm_finetune as suite
        from softsieve import _checks
        from softsieve.integrations.hidden_states import load_model, load_tokenizer, tokens_of
        from softsieve.tasks.files import read_text

        set_threads(threads)
        _checks.choice("precision", precision, ("float32", "bfloat16"))
        content, tokenizer = read_text(text), load_tokenizer(model)
        needed = max(3 * length, 10 * held_out * length, min(20 * steps * batch * length, len(content) // 8))
        ids = tokens_of(tokenizer, content, count=needed, place=str(text))
        sizes: dict[str, Any] = {"steps": steps, "batch": batch, "length": length, "held_out": held_out, "seed": seed}
        windows = suite.cut(ids, **sizes)
        progress("loading the model", 0)
        network = load_model(model, dtype=torch.float32)
        network = suite.adapt(network, lora, seed) if lora else network
        options: dict[str, Any] = {"deltas": delta, "compiled": compiled, "rounds": rounds, "rate": rate}
        options["precision"] = precision
        rows, curves = suite.measure(network, windows, **options, progress=progress)
        missing = suite.left_out()
        named = {"model": Path(model).name if Path(model).is_dir() else model, "text": text.name, "tokens": len(ids)}
        about = {**named, **sizes, **options, "lora": lora, "threads": torch.get_num_threads()}
        about["left_out"] = missing
        write_results(out, "lm-finetune", about, rows, suite.draw(curves))
        write_table(beside(out, ".curves.csv"), {"experiment": "lm-finetune, curves", **about}, curves)
    for name, reason in missing.items():
        plain_console().print(f"{name}: not measured, {reason}")
    say(out, rows, more=[".curves.csv"])
