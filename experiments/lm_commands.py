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
    weights: Annotated[str, typer.Option(help="of the model: float32, or bfloat16, on a GPU")] = "float32",
    random: Annotated[bool, typer.Option(help="take the folder's config.json with random weights")] = False,
    lora: Annotated[int, typer.Option(min=0, help="rank of LoRA on attention and output layer; 0: train all")] = 0,
    compiled: Annotated[bool, typer.Option(help="also torch.compile, with logits and with ours")] = True,
    memory: Annotated[int | None, typer.Option(min=1, help="MB that ours may take, in a row of its own")] = None,
    seed: Annotated[int, typer.Option(help="of the windows")] = 0,
    threads: Threads = None,
    out: Annotated[Path, results_option("lm-finetune")] = Path("lm-finetune"),
) -> None:
    """Fine-tune a language model: seconds and memory of a step, loss curve, held-out perplexity and accuracy.

    Dense logits, torch.compile, on a GPU Liger and cut-cross-entropy where they are installed, and the loss without
    logits at each delta, which is plain cross-entropy at 1. Seconds and MB are of forward and backward pass, all ways
    in turn on one model; step_seconds and step_mb of whole steps of training. The curves are in OUT.curves.csv; apart
    is how far the losses of a way are from the dense ones at most, where it computes the same. Tables are written
    after each part: times of the eager ways first, then their curves, then what is compiled.
    """
    with watched(out) as progress:
        import torch

        from experiments import lm_finetune as suite
        from experiments.lm_rivals import PACKAGES, left_out
        from softsieve import _checks
        from softsieve.integrations.hidden_states import load_model, load_tokenizer, tokens_of
        from softsieve.tasks.files import read_text

        set_threads(threads)
        _checks.choice("precision", precision, ("float32", "bfloat16"))
        _checks.choice("weights", weights, ("float32", "bfloat16"))
        content, tokenizer = read_text(text), load_tokenizer(model)
        needed = max(3 * length, 10 * held_out * length, min(20 * steps * batch * length, len(content) // 8))
        ids = tokens_of(tokenizer, content, count=needed, place=str(text))
        sizes: dict[str, Any] = {"steps": steps, "batch": batch, "length": length, "held_out": held_out, "seed": seed}
        windows = suite.cut(ids, **sizes)
        progress("loading the model", 0)
        kind = torch.bfloat16 if weights == "bfloat16" else torch.float32
        network = suite.random_model(model, kind, seed) if random else load_model(model, dtype=kind)
        network = suite.adapt(network, lora, seed) if lora else network
        options: dict[str, Any] = {"deltas": delta, "compiled": compiled, "rounds": rounds, "rate": rate}
        options |= {"precision": precision, "memory": memory}
        missing = left_out(precision, weights, lora)
        options["rivals"] = [name for name in PACKAGES if name not in missing]
        named = {"model": Path(model).name if Path(model).exists() else model, "text": text.name, "tokens": len(ids)}
        about = {**named, **sizes, **options, "weights": weights, "random": random, "lora": lora}
        about |= {"threads": torch.get_num_threads(), "left_out": missing}
        by_way: dict[str, Any] = {}
        curves: list[dict[str, Any]] = []
        for row, curve in suite.measure(network, windows, **options, progress=progress):
            by_way[row["way"]] = row
            curves += curve
            rows = [*by_way.values()]  # written at once: what is cut off leaves what it has
            write_table(beside(out, ".csv"), {"experiment": "lm-finetune", **about}, rows)
            if curve:
                write_table(beside(out, ".curves.csv"), {"experiment": "lm-finetune, curves", **about}, curves)
        write_results(out, "lm-finetune", about, rows, suite.draw(curves))
    for name, reason in missing.items():
        plain_console().print(f"{name}: not measured, {reason}")
    say(out, rows, more=[".curves.csv"])
