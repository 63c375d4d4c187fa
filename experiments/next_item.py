"""What users take next of tens of thousands of items: cross-entropy with logits and without, and the model served."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.measure import peak_bytes, times
from experiments.item_model import LOGITS, ItemModel, batch_loss, check_loss, last_states, metrics, ranks
from experiments.item_sequences import Split, leave_last_out, read_sequences
from experiments.training_runs import grouped, spread
from softsieve import _checks
from softsieve._files import only_one
from softsieve._progress import ProgressCallback, no_progress
from softsieve._records import provenance, write_text
from softsieve.comparisons.heads import measure
from softsieve.comparisons.output import beside, new_figure
from softsieve.errors import DivergedError, InputError, first_line, listed
from softsieve.integrations.hidden_states import Corpus, Head
from softsieve.tasks.files import read_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRIC = "ndcg@10"  # what validation chooses by
TOP = 10
TURNS = 5  # steps of each loss, when they are timed against each other
SERVED = ("success", "topk_right", "ms", "ms_p20", "ms_p80", "time_ratio", "bytes_mean", "exact_share", "build_s")
Run = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One training."""

    data: str
    loss: str  # "logits", or a delta
    seed: int = 0
    epochs: int = 3
    learning_rate: float = 3e-3
    batch: int = 128  # users
    size: int = 64
    layers: int = 2
    heads: int = 2
    length: int = 50
    dropout: float = 0.2
    weight_decay: float = 0.01
    exclude_seen: bool = False
    device: str = "cpu"
    precision: str = "no"
    serve: bool = False

    def __post_init__(self) -> None:
        check_loss(self.loss)
        for name in ("epochs", "batch", "size", "layers", "heads", "length"):
            _checks.whole_number(name, getattr(self, name), 1, 2**31)
        _checks.whole_number("seed", self.seed, 0, 2**63 - 1)
        _checks.positive("learning_rate", self.learning_rate)
        _checks.number("weight_decay", self.weight_decay, 0)
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout: expected a number in [0, 1), found {self.dropout}")
        if self.size % self.heads:
            raise InputError(f"size: expected a multiple of the {self.heads} heads, found {self.size}")
        _checks.choice("precision", self.precision, ("no", "bf16"))
        if self.device not in (known := ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]):
            raise InputError(f"device: expected one of {listed(known)} here, found {self.device!r}")

    @property
    def name(self) -> str:
        """Of its file; another configuration has another name."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"{Path(self.data).name.partition('.')[0]}-{self.loss}-{self.seed}-{digest}"

    def about(self) -> dict[str, Any]:
        """For a record, without the folder, which means nothing elsewhere."""
        return {**asdict(self), "data": Path(self.data).name}


@lru_cache(maxsize=1)
def read_split(data: str) -> Split:
    """The data of a job."""
    return leave_last_out(read_sequences(Path(data)), data)


def make_model(job: Job, items: int) -> tuple[ItemModel, torch.optim.Optimizer]:
    """A model to train, always the same for a seed."""
    torch.manual_seed(job.seed)
    sizes = {"size": job.size, "layers": job.layers, "heads": job.heads, "length": job.length}
    model = ItemModel(items, **sizes, dropout=job.dropout).to(job.device)
    return model, _optimizer(model, job)


def _optimizer(model: ItemModel, job: Job) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=job.weight_decay)


def step(model: ItemModel, optimizer: torch.optim.Optimizer, users: Sequence[Tensor], job: Job) -> tuple[float, ...]:
    """One optimizer step: its loss and the shares of solved and dense rows, 0 where the loss does not say.

    Raises:
        DivergedError: when the loss is not finite.
    """
    optimizer.zero_grad()
    with torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "bf16"):
        loss, solved, dense = batch_loss(model, users, job.loss)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    value = float(loss.detach())
    if not math.isfinite(value):
        raise DivergedError(f"{job.name}: the loss is {value}")
    return value, solved or 0.0, dense or 0.0


def batches(users: Sequence[Tensor], size: int, draw: torch.Generator) -> Iterator[list[Tensor]]:
    """All users once, in random order."""
    for numbers in torch.split(torch.randperm(len(users), generator=draw), size):
        yield [users[number] for number in numbers]


def train(job: Job, split: Split, progress: ProgressCallback = no_progress) -> Run:
    """One training, judged on validation after every epoch and on test as it was at the best of them."""
    model, optimizer = make_model(job, split.items)
    draw = torch.Generator().manual_seed(job.seed)
    some = next(batches(split.train, job.batch, torch.Generator().manual_seed(0)))  # to time steps with, in every run
    fresh = _turns(model, some, job)
    curve: list[dict[str, float]] = []
    best, kept = -1.0, copy.deepcopy(model.state_dict())
    seconds, cpu_seconds = [], []
    torch.manual_seed(job.seed)  # so that dropout does not depend on what was timed
    for epoch in range(1, job.epochs + 1):
        said = []
        for users in batches(split.train, job.batch, draw):
            start, cpu_start = time.perf_counter(), time.process_time()
            said.append(step(model, optimizer, users, job))
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
            progress(f"{job.name}, epoch {epoch}", job.batch / len(split.train) / job.epochs)
        judged = metrics(ranks(model, split.validation, exclude_seen=job.exclude_seen), TOP)
        means = [statistics.fmean(values) for values in zip(*said, strict=True)]
        curve.append({"epoch": epoch, **dict(zip(("loss", "solved", "dense"), means, strict=True)), **judged})
        if judged[METRIC] > best:
            best, kept = judged[METRIC], copy.deepcopy(model.state_dict())
    trained = _turns(model, some, job)
    model.load_state_dict(kept)
    return {
        **job.about(),
        "users": len(split.train),
        "asked": len(split.test.answers),
        "items": split.items,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": len(seconds),
        "step_s": statistics.median(seconds),
        "step_cpu_s": statistics.median(cpu_seconds),  # of all threads; does not grow when others share the machine
        "turns": {"fresh": fresh, "trained": trained},
        "best_epoch": max(curve, key=lambda line: line[METRIC])["epoch"],
        "validation_curve": curve,
        "validation": max(curve, key=lambda line: line[METRIC]),
        "test": metrics(ranks(model, split.test, exclude_seen=job.exclude_seen), TOP),
        "serving": serve(model, split, job.seed) if job.serve else [],
        "provenance": provenance(),
    }


def _turns(model: ItemModel, users: Sequence[Tensor], job: Job) -> dict[str, dict[str, float]]:
    """Milliseconds and memory of a step with this loss and with logits on the same users, which take turns."""
    jobs = [replace(job, loss=loss) for loss in dict.fromkeys((LOGITS, job.loss))]
    copies = [copy.deepcopy(model) for _ in jobs]
    optimizers = [_optimizer(one, job) for one in copies]
    calls = [
        lambda one=one, optimizer=optimizer, own=own: step(one, optimizer, users, own)
        for one, optimizer, own in zip(copies, optimizers, jobs, strict=True)
    ]
    taken = times(calls, repeats=TURNS, device=job.device)
    held = []
    for call, optimizer in zip(calls, optimizers, strict=True):
        optimizer.zero_grad()  # gradients are a part of what a step holds
        held.append(peak_bytes(call, device=job.device))
    return {
        own.loss: {"ms_p20": low, "ms": ms, "ms_p80": high, "peak_mb": held / 1e6}
        for own, (low, ms, high), held in zip(jobs, taken, held, strict=True)
    }


def serve(model: ItemModel, split: Split, seed: int, *, calibration: int = 4000, queries: int = 500) -> list[Run]:
    """`AdaptiveSoftmax` over the items, calibrated on validation states, beside the exact products on test states."""
    states = [last_states(model, part.histories).cpu() for part in (split.validation, split.test)]
    head = Head(model.weight.detach().cpu(), None, 1.0, None, {"users": Corpus(*states)})
    asked: dict[str, Any] = {"methods": ["cascade"], "ks": [TOP], "deltas": [0.01, 0.1], "seed": seed}
    points = measure(head, name="items", calibration=calibration, test_queries=queries, **asked)
    columns = ("method", "delta", "k", "queries", *SERVED, "index_mb")
    return [{name: getattr(point, name) for name in columns} for point in points]


# -- many of them ------------------------------------------------------------------------------------------------------


def make(
    jobs: Sequence[Job], out: Path, *, side_by_side: int = 1, progress: ProgressCallback = no_progress
) -> list[Run]:
    """The runs in their order; each is written to ``out``.runs when it is done, and what is there is not made again.

    Raises:
        InputError: when a file of a run is damaged, or a training diverges.
    """
    read_split(jobs[0].data)  # so that bad data are said before any process is started
    folder = beside(out, ".runs")
    files = {job: folder / f"{job.name}.json" for job in jobs}
    with only_one(folder, "training"):
        missing = [job for job, path in files.items() if not path.exists()]
        if side_by_side == 1:
            part: ProgressCallback = lambda what, share: progress(what, share / len(missing))  # noqa: E731
            for job in missing:
                _make_one(job, files[job], 1, part)
        else:
            _make_side_by_side(missing, files, side_by_side, progress)
        return [_read_run(path, job) for job, path in files.items()]


def _make_one(job: Job, path: Path, side_by_side: int, progress: ProgressCallback = no_progress) -> None:
    run = train(job, read_split(job.data), progress)
    write_text(path, json.dumps({**run, "side_by_side": side_by_side}) + "\n")
    gc.collect()


def _make_side_by_side(
    jobs: Sequence[Job], files: dict[Job, Path], side_by_side: int, progress: ProgressCallback
) -> None:
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    pool = ProcessPoolExecutor(side_by_side, context, torch.set_num_threads, (threads,))
    try:
        waiting = [pool.submit(_make_one, job, files[job], side_by_side) for job in jobs]
        for number, done in enumerate(waiting, 1):
            done.result()
            progress(f"{number} of {len(jobs)} runs", 1 / len(jobs))
    finally:
        pool.shutdown(cancel_futures=True)


def _read_run(path: Path, job: Job) -> Run:
    """What a run came to earlier; its file is removed to make it again."""
    try:
        run: Run = json.loads(read_text(path))
        for part in (run["test"], *run["validation_curve"]):
            _checks.number(METRIC, part[METRIC], 0, 1)
            _checks.number(f"hr@{TOP}", part[f"hr@{TOP}"], 0, 1)
        for name in ("step_s", "step_cpu_s"):
            _checks.positive(name, run[name])
        for when in ("fresh", "trained"):
            for loss in (LOGITS, job.loss):
                _checks.positive("ms", run["turns"][when][loss]["ms"])
                _checks.number("peak_mb", run["turns"][when][loss]["peak_mb"], 0)
        wrong = [name for name, value in job.about().items() if run[name] != value]
        summarise([run]), serving_rows([run]), choose([run])  # all that tables read is there
        split = read_split(job.data)
        if (run["users"], run["asked"], run["items"]) != (len(split.train), len(split.test.answers), split.items):
            raise ValueError("made with other data")
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{path}: damaged ({first_line(error)}): remove it to make the run again") from None
    if wrong:
        raise InputError(f"{path}: expected a run with {wrong[0]} {getattr(job, wrong[0])}, found {run[wrong[0]]}")
    return run


def choose(runs: Sequence[Run]) -> Run:
    """The best by validation."""
    return max(runs, key=lambda run: run["validation"][METRIC])


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A line for every loss: metrics over seeds, and what a step takes beside one with logits."""
    lines = []
    for loss, own in grouped(runs, lambda run: run["loss"]).items():
        line: dict[str, Any] = {"loss": loss if loss == LOGITS else f"delta {loss}", "seeds": len(own)}
        line["learning_rate"] = own[0]["learning_rate"]
        for part in ("validation", "test"):
            for name in (METRIC, f"hr@{TOP}"):
                line |= spread(f"{part}_{name}", [run[part][name] for run in own])
        line["best_epoch"] = statistics.fmean(run["best_epoch"] for run in own)
        for share in ("solved", "dense"):
            line[share] = None if loss == LOGITS else statistics.fmean(r["validation_curve"][-1][share] for r in own)
        for name in ("step_s", "step_cpu_s"):
            line[name] = statistics.median(run[name] for run in own)
        for when in ("fresh", "trained"):
            turns = [run["turns"][when] for run in own]
            line[f"{when}_ms"] = statistics.median(turn[loss]["ms"] for turn in turns)
            line[f"{when}_ratio"] = statistics.median(turn[loss]["ms"] / turn[LOGITS]["ms"] for turn in turns)
        line["peak_mb"] = max(turn[loss]["peak_mb"] for run in own for turn in run["turns"].values())
        lines.append(line)
    return lines


def shown(line: dict[str, Any]) -> dict[str, Any]:
    """A line of `summarise` for a terminal: metrics of test in percent, and a step beside one with logits."""
    columns = {"loss": line["loss"], "seeds": line["seeds"]}
    for name in (METRIC, f"hr@{TOP}"):
        columns[f"test {name}"] = f"{100 * line[f'test_{name}']:.2f} ± {100 * line[f'test_{name}_deviation']:.2f}"
    for when in ("fresh", "trained"):
        columns[f"{when}: ms a step"] = f"{line[f'{when}_ms']:.0f} ({line[f'{when}_ratio']:.2f}x)"
    return {**columns, "MB": f"{line['peak_mb']:.0f}", "solved": line["solved"], "dense": line["dense"]}


def serving_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A line for every way to ask every model that was served."""
    return [{"loss": run["loss"], "seed": run["seed"], **row} for run in runs for row in run["serving"]]


def draw(runs: Sequence[Run]) -> Figure:
    """Validation metrics against epochs; a band from the lowest to the highest seed."""
    figure = new_figure(10, 4)
    for panel, name in zip(figure.subplots(1, 2), (METRIC, f"hr@{TOP}"), strict=True):
        for loss, own in grouped(runs, lambda run: run["loss"]).items():
            curves = [[100 * line[name] for line in run["validation_curve"]] for run in own]
            epochs = range(1, len(curves[0]) + 1)
            label = "with logits" if loss == LOGITS else f"without, delta {loss}"
            (drawn,) = panel.plot(
                epochs, [statistics.fmean(points) for points in zip(*curves, strict=True)], label=label
            )
            low, high = ([pick(points) for points in zip(*curves, strict=True)] for pick in (min, max))
            panel.fill_between(epochs, low, high, color=drawn.get_color(), alpha=0.15, lw=0)
        panel.set(xlabel="epoch", ylabel=f"validation {name.upper()} %")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(fontsize="small")
    return figure
