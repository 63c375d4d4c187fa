"""`python -m experiments`: the evidence for both papers, one command for each table or figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments import training_commands
from experiments.command_parts import results_option, say
from experiments.draft_commands import drafts
from experiments.item_commands import next_item
from experiments.lm_commands import lm_finetune
from softsieve._progress import ProgressCallback
from softsieve.cli.head_bench import Delta, Eps, Seed
from softsieve.cli.progress import quiet_hugging_face, watched
from softsieve.cli.script import App
from softsieve.comparisons.output import beside, write_results

app = App(help="The evidence for AdaptiveSoftmax and AS-Softmax, one command each.", no_args_is_help=True)

HeadFile = Annotated[Path | None, typer.Option(help="a file of `softsieve head extract`, beside the made-up data")]
QueriesFile = Annotated[Path | None, typer.Option(help="file of its hidden states, if that is another")]
Corpus = Annotated[str | None, typer.Option(help="the text they come from; else the first there is")]


def _names(files: Mapping[str, Any]) -> dict[str, str]:
    """Of what was given, without the folders, which mean nothing elsewhere."""
    return {key: getattr(value, "name", value) for key, value in files.items() if value is not None}


@app.command()
def synthetic(
    trials: Annotated[int, typer.Option(min=1, help="instances for each d")] = 100,
    steps: Annotated[int, typer.Option(min=1, help="values of d, in equal ratios; 1: the largest")] = 20,
    min_d: Annotated[int, typer.Option(min=1, help="the smallest d")] = 10**3,
    max_d: Annotated[int, typer.Option(min=1, help="the largest d; 10^6 takes 1.5 GB")] = 10**6,
    n: Annotated[int, typer.Option(min=2, help="rows of the weight")] = 100,
    eps: Eps = 0.3,
    delta: Delta = 0.1,
    seed: Seed = 0,
    out: Annotated[Path, results_option("synthetic")] = Path("synthetic"),
) -> None:
    """Coordinates read against d on the two synthetic sets of the paper; the defaults are the paper's."""
    with watched(out) as progress:
        from experiments import synthetic as suite

        chosen = {"n": n, "min_d": min_d, "max_d": max_d, "steps": steps, "trials": trials}
        settings: dict[str, Any] = {**chosen, "eps": eps, "delta": delta, "seed": seed}
        rows = suite.run(**settings, progress=progress)
        write_results(out, "synthetic", settings, rows, suite.draw(rows, delta=delta))
    say(out, rows)


@app.command()
def variance(
    n: Annotated[int, typer.Option(min=1, help="rows of the made-up weights, and at most of the head")] = 256,
    d: Annotated[int, typer.Option(min=1, help="of the made-up data")] = 1024,
    queries: Annotated[int, typer.Option(min=1, help="of each, at most")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="samples for every query")] = 4,
    shares: Annotated[int, typer.Option(min=1, help="sample sizes d, d/2, d/4, ...")] = 7,
    head: HeadFile = None,
    queries_file: QueriesFile = None,
    corpus: Corpus = None,
    seed: Seed = 0,
    out: Annotated[Path, results_option("variance")] = Path("variance"),
) -> None:
    """Squared error of the estimators, and what they say of it, by sample size, with and without rotation."""
    with watched(out) as progress:
        from experiments import variance as suite
        from experiments.variance import instances

        made: dict[str, Any] = {"n": n, "d": d, "queries": queries, "seed": seed}
        real: dict[str, Any] = {"head": head, "queries_file": queries_file, "corpus": corpus}
        found = instances(**made, **real, head_rows=n)
        settings = {**made, "repeats": repeats, **_names(real)}
        rows = suite.run(found, shares=shares, repeats=repeats, seed=seed, progress=progress)
        write_results(out, "variance", settings, rows, suite.draw(rows))
    say(out)


@app.command()
def histograms(
    n: Annotated[int, typer.Option(min=1, help="rows of the made-up weight")] = 1000,
    d: Annotated[int, typer.Option(min=1, help="of the made-up data")] = 1024,
    queries: Annotated[int, typer.Option(min=1, help="of each, at most")] = 1000,
    share: Annotated[float, typer.Option(help="of the coordinates that estimates read")] = 0.25,
    bins: Annotated[int, typer.Option(min=1, help="of a histogram")] = 60,
    head: HeadFile = None,
    queries_file: QueriesFile = None,
    corpus: Corpus = None,
    seed: Seed = 0,
    out: Annotated[Path, results_option("histograms")] = Path("histograms"),
) -> None:
    """Histograms of the entries of A and of x, and of the second-order term of the normaliser's error."""
    with watched(out) as progress:
        from experiments import histograms as suite
        from experiments.variance import instances

        made: dict[str, Any] = {"n": n, "d": d, "queries": queries, "seed": seed}
        real: dict[str, Any] = {"head": head, "queries_file": queries_file, "corpus": corpus}
        found = instances(**made, **real)
        settings = {**made, "share": share, **_names(real)}
        rows = suite.run(found, share=share, bins=bins, seed=seed, progress=progress)
        write_results(out, "histograms", settings, rows, suite.draw(rows))
    say(out)


@app.command()
def logistic(
    data: Annotated[list[str], typer.Option(help="mnist or eurosat; both")] = ["mnist", "eurosat"],  # noqa: B006
    data_dir: Annotated[Path, typer.Option(help="where the presets' data are")] = Path("data"),
    delta: Annotated[list[float], typer.Option(help="chance of a wrong answer; several")] = [  # noqa: B006
        0.1,
        0.05,
        0.01,
    ],
    eps: Eps = 0.3,
    epochs: Annotated[int | None, typer.Option(min=1, help="of training, instead of the recipe's")] = None,
    train_rows: Annotated[int, typer.Option(min=1, help="images to train with, at most")] = 10_000,
    calibration: Annotated[int, typer.Option(min=1, help="queries to calibrate with")] = 200,
    queries: Annotated[int, typer.Option(min=1, help="queries to test with")] = 800,
    seed: Seed = 0,
    out: Annotated[Path, results_option("logistic")] = Path("logistic"),
) -> None:
    """Softmax regression on some 25,000 features of images: what is read, and how often it is right."""
    with watched(out) as progress:
        from experiments import logistic as suite

        options = {"eps": eps, "epochs": epochs, "train_rows": train_rows, "calibration": calibration}
        settings: dict[str, Any] = {**options, "queries": queries, "seed": seed}
        rows = suite.run(data, data_dir, deltas=delta, **settings, progress=progress)
        write_results(out, "logistic", settings, rows, suite.draw(rows))
    say(out, rows)


@app.command()
def heads(
    head: Annotated[Path, typer.Option(help="safetensors file with the weight: `softsieve head extract` makes one")],
    queries_file: Annotated[
        Path | None, typer.Option("--queries-file", "--queries", help="file with the states; else that of --head")
    ] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="a text whose states are in the file; several; all")] = None,
    delta: Annotated[list[float], typer.Option(help="chance of a wrong answer; several")] = [0.1, 0.05, 0.01],  # noqa: B006
    eps: Eps = 0.3,
    k: Annotated[int, typer.Option(min=1, help="how many of the largest")] = 1,
    calibration: Annotated[int, typer.Option(min=1, help="states of each text to calibrate with, at most")] = 1000,
    test_queries: Annotated[int, typer.Option(min=1, help="states of each text to test with, at most")] = 200,
    seed: Seed = 0,
    out: Annotated[Path, results_option("heads")] = Path("heads"),
) -> None:
    """The output layer of a language model: what is read of it, and how often it is right."""
    with watched(out) as progress:
        from experiments import language_heads as suite
        from softsieve.integrations.head_file import read_head

        layer, notes = read_head(head, queries_file)
        options = {"eps": eps, "k": k, "calibration": calibration, "test_queries": test_queries}
        settings: dict[str, Any] = {**options, "seed": seed}
        rows = suite.run(layer, corpora=corpus or [], deltas=delta, **settings, progress=progress)
        n, d = layer.weight.shape
        named = {"head": head.name, "model": notes.get("model"), "n": n, "d": d, "deltas": delta, "paper": suite.PAPER}
        write_results(out, "heads", {**named, **settings}, rows, suite.draw(rows))
    say(out, rows)
    typer.echo(f"paper: {suite.PAPER}")


@app.command("linear-training")
def linear_training(
    text: Annotated[Path, typer.Argument(help="a UTF-8 file, may be .gz or .xz; its words are the classes")],
    steps: Annotated[int, typer.Option(min=20, help="of each training")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="windows in a step")] = 32,
    length: Annotated[int, typer.Option(min=1, help="words in a window")] = 128,
    size: Annotated[int, typer.Option(min=4, help="of the model's states; a multiple of 4")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="of the model")] = 4,
    delta: Annotated[float, typer.Option(min=0, max=1, help="margin of AS-Softmax")] = 0.1,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path, results_option("linear-training")] = Path("linear-training"),
) -> None:
    """A small language model trained through the loss without logits, the same loss with them, and the dense one."""
    with watched(out) as progress:
        from experiments import linear_training as suite
        from softsieve.tasks.files import read_text

        chosen: dict[str, Any] = {
            "steps": steps,
            "batch": batch,
            "length": length,
            "size": size,
            "layers": layers,
            "delta": delta,
            "device": device,
        }
        runs, words = suite.measure(read_text(text), **chosen, progress=progress)
        rows = []
        for run in runs:
            mean, largest = suite.apart(run, runs[0]) if run.name != suite.DENSE else (None, None)  # of another loss
            distances = {"last": suite.smooth(run.losses)[-1], "apart_mean": mean, "apart_most": largest}
            shares = {"solved": run.solved[-1], "dense_steps": suite.dense_steps(run)} if run.solved else {}
            times = {"ms": run.ms, "seconds": run.seconds, "peak_mb": run.peak_mb}
            rows.append({"loss": run.name, **distances, "solved": None, "dense_steps": None, **shares, **times})
        write_results(out, "linear-training", {"text": text.name, "words": words, **chosen}, rows, suite.draw(runs))
    say(out, rows)


@app.command()
def perplexity(
    model: Annotated[str, typer.Option(help="name or folder of a Hugging Face causal language model")],
    text: Annotated[Path, typer.Option(help="a UTF-8 file, may be .gz or .xz")],
    calibration: Annotated[int, typer.Option(min=2, help="tokens of its beginning to calibrate with")] = 4000,
    tokens: Annotated[int, typer.Option(min=1, help="tokens after these to measure")] = 2000,
    eps: Eps = 0.3,
    delta: Delta = 0.01,
    k: Annotated[list[int], typer.Option(min=1, help="how many of the largest logits are exact; several")] = [1, 8, 64],  # noqa: B006
    window: Annotated[int, typer.Option(min=2, help="tokens that the model reads at a time")] = 256,
    bos: Annotated[
        bool | None,
        typer.Option(help="begin every window with the token for that; if not given: as the tokenizer does"),
    ] = None,
    seed: Seed = 0,
    out: Annotated[Path, results_option("perplexity")] = Path("perplexity"),
) -> None:
    """Perplexity of a text from all logits of an adaptive head, one token at a time, beside the exact one."""
    with watched(out) as progress:
        quiet_hugging_face()
        import torch

        from experiments import perplexity as suite
        from softsieve import _checks
        from softsieve._records import write_record
        from softsieve.integrations.hidden_states import first_token, label_of, load_model, load_tokenizer, output_layer
        from softsieve.tasks.files import read_text

        for name, value in {"eps": eps, "delta": delta}.items():
            _checks.open_unit(name, value)
        content = read_text(text)
        tokenizer = load_tokenizer(model)
        first = first_token(tokenizer, bos=bos)
        progress("loading the model", 0)
        network = load_model(model, dtype=torch.float32)
        weight: Any = output_layer(network).weight
        for one in k:
            _checks.whole_number("k", one, 1, len(weight))
        half: ProgressCallback = lambda what, share: progress(what, share / 2)  # noqa: E731
        chosen: dict[str, Any] = {"calibration": calibration, "tokens": tokens, "window": window, "first": first}
        reading = suite.read(network, tokenizer, content, **chosen, place=str(text), progress=half)
        promise: dict[str, Any] = {"eps": eps, "delta": delta, "ks": k, "seed": seed}
        found = suite.measure(reading, **promise, progress=half)
        rows = suite.summary(found)
        n, d = reading.head.weight.shape
        named = {"model": label_of(model), "text": text.name, "n": n, "d": d}
        about = {**named, **chosen, **promise}
        write_results(out, "perplexity", about, rows, suite.draw(found))
        write_record(beside(out, ".json"), "perplexity", about, rows)
    shown = [
        {
            **{name: row[name] for name in ("head", "k", "perplexity")},
            "ratio": f"{row['ratio']:.4f} ± {row['ratio_error']:.4f}",
            "exactly": f"{row['exact_share']:.1%}",
            "MB a token": f"{row['bytes_read'] / 1e6:.2f}",
            "bytes": f"{row['bytes_ratio']:.1f}x",
        }
        for row in rows
    ]
    say(out, shown, more=[".json"])


for command in (*training_commands.COMMANDS, next_item, lm_finetune, drafts):
    app.command(command.__name__.replace("_", "-"))(command)
