"""`python -m benchmarks`: the library against its named rivals, all in one run; results with their provenance."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from softsieve._records import write_record
from softsieve.cli.errors import one_line
from softsieve.cli.head_bench import (
    Delta,
    Deltas,
    Eps,
    Ks,
    Out,
    Seed,
    Stretch,
    Threads,
    check_promise,
    say,
    set_threads,
    stem,
    write,
)
from softsieve.cli.progress import table, watched
from softsieve.cli.script import App
from softsieve.errors import InputError

app = App(help="Benchmarks against named rivals, all in one run.", no_args_is_help=True)

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
GPU_SHAPES = [(128256, 4096), (151936, 1536), (262144, 640)]  # of Llama 3 8B, Qwen 2.5 1.5B and Gemma 3 270M

Columns = dict[str, Callable[[Any], str]]

Margin = Annotated[float, typer.Option(min=0, max=1, help="margin of AS-Softmax")]
Dtype = Annotated[str, typer.Option(help=f"one of {', '.join(DTYPES)}")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Repeats = Annotated[int, typer.Option(min=1, help="timed runs of each method, taken in turns")]
Record = Annotated[
    Path | None, typer.Option(help="write the results with their provenance to this JSON file", dir_okay=False)
]


def _sizes(text: str, like: str) -> tuple[int, ...]:
    """The numbers of a shape that is written as ``like`` is."""
    try:
        sizes = tuple(int(part) for part in text.split("x"))
    except ValueError:
        sizes = ()
    count = like.count("x") + 1
    if len(sizes) != count:
        number = {2: "two", 3: "three"}[count]
        raise typer.BadParameter(f"expected {number} numbers such as {like}, found {text!r}", param_hint="--shape")
    if min(sizes) < 1:
        raise typer.BadParameter(f"expected at least one of each, found {text!r}", param_hint="--shape")
    return sizes


def _check_choices(dtype: str, device: str) -> None:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, found {dtype!r}", param_hint="--dtype")
    if device not in devices:
        raise typer.BadParameter(f"expected {' or '.join(devices)} here, found {device!r}", param_hint="--device")


def _keep(out: Path | None, suite: str, settings: Mapping[str, Any], results: Sequence[Any]) -> None:
    """Write what there is so far: what takes long may be cut off."""
    if out is not None:
        write_record(out, suite, settings, [result._asdict() for result in results])


def _write(console: Console, out: Path | None, suite: str, settings: Mapping[str, Any], results: Sequence[Any]) -> None:
    _keep(out, suite, settings, results)
    if out is not None:
        console.print(f"written to {out}")


@app.command()
def losses(
    shape: Annotated[list[str], typer.Option(help="ROWSxCLASSES; may be given several times")] = [  # noqa: B006
        "4096x30522",
        "65536x150",
        "1024x1000",
        "32x150",
    ],
    solved: Annotated[list[float], typer.Option(min=0, max=1, help="share of rows made solved; several")] = [  # noqa: B006
        0.0,
        0.5,
        0.95,
    ],
    delta: Margin = 0.1,
    dtype: Dtype = "fp32",
    device: Device = "cpu",
    repeats: Repeats = 15,
    out: Record = None,
) -> None:
    """Time and peak memory of forward + backward: softsieve, and the same in plain torch, against F.cross_entropy."""
    from benchmarks import losses as suite

    _check_choices(dtype, device)
    shapes = [_sizes(text, "4096x30522") for text in shape]
    console = Console()
    results = []
    for rows, classes in shapes:
        for share in solved:
            with console.status(f"{rows} x {classes}, {share:.0%} of the rows solved"):
                results += suite.measure(
                    rows, classes, solved=share, delta=delta, dtype=DTYPES[dtype], device=device, repeats=repeats
                )
    title = f"forward + backward, {dtype} on {device}, delta {delta}, median of {repeats}"
    columns: Columns = {
        "rows x classes": lambda r: f"{r.rows} x {r.classes}",
        "solved": lambda r: f"{r.solved:.0%}",
        "method": lambda r: r.method,
        "ms (p20-p80)": lambda r: f"{r.ms:.3g} ({r.ms_p20:.3g}-{r.ms_p80:.3g})",
        "time": lambda r: f"{r.time_ratio:.2f}x",
        "graph ms": lambda r: f"{r.graph_ms:.3g}",
        "graph": lambda r: f"{r.graph_ratio:.2f}x",
        "peak MB": lambda r: f"{r.peak_mb:.0f}",
        "memory": lambda r: f"{r.memory_ratio:.2f}x",
    }
    console.print(table(results, columns, title=title, ends=lambda r: r.method == suite.METHODS[-1]))
    console.print(f"time and memory as ratios to {suite.METHODS[0]}; peak above the logits, gradient included")
    settings = {"delta": delta, "dtype": dtype, "device": device, "repeats": repeats}
    _write(console, out, "losses", settings, results)


@app.command()
def linear(
    shape: Annotated[list[str], typer.Option(help="ROWSxSIZExCLASSES; several")] = [  # noqa: B006
        "8192x2304x256000",
        "8192x4096x128256",
    ],
    dense: Annotated[list[float], typer.Option(min=0, max=1, help="share of dense rows; several")] = [  # noqa: B006
        0.25,
        0.05,
        1.0,
    ],
    rival: Annotated[list[str] | None, typer.Option(help="several; else all that are installed")] = None,
    delta: Margin = 0.1,
    dtype: Dtype = "bf16",
    device: Device = "cuda",
    repeats: Repeats = 15,
    check: Annotated[bool, typer.Option(help="compare gradients with float64's")] = True,
    memory: Annotated[list[int] | None, typer.Option(min=1, help="MB that ours is allowed; several")] = None,
    screening: Annotated[bool, typer.Option(help="ours also with screening in 8 bits")] = False,
    backend: Annotated[list[str] | None, typer.Option(help="ours also with that backend; several")] = None,
    out: Annotated[
        Path, typer.Option(help="the results with their provenance go to this JSON file", dir_okay=False)
    ] = Path("benchmarks/results/linear.json"),
) -> None:
    """Time, memory and error of forward + backward: AS cross-entropy without the logits, and dense cross-entropies."""
    from benchmarks import linear as suite
    from softsieve.losses.linear import BACKENDS

    _check_choices(dtype, device)
    for name in rival or []:
        if name not in suite.RIVALS:
            raise typer.BadParameter(f"expected one of {', '.join(suite.RIVALS)}, found {name!r}", param_hint="--rival")
    for name in backend or []:
        if name not in BACKENDS:
            raise typer.BadParameter(f"expected one of {', '.join(BACKENDS)}, found {name!r}", param_hint="--backend")
    shapes = [_sizes(text, "8192x2304x256000") for text in shape]
    methods, missing = suite.rivals(rival)
    console = Console(soft_wrap=True, highlight=False)
    settings = {"delta": delta, "dtype": dtype, "device": device, "repeats": repeats, "missing": missing}
    results = []
    for rows, size, classes in shapes:
        for share in dense:
            with console.status(f"{rows} x {size} x {classes}, {share:.0%} of the rows dense"), one_line():
                results += suite.measure(
                    rows, size, classes, dense=share, methods=methods, delta=delta, dtype=DTYPES[dtype], device=device,
                    repeats=repeats, check=check, memory=memory or (), screening=screening, backends=backend or (),
                    missing=missing,
                )  # fmt: skip
            _keep(out, "linear", settings, results)
    title = f"forward + backward, {dtype} on {device}, delta {delta}, median of {repeats}"
    columns: Columns = {
        "rows x size x classes": lambda r: f"{r.rows} x {r.size} x {r.classes}",
        "dense": lambda r: f"{r.dense:.0%}",
        "method": lambda r: r.method,
        "ms, mean": lambda r: f"{r.ms:.3g} {r.ms_mean:.3g}",
        "time": lambda r: f"{r.time_ratio:.2f}x",
        "extra MB": lambda r: f"{r.extra_mb:.0f}",
        "errors": lambda r: f"{r.hidden_error:.1e} {r.weight_error:.1e}",
    }
    console.print(table(results, columns, title=title, ends=lambda r: r.method == suite.OURS))
    console.print(
        "time: median to the fastest rival's; extra: at the peak, above inputs and gradients; errors: of gradients of"
    )
    console.print(
        "hidden states and weight against float64's, |difference| / |float64's|, of the loss each method is for"
    )
    for name, reason in missing.items():
        console.print(f"not here: {name} ({reason})")
    _write(console, out, "linear", settings, results)


@app.command()
def multilabel(
    logits: Annotated[list[str] | None, typer.Option(help="ROWSxCLASSES of the loss on logits; several")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="CLASSESxSIZE of the layer that steps; several")] = None,
    rows: Annotated[int, typer.Option(min=1, help="of the layer")] = 1024,
    labels: Annotated[int, typer.Option(min=1, help="of a row")] = 5,
    solved: Annotated[list[float], typer.Option(min=0, max=1, help="share of rows made solved; several")] = [  # noqa: B006
        0.0,
        0.5,
        0.95,
    ],
    dense: Annotated[
        list[float] | None,
        typer.Option(
            min=0, max=1, help="of the layer, share of rows made dense, one for each --solved; else half of the others"
        ),
    ] = None,
    delta: Margin = 0.5,
    dtype: Annotated[str, typer.Option(help=f"of the layer, one of {', '.join(DTYPES)}")] = "bf16",
    logits_dtype: Annotated[str, typer.Option(help="of the loss on logits")] = "fp32",
    device: Device = "cpu",
    compiled: Annotated[bool, typer.Option(help="also torch.compile of the rival of the layer")] = False,
    check: Annotated[bool, typer.Option(help="gradients and step of a layer against float64 (first --solved)")] = False,
    part: Annotated[str, typer.Option(help="logits, layer or both")] = "both",
    repeats: Repeats = 9,
    out: Record = None,
) -> None:
    """Multi-label losses against dense BCE: on logits, and forward + backward + update of a layer of many classes."""
    from benchmarks import multilabel as suite
    from benchmarks import multilabel_layer

    _check_choices(dtype, device)
    _check_choices(logits_dtype, device)
    if part not in ("both", "logits", "layer"):
        raise typer.BadParameter(f"expected logits, layer or both, found {part!r}", param_hint="--part")
    if dense and len(dense) != len(solved):
        raise typer.BadParameter(
            f"expected {len(solved)}, one for each --solved, found {len(dense)}", param_hint="--dense"
        )
    shapes = [_sizes(text, "1024x4271") for text in logits or suite.LOGIT_SHAPES[device]]
    layers = [_sizes(text, "65536x256") for text in layer or multilabel_layer.LAYER_SHAPES[device]]
    console = Console(soft_wrap=True, highlight=False)
    results: list[Any] = []
    missing: dict[str, str] = {}
    settings = {
        "labels": labels, "dtype": dtype, "logits_dtype": logits_dtype, "device": device, "repeats": repeats,
        "rate": multilabel_layer.RATE, "delta": delta, "missing": missing,
    }  # fmt: skip

    def keep(found: list[Any]) -> None:
        results.extend(found)
        _keep(out, "multilabel", settings, results)
        if device == "cuda":
            torch.cuda.empty_cache()

    for number, share in enumerate(solved if part != "logits" else []):
        for classes, size in layers:
            with console.status(f"layer {classes} x {size}, {share:.0%} of the rows solved"):
                found, why = multilabel_layer.measure_step(
                    rows, size, classes, labels=labels, solved=share, dense=dense[number] if dense else None,
                    dtype=DTYPES[dtype], device=device, repeats=repeats, delta=delta, compiled=compiled,
                    check=check and number == 0,
                )  # fmt: skip
            missing.update(why)
            keep(found)
    for share in solved if part != "layer" else []:
        for count, classes in shapes:
            with console.status(f"logits {count} x {classes}, {share:.0%} of the rows solved"):
                keep(
                    suite.measure_logits(
                        count, classes, labels=labels, solved=share, device=device, repeats=repeats, delta=delta,
                        dtype=DTYPES[logits_dtype],
                    )
                )  # fmt: skip
    columns: Columns = {
        "rows x classes": lambda r: f"{r.rows} x {r.classes}",
        "size": lambda r: str(r.size) if r.size else "logits",
        "solved": lambda r: f"{r.solved:.0%}",
        "dense": lambda r: f"{r.dense:.0%}",
        "method": lambda r: r.method,
        "ms (p20-p80)": lambda r: f"{r.ms:.3g} ({r.ms_p20:.3g}-{r.ms_p80:.3g})",
        "mean": lambda r: f"{r.ms_mean:.3g}",
        "time": lambda r: f"{r.time_ratio:.2f}x",
        "extra MB": lambda r: f"{r.extra_mb:.0f}",
        "errors": lambda r: f"{r.hidden_error:.1e} {r.weight_error:.1e}",
    }
    title = f"logits: forward + backward, {logits_dtype}; layers: and update, {dtype}; {device}, median of {repeats}"
    console.print(table(results, columns, title=title, ends=lambda r: r.method.startswith("softsieve")))
    console.print(
        "time: to the fastest rival; extra: at the peak, above logits, or above states and weight; errors: of"
    )
    console.print("the states' gradient and of a step of some classes against float64, |difference| / |float64's|")
    for name, reason in missing.items():
        console.print(f"not here: {name} ({reason})")
    _write(console, out, "multilabel", settings, results)


@app.command()
def head(
    shape: Annotated[
        list[str] | None, typer.Option(help="ROWSxDIMENSIONS of the weight; several; else those of the records")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu: coordinates; cuda: the cascade")] = "cpu",
    spread: Annotated[list[float], typer.Option(help="cpu: standard deviation of the logits; several")] = [1.0, 30.0],  # noqa: B006
    rank: Annotated[int, typer.Option(min=1, help="cuda: effective rank of the made-up queries")] = 64,
    batch: Annotated[
        list[int],
        typer.Option(min=1, max=64, help="cuda: queries at a time; several"),
    ] = [1, 8, 16, 32, 64],  # noqa: B006
    head_file: Annotated[
        list[Path] | None, typer.Option("--head", help="cuda: a file of `softsieve head extract`; instead of shapes")
    ] = None,
    calibration: Annotated[int, typer.Option(min=2, help="cuda: queries to calibrate with")] = 3000,
    test_queries: Annotated[int, typer.Option(min=64, help="cuda: other queries to test with")] = 2000,
    eps: Eps = 0.3,
    delta: Delta = 0.01,
    k: Annotated[int, typer.Option(min=1, help="softmax values asked for")] = 1,
    repeats: Repeats = 30,
    out: Record = None,
) -> None:
    """Time of the top k of a head against the exact product."""
    from benchmarks import heads as suite

    if device == "cuda":
        shapes = [_sizes(text, "50257x768") for text in shape or [] if not head_file]
        chosen = {"batches": batch, "k": k, "eps": eps, "delta": delta, "repeats": repeats}
        with one_line():
            _head_on_gpu(shapes, head_file or [], rank, calibration, test_queries, chosen, out)
        return
    if device != "cpu":
        raise typer.BadParameter(f"expected cpu or cuda, found {device!r}", param_hint="--device")
    if head_file:
        raise typer.BadParameter("expected --device cuda with it; on a CPU: softsieve head bench", param_hint="--head")
    shapes = [_sizes(text, "50257x768") for text in shape or ["50257x768"]]
    console = Console()
    results = []
    for n, d in shapes:
        for width in spread:
            with console.status(f"{n} x {d}, logits of deviation {width:g}"):
                results += suite.measure(n, d, spread=width, eps=eps, delta=delta, k=k, repeats=repeats)
    threads = torch.get_num_threads()
    title = f"top {k}, fp32, batch 1, {threads} threads, eps {eps}, delta {delta}, median of {repeats}"
    columns: Columns = {
        "weight": lambda r: f"{r.n} x {r.d}",
        "logits": lambda r: f"{r.spread:g}",
        "method": lambda r: r.method,
        "ms (p20-p80)": lambda r: f"{r.ms:.2f} ({r.ms_p20:.2f}-{r.ms_p80:.2f})",
        "time": lambda r: f"{r.time_ratio:.2f}x",
        "bytes": lambda r: f"{r.bytes_ratio:.3f}x",
        "exact": lambda r: f"{r.exact:.0%}",
    }
    console.print(table(results, columns, title=title, ends=lambda r: r.method == suite.METHODS[-1]))
    console.print(f"time and bytes as ratios to {suite.METHODS[0]}; exact: share of queries that read everything")
    _write(console, out, "head", {"eps": eps, "delta": delta, "k": k, "repeats": repeats}, results)


def _head_on_gpu(
    shapes: Sequence[tuple[int, ...]],
    files: Sequence[Path],
    rank: int,
    calibration: int,
    test_queries: int,
    chosen: dict[str, Any],
    out: Path | None,
) -> None:
    """Measure the cascade on a GPU for heads of these shapes or in these files, print a table and write the record."""
    from benchmarks import heads_gpu as suite
    from softsieve.data.synthetic_heads import make_head
    from softsieve.integrations.head_file import read_head

    if not torch.cuda.is_available():
        raise InputError("--device: expected a CUDA device here, found none")
    console = Console(soft_wrap=True, highlight=False)
    settings = {**chosen, "rank": rank, "calibration": calibration, "test_queries": test_queries}
    results = []
    for n, d in [] if files else shapes or GPU_SHAPES:
        with console.status(f"{n} x {d}, made up, rank {rank}"):
            made = make_head(n, d, rank=rank, calibration=calibration, test=test_queries, device="cuda")
            results += suite.measure(f"made up, rank {rank}", *made, **chosen)
            del made
            torch.cuda.empty_cache()
        _keep(out, "head-gpu", settings, results)
    for path in files:
        layer, notes = read_head(path)
        for name, corpus in layer.corpora.items():
            label = f"{notes.get('model', path.name)}, {name}"
            with console.status(label):
                parts = (layer.weight, corpus.calibration[:calibration], corpus.test[:test_queries])
                weight, before, after = (part.cuda() for part in parts)
                results += suite.measure(label, weight, before, after, beta=layer.beta, **chosen)
            _keep(out, "head-gpu", settings, results)
    title = "top {k}, eps {eps}, delta {delta}, CUDA graphs, cold caches, {repeats} batches at least".format(**chosen)

    def ours(show: Callable[[Any], str]) -> Callable[[Any], str]:
        """A column that says something of the cascade alone."""
        return lambda r: show(r) if r.method == suite.OURS else ""

    columns: Columns = {
        "head": lambda r: r.head,
        "weight": lambda r: f"{r.n} x {r.d}",
        "batch": lambda r: str(r.batch),
        "method": lambda r: r.method,
        "us (p20-p80)": lambda r: f"{r.us:.1f} ({r.us_p20:.1f}-{r.us_p80:.1f})",
        "mean, p99": lambda r: f"{r.us_mean:.1f}, {r.us_p99:.1f}",
        "product": lambda r: f"{r.mean_over_product:.2f}x",
        "whole": lambda r: f"{r.mean_over_whole:.2f}x",
        "success": lambda r: "" if r.method == suite.PRODUCT else f"{r.success:.2%}",
        "exact": ours(lambda r: f"{r.exact:.2%}"),
        "bytes": ours(lambda r: f"{r.bytes_ratio:.1f}x"),
        "codes": ours(lambda r: f"{r.preview}{f', {r.tier}' if r.tier else ''}"),
        "auto": ours(lambda r: r.auto),
    }
    left = ("head", "method", "auto")
    console.print(table(results, columns, title=title, left=left, ends=lambda r: r.method == suite.OURS))
    console.print(
        f"product, whole: times faster than {suite.PRODUCT} and {suite.WHOLE} in the mean; bytes: of the weight for "
        "each one read; exact: share of queries that read everything; auto: what method='auto' takes by its own "
        "measurement"
    )
    _write(console, out, "head-gpu", settings, results)


@app.command()
def serving(
    shape: Annotated[str, typer.Option(help="CLASSESxSIZE of the layer")] = "1048576x768",
    rank: Annotated[int, typer.Option(min=1, help="effective rank of hidden states")] = 64,
    k: Annotated[int, typer.Option(min=1, help="classes that topk is asked for")] = 5,
    delta: Delta = 0.01,
    calibration: Annotated[int, typer.Option(min=2, help="queries to calibrate with")] = 1000,
    test_queries: Annotated[int, typer.Option(min=1, help="other queries to test with, one at a time")] = 300,
    fp32: Annotated[bool, typer.Option(help="measure the product in fp32, too, with a copy of the weight")] = False,
    threads: Threads = None,
    seed: Seed = 0,
    out: Record = None,
) -> None:
    """Time and quality of a multi-label layer's top k and of all its classes above 0, against the exact product."""
    from benchmarks import serving as suite

    n, d = _sizes(shape, "1048576x768")
    if rank > d:
        raise typer.BadParameter(f"expected at most {d}, found {rank}", param_hint="--rank")
    check_promise(0.3, [delta])
    set_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    chosen: dict[str, Any] = {
        "rank": rank,
        "k": k,
        "delta": delta,
        "calibration": calibration,
        "seed": seed,
    }
    with console.status(f"{n} x {d}") as status, one_line():
        results, costs = suite.measure(
            n, d, **chosen, test=test_queries, fp32=fp32, say=lambda what: status.update(f"{n} x {d}: {what}")
        )

    def share(name: str) -> Callable[[Any], str]:
        return lambda r: "" if getattr(r, name) is None else f"{getattr(r, name):.2%}"

    columns: Columns = {
        "method": lambda r: r.method,
        "ms": lambda r: f"{r.ms:.2f}",
        "mean": lambda r: f"{r.ms_mean:.2f}",
        "p99": lambda r: f"{r.ms_p99:.2f}",
        "faster": lambda r: f"{r.faster:.1f}x",
        "by means": lambda r: f"{r.faster_mean:.1f}x",
        "success": share("success"),
        "recall": share("recall"),
        "precision": share("precision"),
        "complete": share("complete"),
        "bytes": lambda r: f"{r.bytes_ratio:.1f}x",
        "exact": share("exact"),
    }
    title = f"{n} x {d}, bf16, one query at a time, {torch.get_num_threads()} threads, delta {delta}"
    console.print(table(results, columns, title=title, left=("method",), ends=lambda r: False))
    console.print(
        f"faster: than {suite.PRODUCT}; bytes: of the weight for each one read; exact: share of queries that read all"
    )
    console.print(
        f"index {costs.build_s:.0f} s, calibration {costs.calibrate_s:.0f} s, {costs.above:.1f} classes above 0, among "
        f"them {costs.labels_found:.0%} of the labels; peak {costs.peak_gib:.1f} GiB"
    )
    settings = {"n": n, "d": d, **chosen, "test_queries": test_queries, **costs._asdict()}
    _write(console, out, "serving", settings, results)


@app.command()
def text(
    data: Annotated[
        list[str], typer.Option(help="preset, eurlex57k-dev (its validation part to train on) or a file; several")
    ] = ["sst5", "clinc150", "goemotions", "reuters", "eurlex57k-dev"],  # noqa: B006
    data_dir: Annotated[Path, typer.Option(help="where presets lie")] = Path("data"),
    test_data: Annotated[Path | None, typer.Option(help="test rows of a file", dir_okay=False)] = None,
    method: Annotated[list[str] | None, typer.Option(help="several; else all")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of the built-in model")] = 3,
    threads: Threads = None,
    out: Record = None,
) -> None:
    """The built-in text model as `softsieve train` trains it, against TF-IDF with linear models and with neighbours."""
    from benchmarks import text as suite

    methods = method or [suite.OURS, *suite.RIVALS]
    for name in methods:
        if name not in (suite.OURS, *suite.RIVALS):
            expected = ", ".join([suite.OURS, *suite.RIVALS])
            raise typer.BadParameter(f"expected one of {expected}, found {name!r}", param_hint="--method")
    set_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    settings = {"data": data, "methods": methods, "seeds": seeds}
    results: list[suite.Result] = []
    with one_line():
        for source in data:
            rows = suite.read(source, data_dir, test_data)
            for name in methods:
                for seed in range(seeds if name == suite.OURS else 1):
                    with console.status(f"{source}: {name}, seed {seed}"):
                        results.append(suite.measure(rows, name, seed))
                    console.print(f"{source}: {name}, {100 * results[-1].test:.2f} in {results[-1].seconds:.0f} s")
                    _keep(out, "text", settings, results)
    columns: Columns = {
        "data": lambda r: r.data,
        "rows": lambda r: f"{r.rows:,}",
        "classes": lambda r: str(r.classes),
        "method": lambda r: r.method,
        "metric": lambda r: r.metric,
        "validation %": lambda r: f"{100 * r.validation:.2f}",
        "test %": lambda r: f"{100 * r.test:.2f}",
        "seconds": lambda r: f"{r.seconds:.1f}",
    }
    console.print(table(results, columns, left=("data", "method", "metric"), ends=lambda r: r.method == methods[-1]))
    console.print("seconds: from texts in memory to the answers for the test rows; thresholds by validation rows")
    if out is not None:
        console.print(f"written to {out}")


@app.command()
def memory(
    megabytes: Annotated[int, typer.Option(min=1, help="of a CSV with four classes")] = 300,
    classes: Annotated[int, typer.Option(min=2, help="of the other CSV")] = 50_000,
    rows: Annotated[int, typer.Option(min=2, help="of the other CSV")] = 100_000,
    epochs: Annotated[int, typer.Option(min=1, help="passes over each")] = 1,
    folder: Annotated[Path, typer.Option(help="where the files lie while they are needed")] = Path("memory-benchmark"),
    out: Record = None,
) -> None:
    """The memory that `softsieve train` takes for a large file of texts, and for very many classes."""
    from benchmarks import memory as suite

    console = Console(soft_wrap=True, highlight=False)
    cases = {
        "large file": {"rows": megabytes * 4050, "classes": 4, "words": 60},
        "many classes": {"rows": rows, "classes": classes, "words": 20},
    }
    results = []
    with one_line():
        folder.mkdir(parents=True, exist_ok=True)
        for case, sizes in cases.items():
            with console.status(case):
                results.append(suite.measure(case, folder, **sizes, epochs=epochs))
    columns: Columns = {
        "case": lambda r: r.case,
        "file, MB": lambda r: f"{r.file_mb:,.0f}",
        "rows": lambda r: f"{r.rows:,}",
        "classes": lambda r: f"{r.classes:,}",
        "peak, MB": lambda r: f"{r.peak_mb:,.0f}",
        "times the file": lambda r: f"{r.peak_mb / r.file_mb:.1f}",
        "seconds": lambda r: f"{r.seconds:.0f}",
    }
    console.print(table(results, columns, left=("case",), ends=lambda r: False))
    _write(console, out, "memory", {"epochs": epochs}, results)


@app.command("head-scaling")
def head_scaling(
    n: Annotated[list[int], typer.Option(min=2, help="rows; several")] = [32768],  # noqa: B006
    d: Annotated[list[int], typer.Option(min=4, help="dimensions; several")] = [512, 1024, 2048, 4096, 8192],  # noqa: B006
    rank: Annotated[int, typer.Option(min=1, help="effective rank of the queries")] = 64,
    method: Annotated[list[str], typer.Option(help="several; the exact products are always there")] = ["cascade"],  # noqa: B006
    k: Ks = [1],  # noqa: B006
    eps: Eps = 0.3,
    delta: Deltas = [0.01],  # noqa: B006
    calibration: Annotated[int, typer.Option(min=1, help="queries to calibrate with")] = 2000,
    test_queries: Annotated[int, typer.Option(min=1, help="queries to test with")] = 500,
    stretch: Stretch = 25,
    threads: Threads = None,
    seed: Seed = 0,
    out: Out = Path("head-scaling"),
) -> None:
    """What `softsieve head bench` measures, on made-up heads of any shape: how time and success go with d or n."""
    out = stem(out, "head-scaling")
    with watched(out) as progress:
        from benchmarks import head_scaling as suite
        from softsieve.comparisons.head_methods import NOTE

        check_promise(eps, delta)
        chosen: dict[str, Any] = {
            "rank": rank,
            "methods": method,
            "ks": k,
            "eps": eps,
            "deltas": delta,
            "calibration": calibration,
            "test_queries": test_queries,
            "stretch": stretch,
            "seed": seed,
        }
        set_threads(threads)
        rows = suite.scaling(n, d, **chosen, progress=progress)
        write(out, "head-scaling", {"n": n, "d": d, **chosen, "note": NOTE}, rows, suite.draw(rows))
    say(out, rows, "head", method)


def _prompts(model: Path, index: Path | None, text: Path, count: int, tokens: int) -> list[list[int]]:
    """Pieces of a text as tokens, beginning as those did that the index of a model was made of."""
    from softsieve.integrations.hidden_states import load_tokenizer, tokens_of
    from softsieve.integrations.vllm.index_folder import read_states
    from softsieve.integrations.vllm.settings import BESIDE
    from softsieve.tasks.files import read_text

    first = read_states(index or model / BESIDE)[1]["first"]
    ids = tokens_of(load_tokenizer(str(model)), read_text(text), count=count * 4 * tokens, place=str(text))
    return [
        [*([] if first == "none" else [int(first)]), *part[:tokens].tolist()] for part in torch.split(ids, 4 * tokens)
    ]


@app.command()
def vllm(
    model: Annotated[Path, typer.Option(help="folder of a model with its index, see docs/guides/vllm.md")],
    text: Annotated[Path, typer.Option(help="a UTF-8 file, other than that of the index, whose lines are prompts")],
    index: Annotated[Path | None, typer.Option(help="the index, where it is not beside the model")] = None,
    batch: Annotated[list[int], typer.Option(min=1, help="sequences at a time; several")] = [1, 2, 4, 8, 16],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=2, help="that are written after each prompt")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of each prompt")] = 32,
    texts: Annotated[int, typer.Option(min=1, help="over which answers are compared")] = 5,
    text_tokens: Annotated[int, typer.Option(min=2, help="of each of these")] = 200,
    eager: Annotated[bool, typer.Option(help="layers without torch.compile: starts sooner")] = False,
    cpu_time: Annotated[
        bool, typer.Option(help="of the process instead of wall-clock: for a busy machine, and one thread")
    ] = False,
    repeats: Repeats = 5,
    out: Record = None,
) -> None:
    """Tokens a second in vLLM with the adaptive and with the exact head, and how their answers compare."""
    from benchmarks import vllm_engine as suite

    console, load = Console(soft_wrap=True, highlight=False), os.getloadavg()[0]
    with one_line():
        prompts = _prompts(model, index, text, max(max(batch) * (repeats + 1), texts), prompt_tokens)
        now = time.process_time if cpu_time else time.perf_counter
        engine = suite.Engine(str(model), eager=eager, index=None if index is None else str(index), now=now)
        results = []
        for size in batch:
            results.append(suite.speed(engine, prompts, batch=size, tokens=tokens, repeats=repeats))
            console.print(f"batch {size}: {results[-1].faster:.2f}x")
        judged = suite.quality(engine, prompts[:texts], tokens=text_tokens)
    columns: Columns = {
        "batch": lambda r: str(r.batch),
        "tokens/s": lambda r: f"{r.tokens_s:.1f}",
        "exact": lambda r: f"{r.exact_tokens_s:.1f}",
        "faster": lambda r: f"{r.faster:.2f}x ({r.least:.2f} to {r.most:.2f})",
        "adaptive": lambda r: f"{r.adaptive:.0%}",
        "step ms": lambda r: f"{r.step_ms:.1f} / {r.exact_step_ms:.1f}",
        "head ms": lambda r: f"{r.head_ms:.1f} / {r.exact_head_ms:.1f}",
        "sampler ms": lambda r: f"{r.sampler_ms:.1f} / {r.exact_sampler_ms:.1f}",
    }
    console.print(table(results, columns, title=f"{model.name}: adaptive / exact head"))
    console.print(", ".join(f"{name} {value:.4g}" for name, value in judged._asdict().items()))
    settings: dict[str, Any] = {
        "model": model.name,
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
        "eager": eager,
        "clock": "CPU time of the process" if cpu_time else "wall-clock",
        "threads": torch.get_num_threads(),
        "load_before": load,  # processes that were at work, over a minute: on an idle machine about 0
        "crossover": {str(k): most for k, most in engine.serving.batches.items()},
        "quality": judged._asdict(),
    }
    _write(console, out, "vllm", settings, results)


@app.command()
def calibration(
    shape: Annotated[list[str], typer.Option(help="ROWSxSIZE; several")] = ["151936x1536", "262144x640"],  # noqa: B006
    rank: Annotated[int, typer.Option(min=1, help="effective rank of hidden states")] = 64,
    k: Annotated[list[int], typer.Option(min=1, help="that are calibrated in one call; several")] = [1, 8],  # noqa: B006
    delta: Delta = 0.01,
    queries: Annotated[int, typer.Option(min=2, help="to calibrate with, and as many others to build with")] = 10_000,
    test_queries: Annotated[int, typer.Option(min=1, help="other queries to test with")] = 1000,
    threads: Threads = None,
    seed: Seed = 0,
    out: Record = None,
) -> None:
    """Seconds to build, calibrate and open a made-up head, what it takes of a process, and how often it is right."""
    from benchmarks import calibration as suite

    sizes = [_sizes(one, "151936x1536") for one in shape]
    check_promise(0.3, [delta])
    set_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    chosen: dict[str, Any] = {"rank": rank, "ks": k, "delta": delta, "queries": queries, "seed": seed}
    results = []
    with console.status("compiling") as status, one_line():
        compiled = suite.compile_kernels(k)
        for n, d in sizes:
            one = suite.measure(n, d, **chosen, test=test_queries, say=lambda what: status.update(what))
            results.append(one)

    def shares(name: str) -> Callable[[Any], str]:
        return lambda r: ", ".join(f"{number}: {value:.2%}" for number, value in getattr(r, name).items())

    columns: Columns = {
        "head": lambda r: f"{r.n} x {r.d}",
        "used": lambda r: f"{r.used} of {r.queries}",
        "build s": lambda r: f"{r.build_s:.1f}",
        "calibrate s": lambda r: f"{r.calibrate_s:.1f}",
        "together": lambda r: f"{r.whole_s:.1f}",
        "open s": lambda r: f"{r.open_s:.2f}",
        "file MB": lambda r: f"{r.file_mb:.0f}",
        "MB a process": lambda r: f"{r.process_mb:.1f}",
        "right, by k": shares("right"),
        "read, by k": shares("read"),
    }
    console.print(table(results, columns, title=f"calibration with {queries} queries, delta {delta:g}"))
    console.print(f"compiling took {compiled:.1f} s; next to nothing where it was done before")
    settings = {**chosen, "test_queries": test_queries, "threads": torch.get_num_threads(), "compile_s": compiled}
    _write(console, out, "calibration", settings, results)


@app.command("head-batches")
def head_batches(
    head: Annotated[Path, typer.Argument(help="a file of `softsieve head extract`")],
    batch: Annotated[list[int], typer.Option(min=1, help="queries at a time; several")] = [1, 4, 8],  # noqa: B006
    k: Annotated[int, typer.Option(min=1, help="softmax values asked for")] = 1,
    eps: Eps = 0.3,
    delta: Delta = 0.01,
    calibration: Annotated[int, typer.Option(min=2, help="states of each text to calibrate with, at most")] = 4000,
    test_queries: Annotated[int, typer.Option(min=64, help="states of each text to test with, at most")] = 480,
    threads: Threads = None,
    seed: Seed = 0,
    out: Record = None,
) -> None:
    """Time of several queries at a time on a CPU: the cascade beside the exact product in bf16."""
    from benchmarks import head_batches as suite
    from softsieve.integrations.head_file import read_head

    check_promise(eps, [delta])
    set_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    chosen: dict[str, Any] = {"batches": batch, "k": k, "eps": eps, "delta": delta, "calibration": calibration}
    chosen |= {"test_queries": test_queries, "seed": seed}
    with console.status("reading") as status, one_line():
        layer, notes = read_head(head)
        results = suite.measure(layer, **chosen, say=lambda what: status.update(what))
    columns: Columns = {
        "corpus": lambda r: r.corpus,
        "batch": lambda r: str(r.batch),
        "method": lambda r: r.method,
        "ms": lambda r: f"{r.ms:.2f}",
        "mean, p99": lambda r: f"{r.ms_mean:.2f}, {r.ms_p99:.2f}",
        "product": lambda r: f"{r.mean_over_product:.2f}x",
        "whole": lambda r: f"{r.mean_over_whole:.2f}x",
        "right": lambda r: f"{r.right:.2%}" if r.method == suite.OURS else "",
    }
    title = f"{notes.get('model', head.name)}, top {k}, eps {eps}, delta {delta}, {torch.get_num_threads()} threads"
    left = ("corpus", "method")
    console.print(table(results, columns, title=title, left=left, ends=lambda r: r.method == suite.OURS))
    settings = {**chosen, "head": notes.get("model", head.name), "threads": torch.get_num_threads()}
    _write(console, out, "head-batches", settings, results)


@app.command("vllm-load")
def vllm_load(
    model: Annotated[Path, typer.Option(help="folder of a model with its index beside it")],
    text: Annotated[Path, typer.Option(help="a UTF-8 file whose pieces are prompts")],
    clients: Annotated[int, typer.Option(min=1, help="that ask at the same time")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="for which they go on asking")] = 600.0,
    tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of each prompt")] = 32,
    adaptive: Annotated[
        bool, typer.Option(help="only what the adaptive head can answer, and it does at any batch size")
    ] = False,
    out: Record = None,
) -> None:
    """vLLM's server with the adaptive head: clients for some minutes, then killed and started again."""
    from benchmarks import vllm_load as suite

    console = Console(soft_wrap=True, highlight=False)
    with one_line():
        prompts = _prompts(model, None, text, 32, prompt_tokens)
        result = suite.measure(model, prompts, clients=clients, seconds=seconds, tokens=tokens, adaptive=adaptive)
    for name, value in result._asdict().items():
        console.print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    settings = {"model": model.name, "prompt_tokens": prompt_tokens, "tokens": tokens, "adaptive": adaptive}
    _write(console, out, "vllm-load", settings, [result])
