"""A language model fine-tuned on a text with its logits and without them: cost of a step, loss curve, held-out text."""

from __future__ import annotations

import copy
import math
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.lm_rivals import rival_loss
from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError
from softsieve.extras import package
from softsieve.integrations.causal_loss import CausalLoss, accelerate_loss, loss_of, restore_loss

HELD_OUT = 0.1  # share of the text, its end
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")  # layers with LoRA, as most models name them
SMOOTH = 5  # steps that a curve is the mean of
COLUMNS = (
    "way", "delta", "seconds", "ratio", "mb", "step_seconds", "step_mb", "loss", "apart", "solved", "perplexity",
    "accuracy",
)  # fmt: skip
EMPTY: dict[str, Any] = dict.fromkeys(COLUMNS)


class Way(NamedTuple):
    """How a model is trained: with its logits, compiled or not, without them, or by the loss of another package."""

    name: str
    delta: float | None = None
    compiled: bool = False
    rival: bool = False
    memory: int | None = None  # bytes that ours may take

    @property
    def exact(self) -> bool:
        """Whether its loss is that of the logits, computed in another way."""
        return self.compiled or self.rival or self.delta == 1


def autocast(model: Any, precision: str) -> torch.autocast:
    """Products in ``precision``, with weights that stay in float32."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bfloat16")


def adapt(model: Any, rank: int, seed: int) -> Any:
    """The model with LoRA on its attention and its output layer, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[*ADAPTED]))


def random_model(folder: str, dtype: torch.dtype, seed: int) -> Any:
    """A model with the sizes of a folder's ``config.json`` and random weights, on a GPU if there is one."""
    transformers: Any = package("transformers", f"model {folder}")
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


class Windows(NamedTuple):
    """A text as rows of tokens: what is trained on, in order, and what is held out."""

    training: Tensor  # (steps, rows, length)
    held_out: Tensor  # (rows, length)


def ways(deltas: Sequence[float], compiled: bool, rivals: Sequence[str] = (), memory: int | None = None) -> list[Way]:
    """All that are trained and timed: dense, compiled, other packages, and ours.

    The first of ours also with ``memory`` in MB, and with that inside torch.compile.
    """
    ours = [Way(f"ours, delta {delta:g}", delta) for delta in deltas]
    first = ours[:1]
    if memory is not None:
        first = [way._replace(name=f"{way.name}, {memory} MB", memory=memory * 10**6) for way in first]
        ours += first
    ours += [way._replace(name=f"{way.name}, compiled", compiled=True) for way in first if compiled]
    others = [Way(name, rival=True) for name in rivals]
    return [Way("dense"), *([Way("torch.compile", compiled=True)] if compiled else []), *others, *ours]


def prepare(model: Any, way: Way) -> Any:
    """What is called to train a model; where our loss is compiled, a copy of it that keeps that loss."""
    if not way.compiled:
        return model
    if way.delta is not None:
        model = copy.deepcopy(model)
        accelerate_loss(model, way.delta, memory=way.memory)
    return torch.compile(model)


@contextmanager
def training(called: Any, way: Way) -> Iterator[CausalLoss | None]:
    """Our loss in a model while this lasts, where a way has it."""
    if way.delta is None or way.compiled:
        forward = None if way.delta is None else loss_of(called)
        yield None if forward is None else forward.loss
        return
    loss = accelerate_loss(called, way.delta, memory=way.memory)
    try:
        yield loss
    finally:
        restore_loss(called)


def inside(called: Any) -> Any:
    """The model that was compiled, or the model."""
    return getattr(called, "_orig_mod", called)


def batch_loss(called: Any, way: Way, ids: Tensor) -> Any:
    """The loss of a batch of tokens, while `training` lasts."""
    return rival_loss(way.name, called, ids) if way.rival else called(input_ids=ids, labels=ids).loss


def cut(tokens: Tensor, *, steps: int, batch: int, length: int, held_out: int, seed: int) -> Windows:
    """Windows of a text: for training drawn at random from its beginning, held out are those of its end.

    Raises:
        InputError: for a text that is too short.
    """
    border = int(len(tokens) * (1 - HELD_OUT))
    if border < 2 * length or len(tokens) - border < held_out * length:
        raise InputError(f"text: expected {max(10 * held_out, 3) * length} tokens at least, found {len(tokens)}")
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(border - length, (steps, batch, 1), generator=draw)
    later = tokens[border : border + held_out * length].view(held_out, length)
    return Windows(tokens[starts + torch.arange(length)], later)


class Peak:
    """The most memory in use while it lasts, above what was in use before: that of a GPU, else of the process."""

    def __init__(self, device: str) -> None:
        self.device, self.mb = device, 0.0
        self._most, self._over = 0.0, threading.Event()

    @staticmethod
    def _resident() -> float:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * 4096 / 1e6

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, self._resident())

    def __enter__(self) -> Peak:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / 1e6
            return self
        self._before = self._most = self._resident()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            self._most = torch.cuda.max_memory_allocated() / 1e6
        else:
            self._over.set()
            self._thread.join()
        self.mb = self._most - self._before


def cost(
    calls: Mapping[Way, Any], windows: Windows, *, rounds: int, precision: str, progress: ProgressCallback = no_progress
) -> dict[str, dict[str, float]]:
    """Seconds and MB of forward and backward pass of each way, in turn: medians over the rounds."""
    found: dict[str, dict[str, list[float]]] = {way.name: {"seconds": [], "mb": []} for way in calls}
    for number in range(rounds + 2):  # the first two are to warm up
        for way, called in calls.items():
            model = inside(called).train()
            device = model.device.type
            batch = windows.training[number % len(windows.training)].to(device)
            model.zero_grad(set_to_none=False)
            with training(called, way), Peak(device) as peak:
                start = time.perf_counter()
                with autocast(model, precision):
                    loss = batch_loss(called, way, batch)
                loss.backward()
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
            if number > 1:
                found[way.name]["seconds"].append(seconds)
                found[way.name]["mb"].append(peak.mb)
            progress(f"cost, {way.name}", 0.5 / (len(calls) * (rounds + 2)))
    return {name: {key: statistics.median(values) for key, values in each.items()} for name, each in found.items()}


@torch.no_grad()
def judge(model: Any, rows: Tensor, batch: int, precision: str) -> dict[str, float]:
    """Perplexity and next-token accuracy of held-out rows; the model has its own loss afterwards."""
    if loss_of(model) is not None:
        restore_loss(model)
    loss = accelerate_loss(model, 1.0, evaluate=True)
    model.eval()
    try:
        total = tokens = 0.0
        for some in torch.split(rows, batch):
            ids = some.to(model.device)
            count = ids.numel() - len(ids)
            with autocast(model, precision):
                total += float(model(input_ids=ids, labels=ids).loss) * count
            tokens += count
        return {"perplexity": math.exp(total / tokens), "accuracy": loss.summary(training=False)["token_accuracy"]}
    finally:
        restore_loss(model)


def train(
    called: Any, way: Way, windows: Windows, *, rate: float, precision: str, progress: ProgressCallback = no_progress
) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    """Fine-tune a model with AdamW: the median seconds of a step, its MB on a GPU, and the curve of the loss."""
    model = inside(called).train()
    device = model.device.type
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=device == "cuda")
    curve: list[dict[str, Any]] = []
    seconds: list[float] = []
    with training(called, way) as loss, Peak(device) as peak:
        for step, batch in enumerate(windows.training):
            start = time.perf_counter()
            with autocast(model, precision):
                value = batch_loss(called, way, batch.to(device))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            entry: dict[str, Any] = {"way": way.name, "step": step + 1, "loss": float(value.detach())}  # waits
            seconds.append(time.perf_counter() - start)
            seen = {} if loss is None else loss.summary()
            curve.append({**entry, "solved": seen.get("solved"), "token_accuracy": seen.get("token_accuracy")})
            progress(f"training, {way.name}", 1 / len(windows.training))
    return {"step_seconds": statistics.median(seconds), "step_mb": peak.mb if device == "cuda" else None}, curve


@torch.no_grad()
def restart(model: Any, start: Mapping[str, Tensor]) -> None:
    """Give a model the weights it began with, in their place, so that what is compiled stays so."""
    model.zero_grad(set_to_none=True)
    for name, value in model.state_dict().items():
        value.copy_(start[name])


def measure(
    model: Any, windows: Windows, *, deltas: Sequence[float], compiled: bool, rounds: int, rate: float, precision: str,
    rivals: Sequence[str] = (), memory: int | None = None, progress: ProgressCallback = no_progress,
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:  # fmt: skip
    """A row of each way and the points of its curve; the model is trained.

    First the model before training; then for the eager ways their costs, without a curve, and after these the whole
    rows; then the same for what is compiled, timed in turn with dense logits. So a run that is cut off has the most.
    """
    chosen = ways(deltas, compiled, rivals, memory)
    eager, late = [way for way in chosen if not way.compiled], [way for way in chosen if way.compiled]
    start = {name: value.clone() for name, value in model.state_dict().items()}
    size = windows.training.shape[1]
    yield {**EMPTY, "way": "before", **judge(model, windows.held_out, size, precision)}, []
    dense: list[dict[str, Any]] = []
    for group in (eager, late):
        calls = {way: prepare(model, way) for way in dict.fromkeys((*eager[:1], *group))} if group else {}
        each: ProgressCallback = lambda what, part: progress(what, part / 2)  # noqa: E731
        costs = cost(calls, windows, rounds=rounds, precision=precision, progress=each)
        rows = {way: _row(way, costs) for way in group}
        yield from ((row, []) for row in rows.values())
        for way, row in rows.items():
            restart(inside(calls[way]), start)
            step, curve = train(
                calls[way], way, windows, rate=rate, precision=precision,
                progress=lambda what, part: progress(what, part * 0.5 / len(chosen)),
            )  # fmt: skip
            dense = dense or curve
            found = judge(inside(calls[way]), windows.held_out, size, precision)
            yield {**row, **step, **outcome(way, curve, dense), **found}, curve


def _row(way: Way, costs: Mapping[str, dict[str, float]]) -> dict[str, Any]:
    """What a way costs, and its place for what training shows."""
    found = costs[way.name]
    return {
        **EMPTY,
        "way": way.name,
        "delta": way.delta,
        **found,
        "ratio": found["seconds"] / costs["dense"]["seconds"],
    }


def outcome(way: Way, curve: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Loss and solved share of the last ten steps, and how far the losses are from those of ``dense`` at most."""
    last = curve[-10:]
    solved = [point["solved"] for point in last if point["solved"] is not None]
    apart = max(abs(one["loss"] - other["loss"]) for one, other in zip(curve, dense, strict=True))
    loss = statistics.fmean(point["loss"] for point in last)
    return {
        "loss": loss,
        "apart": float(apart) if way.exact else None,
        "solved": statistics.fmean(solved) if solved else None,
    }


def draw(curves: Sequence[dict[str, Any]]) -> Any:
    """Curves of loss and of the solved share."""
    figure = new_figure(9, 3.5)
    names = [*dict.fromkeys(point["way"] for point in curves)]
    for panel, field in zip(figure.subplots(1, 2), ("loss", "solved"), strict=True):
        for number, name in enumerate(names):
            points = [point[field] for point in curves if point["way"] == name and point[field] is not None]
            means = [statistics.fmean(points[i : i + SMOOTH]) for i in range(0, len(points), SMOOTH)]
            if means:
                panel.plot([SMOOTH * (i + 1) for i in range(len(means))], means, f"C{number}", label=name)
        panel.set(xlabel="step", ylabel="training loss" if field == "loss" else "solved share")
    figure.axes[0].legend(fontsize="small")
    return figure
