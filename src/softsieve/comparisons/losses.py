"""Losses x seeds x data sets: every run once, each in a file of its own, and a table of them all."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import signal
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from softsieve import _checks
from softsieve._files import check_writable
from softsieve._records import provenance, write_record, write_text
from softsieve.comparisons.output import beside
from softsieve.comparisons.recipes import BASELINE, ROWS
from softsieve.errors import DivergedError, InputError, first_line
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL
from softsieve.tasks.examples import Data
from softsieve.tasks.files import read_text
from softsieve.tasks.hf import read_hidden_size
from softsieve.tasks.presets import PRESETS, load_preset
from softsieve.tasks.read import hold_out, read_data
from softsieve.tasks.task import Task
from softsieve.training.recipes import recipe, usual
from softsieve.training.run import Splits, encode, train
from softsieve.training.settings import PLAIN, Settings

Outcome = dict[str, Any] | str  # what a run came to, or why it failed
TEST_SHARE = 5  # of the rows of data without a test part, one in so many
CURVES = ("training_curve", "validation_curve")  # what a run says of its way; earlier versions said nothing


@dataclass(frozen=True)
class Job:
    """One run: a row of the table on one data set with one seed."""

    task: str  # a preset, or a file or folder of data
    row: str
    settings: Settings
    model: str | None  # name or folder of a pretrained encoder; None: the built-in one
    max_length: int | None  # None: as `Task.build` has it
    data_dir: str
    trial: bool = False  # of a search: judged on validation rows alone

    @property
    def name(self) -> str:
        """Of its file; another configuration has another name."""
        said = [self.settings.asdict(), self.model, self.max_length]
        if self.task not in PRESETS:
            said.append(str(Path(self.task).resolve()))  # files of one name may be in many folders
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]
        return f"{Path(self.task).stem}-{self.row}-{'trial' if self.trial else self.settings.seed}-{digest}"


def plan(
    tasks: Sequence[str],
    rows: Sequence[str] | None,
    seeds: Sequence[int],
    *,
    model: str | None,
    max_length: int | None,
    data_dir: Path,
    overrides: dict[str, Any],
) -> list[Job]:
    """All runs of a comparison, data set by data set and seed by seed; rows that are None: all whose loss fits.

    Raises:
        InputError: when there are no rows, data sets or seeds, names are the same, or a row is unknown or has a loss
            for labels of another kind.
        TypeError, ValueError: when a setting has a wrong type or value.
    """
    for what, given in {"task": tasks, "row": rows, "seeds": seeds}.items():
        if given is not None and not given:
            raise InputError(f"{what}: expected at least one, found none")
    for row in rows or ():
        if row not in ROWS:
            raise InputError(f"row: expected one of {', '.join(ROWS)}, found {row!r}")
    for what, names in {"task": [Path(task).name for task in tasks], "row": rows or ()}.items():
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{what}: expected different names, found {name!r} more than once")
    size = None if model is None else read_hidden_size(model)
    recipes, fitting = {}, {}
    for task in tasks:
        if task in PRESETS:
            recipes[task] = recipe(task, hidden_size=size)
        else:
            recipes[task] = usual(read_task(task, str(data_dir)), hidden_size=size)
        fitting[task] = fitting_rows(task, str(data_dir))
        for row in rows or ():
            if row not in fitting[task]:
                fit = ", ".join(fitting[task])
                raise InputError(f"row: expected one of {fit} for the labels of {Path(task).name}, found {row!r}")
    return [
        Job(
            task,
            row,
            Settings(**{**PLAIN, **recipes[task], **overrides, **ROWS[row], "seed": seed}),
            model,
            max_length,
            str(data_dir),
        )
        for task in tasks
        for seed in seeds
        for row in (fitting[task] if rows is None else rows)
    ]


def fitting_rows(task: str, data_dir: str) -> list[str]:
    """The rows whose loss is one for the labels of these data."""
    kind = PRESETS[task].kind if task in PRESETS else read_task(task, data_dir).kind
    losses = MULTI_LABEL if kind == "multilabel" else SINGLE_LABEL
    return [row for row, settings in ROWS.items() if settings["loss"] in losses]


@lru_cache(maxsize=1)  # jobs come data set by data set
def read_task(task: str, data_dir: str) -> Data:
    """The data of a comparison; of one's own without test rows, every fifth row is one, always the same."""
    data = load_preset(task, Path(data_dir)) if task in PRESETS else read_data(task)
    if data.test is None:
        kept, held_out = hold_out(data, max(1, len(data.train.inputs) // TEST_SHARE), seed=0)
        note = f"{task}: no test rows were given; {len(held_out.inputs)} rows are held out for the test"
        data = data._replace(train=kept, test=held_out, notes=(*data.notes, note))
    return data


@lru_cache(maxsize=1)
def _prepare(task: str, model: str | None, max_length: int | None, data_dir: str) -> tuple[Task, Splits]:
    data = read_task(task, data_dir)
    built = Task.build(data, model=model, max_length=max_length)
    return built, encode(built, data.train, data.validation, data.test)


def run_job(job: Job) -> dict[str, Any]:
    """Make one run and say what it came to."""
    task, splits = _prepare(job.task, job.model, job.max_length, job.data_dir)
    if job.trial:
        splits = splits._replace(test=None)
    run = train(task, splits, job.settings)
    gc.collect()  # a trainer and its graphs refer to each other, and the next run wants the memory
    result = run.result
    return {
        "task": Path(job.task).name,
        "row": job.row,
        "seed": job.settings.seed,
        "model": Path(job.model).name if job.model else "built-in",
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "test": run.test,
        "validation": result.best,
        **{name: getattr(result, name) for name in ("seconds", "evaluation_seconds", "steps", "best_step")},
        "trained_rows": result.trained,
        "screened_rows": result.screened,
        "solved": [line["solved"] for line in result.log if "solved" in line],
        **_curves(result.log),
        "settings": job.settings.asdict(),
        "max_length": task.max_length,
        "rows": {name: len(part) for name, part in splits._asdict().items() if part is not None},
        "classes": len(task.labels),
        "provenance": provenance(),
    }


def _curves(log: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """What the log says on the way: how far training was at each of its lines, and every evaluation."""
    wanted = ("step", "progress", "samples", "solved")
    training = [{name: line[name] for name in wanted if name in line} for line in log if line["kind"] == "train"]
    judged = [line for line in log if line["kind"] == "validation"]
    validation = [{name: value for name, value in line.items() if name != "kind"} for line in judged]
    return dict(zip(CURVES, (training, validation), strict=True))


def _worker(job: Job) -> tuple[Job, Outcome]:
    """What a run came to, or why it failed: one that does must not take a night's others with it."""
    try:
        return job, run_job(job)
    except Exception as error:
        return job, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _alone(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process, not just the run it is at
    torch.set_num_threads(threads)


def run_all(jobs: Sequence[Job], folder: Path, *, side_by_side: int = 1) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Make the runs that ``folder`` does not hold yet, each written there when it is done, and yield them all.

    Raises:
        InputError: when ``folder`` cannot be written to, before anything is made; at the end, when runs failed, saying
            how many and why the first did.
    """
    failed = []
    for job, result in run_each(jobs, folder, side_by_side=side_by_side):
        if isinstance(result, str):
            failed.append(f"{job.name}: {result}")
        else:
            yield job, result
    if failed:
        raise InputError(f"{len(failed)} of {len(jobs)} runs failed, the first: {failed[0]}")


def run_each(jobs: Sequence[Job], folder: Path, *, side_by_side: int = 1) -> Iterator[tuple[Job, Outcome]]:
    """Like `run_all`, with the runs that fail among the others. A trial that diverges is not tried again."""
    check_writable(folder / "run.json")
    files = {job: folder / f"{job.name}.json" for job in jobs}
    made = [job for job, path in files.items() if path.exists()]
    yield from ((job, _read_run(files[job], job)) for job in made)
    for job, result in _results([job for job in files if job not in made], side_by_side):
        if isinstance(result, dict):
            result["side_by_side"] = side_by_side
            write_text(files[job], json.dumps(result) + "\n")
        elif job.trial and result.startswith(DivergedError.__name__):
            write_text(files[job], json.dumps({"failed": result}) + "\n")
        yield job, result


def _read_run(path: Path, job: Job) -> Outcome:
    """What a run came to earlier.

    Raises:
        InputError: when the file is damaged; without it the run is made again.
    """
    wrong = "cannot be read"
    try:
        run: dict[str, Any] = json.loads(read_text(path))
        wrong = "damaged"
        if job.trial and "failed" in run:
            return str(run["failed"])
        if job.trial:
            _check_trial(run, job.settings.metric)
        else:
            _check_run(run)
    except InputError:
        raise
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {wrong} ({first_line(error)}): remove it to make the run again") from None
    return run


def _check_trial(run: Any, metric: str) -> None:
    """Refuse what says nothing of a trial's merit."""
    for name in ("loss", metric):
        _checks.number(name, run["validation"][name], -1e300, 1e300)
    _checks.positive("seconds", run["seconds"])


def _check_run(run: Any) -> None:
    """Refuse what no table can be made of, by errors of Python that name what is missing or wrong."""
    settings, made = run["settings"], run["provenance"]
    numbers = {name: run[name] for name in ("seconds", "steps", "trained_rows", "screened_rows", "side_by_side")}
    numbers |= {name: settings[name] for name in ("epochs", "batch_size", "learning_rate", "delta")}
    for name, value in {**numbers, **run["test"], **run["rows"]}.items():
        _checks.number(name, value, -1e300, 1e300)
    _checks.positive("seconds", run["seconds"])
    _checks.whole_number("seed", run["seed"], 0, 2**63)
    names = [run["task"], run["model"], settings["precision"], *made["machine"], made["versions"]["torch"]]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"expected names, found {names}")
    _checks.choice("row", run["row"], ROWS)
    for line in (line for name in CURVES for line in run.get(name, [])):
        for name, value in line.items():
            _checks.number(name, value, -1e300, 1e300)
    for name in ("commit", "gpu"):
        if not isinstance(made[name], str | None):
            raise TypeError(f"{name}: expected a name, found {type(made[name]).__name__}")
    hash(machine_of(run))
    markdown([run], "")


def _results(jobs: Sequence[Job], side_by_side: int) -> Iterator[tuple[Job, Outcome]]:
    if side_by_side == 1:
        yield from map(_worker, jobs)
        return
    threads = max(1, (os.cpu_count() or 1) // side_by_side)
    pool = ProcessPoolExecutor(side_by_side, multiprocessing.get_context("spawn"), _alone, (threads,))
    try:
        waiting = {pool.submit(_worker, job): job for job in jobs}
        for done in as_completed(waiting):
            try:
                yield done.result()
            except BrokenProcessPool:
                yield waiting[done], "a process was killed, maybe for want of memory: try fewer side by side"
    finally:
        pool.shutdown(cancel_futures=True)


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for every data set and row: means over seeds, and the paired test against the baseline."""
    lines = []
    for task in dict.fromkeys(run["task"] for run in runs):
        by_row = {row: {r["seed"]: r for r in runs if r["task"] == task and r["row"] == row} for row in ROWS}
        lines += [_summary(task, row, by_seed, by_row[BASELINE]) for row, by_seed in by_row.items() if by_seed]
    return lines


def _summary(task: str, row: str, by_seed: dict[int, Any], baseline: dict[int, Any]) -> dict[str, Any]:
    runs = [by_seed[seed] for seed in sorted(by_seed)]
    metric = runs[0]["settings"]["metric"]
    scores = [run["test"][metric] for run in runs]
    p = speed = None
    shared = sorted(by_seed.keys() & baseline.keys())
    if row != BASELINE and shared:
        ours, theirs = ([some[seed] for seed in shared] for some in (by_seed, baseline))
        p = _paired([run["test"][metric] for run in ours], [run["test"][metric] for run in theirs])
        # Times compare only on one machine that as many runs shared.
        if len(set(map(machine_of, (*ours, *theirs)))) == 1:
            speed = _median("seconds", theirs) / _median("seconds", ours)
    return {
        "task": task,
        "row": row,
        "metric": metric,
        "seeds": len(scores),
        "mean": statistics.mean(scores),
        "deviation": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "p": p,
        "speed": speed,
        "seconds": _median("seconds", runs),
        "side_by_side": max(run["side_by_side"] for run in runs),
        "settings": tuned(runs[0]["settings"]),
        **{name: statistics.mean(r[name] for r in runs) for name in ("steps", "trained_rows", "screened_rows")},
    }


def tuned(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of all settings, those that a search chooses: learning rate, epochs, and the loss's own parameter.

    Example:
        >>> tuned(Settings(loss="am-softmax", loss_options={"margin": 0.2}).filled().asdict())
        {'epochs': 3, 'learning_rate': 5e-05, 'margin': 0.2}
    """
    names = ("epochs", "learning_rate", *(("delta",) if settings.get("loss") == "as-softmax" else ()))
    return {**{name: settings[name] for name in names if name in settings}, **(settings.get("loss_options") or {})}


def say_settings(settings: Mapping[str, float]) -> str:
    """In words: epochs 8, learning rate 0.0001."""
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in settings.items())


def _median(name: str, runs: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(run[name] for run in runs))


def machine_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """The machine of a run, and how many shared it."""
    made = run["provenance"]
    return run["side_by_side"], made["gpu"], *made["machine"].values()


def _paired(scores: Sequence[float], base: Sequence[float]) -> float | None:
    """Two-sided p of the paired t-test; None where it says nothing."""
    from scipy.stats import ttest_rel

    if len(scores) < 2 or len({a - b for a, b in zip(scores, base, strict=True)}) == 1:
        return None
    return float(ttest_rel(scores, base).pvalue)


def markdown(runs: Sequence[dict[str, Any]], command: str) -> str:
    """The table for people, with what it was made with."""
    made = [run["provenance"] for run in runs]
    commits, machines = _each(m["commit"] for m in made), _each(m["gpu"] or m["machine"]["processor"] for m in made)
    text = [
        f"Made with\n\n```\n{command}\n```\n",
        f"at commit {commits} on {machines}, torch {_each(m['versions']['torch'] for m in made)}.\n"
        "Mean and standard deviation over seeds on the test rows, at the best validation epoch; p: paired t-test\n"
        f"against {BASELINE} over the same seeds; seconds: median wall time of training and validation, in brackets\n"
        f"how many runs shared the machine; speed: that of {BASELINE} over it; trained: rows that went forward and\n"
        "backward; screened: rows that went forward only, to see whether they are solved.\n",
    ]
    for task in dict.fromkeys(run["task"] for run in runs):
        own = [run for run in runs if run["task"] == task]
        run, settings = own[0], own[0]["settings"]
        rows = ", ".join(f"{count} {name}" for name, count in run["rows"].items())
        names = ("epochs", "batch_size", "learning_rate", "delta")
        same = [name for name in names if len({each["settings"][name] for each in own}) == 1]
        differ = len(same) < len(names) or any("loss_options" in each["settings"] for each in own)
        said = ", ".join(f"{name} {settings[name]:g}" for name in same)
        precision = "fp32" if settings["precision"] == "no" else settings["precision"]
        how = precision + (", CUDA graphs" if settings["graphs"] and run["provenance"]["gpu"] else "")
        how += ", compiled layers" if settings.get("compiled") else ""
        lines = summarise(own)
        most = max(line["seeds"] for line in lines)
        fewer = "".join(f", {line['row']} {line['seeds']}" for line in lines if line["seeds"] < most)
        text += [
            f"## {task}\n\n{run['model']}, {run['classes']} classes, rows: {rows}; {said}, {how}.",
            f"\n| | {settings['metric'].replace('_', ' ')} % | p | seconds | speed | steps | trained | screened |"
            + " settings |" * differ,
            "|---|---|---|---|---|---|---|---|" + "---|" * differ,
            *(_line(line) + f" {say_settings(line['settings'])} |" * differ for line in lines),
            f"\n{most} seeds{fewer}.\n",
        ]
    return "\n".join(text)


def _line(line: dict[str, Any]) -> str:
    p = "" if line["p"] is None else f"{line['p']:.3f}"
    speed = "" if line["speed"] is None else f"{line['speed']:.2f}x"
    beside = "" if line["side_by_side"] == 1 else f" ({line['side_by_side']} at a time)"
    return (
        f"| {line['row']} | {100 * line['mean']:.2f} ± {100 * line['deviation']:.2f} | {p} "
        f"| {line['seconds']:.1f}{beside} | {speed} "
        f"| {line['steps']:.0f} | {line['trained_rows']:.0f} | {line['screened_rows']:.0f} |"
    )


def _each(names: Iterable[Any]) -> str:
    return " and ".join(dict.fromkeys(map(str, names)))


def write_results(
    out: Path, runs: Sequence[dict[str, Any]], command: str, *, trials: Sequence[dict[str, Any]] = (), more: str = ""
) -> None:
    """``out``.json with everything and ``out``.md for people, with ``more`` at its end, each all or nothing."""
    results = [*summarise(runs), *runs, *trials]
    write_record(beside(out, ".json"), "compare", {"command": command}, results)
    text = markdown(runs, command) if runs else f"Made with\n\n```\n{command}\n```\n"
    write_text(beside(out, ".md"), text + more)
