"""A trained model as an ONNX file, compared with what it was made of before it is handed over."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import __version__
from softsieve._files import check_writable, replace_file
from softsieve.errors import InputError, first_line
from softsieve.extras import package
from softsieve.tasks.examples import Examples
from softsieve.tasks.hf import KeptBuckets
from softsieve.tasks.task import Task
from softsieve.training.run import load_model

TOLERANCE = 1e-4  # of a logit, relative to the largest one (at least 1), between onnxruntime and torch
LARGEST = 2**31 - 2**20  # bytes of one file: protobuf ends at 2 GiB
OUTPUT = "logits"
_DECISION = {
    "multilabel": "every label whose logit is above 0 (sigmoid above 0.5)",
    "tokens": "the largest logit of every word's first position; softmax gives probabilities",
}
_INPUTS = {
    "text": "`ids`, int32 (rows, n): hashed features of each text, padded with 0",
    "multilabel": "`ids`, int32 (rows, n): hashed features of each text, padded with 0",
    "tokens": "`ids`, int32 (rows, words, 4): hashed features of each word, padded with 0",
    "image": "`pixels`, uint8 (rows, 3, size, size): RGB images, resized",
    "audio": "`samples`, int16 (rows, samples): 8 kHz, mono, as loud as can be, cut or filled up with silence",
}


def export_onnx(folder: Path, out: Path) -> float:
    """Write the model of a folder, or of a run, as ONNX, and beside it, as Markdown, how it is called.

    The file takes any number of rows, and of texts any length. It holds the names of the labels in its metadata
    (``labels``, a JSON list), with ``kind`` and ``decision``. Before it is written, onnxruntime answers for rows of
    several lengths; nothing is written when a logit is further than `TOLERANCE` from torch's.

    Returns:
        The largest difference found, relative to the largest logit (at least 1).

    Raises:
        InputError: for a folder without a model, a model that ONNX cannot express, or a file that says something else.
    """
    if out.suffix != ".onnx":
        raise InputError(f"out: expected a file .onnx, found {out}")
    if out.is_dir():
        raise InputError(f"{out}: expected a file, found a folder")
    check_writable(out)
    onnx, onnxruntime = (package(name, "an ONNX file") for name in ("onnx", "onnxruntime"))
    package("onnxscript", "an ONNX file")
    task, model = load_model(folder, index=False)
    size = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    if size > LARGEST:
        raise InputError(
            f"{folder}: expected a model of at most 2 GB, which one ONNX file holds, found {size / 1e9:.1f}"
        )
    samples = [task.rows(sample_inputs(task, rows)).inputs for rows in (3, 2, 1)]
    proto = _convert(task, _expressible(model), samples[0], folder)
    onnx.helper.set_model_props(proto, _metadata(task))
    content = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    error = max(_difference(session, model, inputs) for inputs in samples)
    if not error <= TOLERANCE:
        raise InputError(
            f"{folder}: onnxruntime is {error:.1e} off, expected at most {TOLERANCE:.0e}: nothing is written"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    text = _describe(task, out, error)
    replace_file(out.with_name(f"{out.name}.md"), lambda part: part.write_text(text, encoding="utf-8"))
    replace_file(out, lambda part: part.write_bytes(content))
    return error


def sample_inputs(task: Task, rows: int) -> Examples:
    """Made-up inputs of a task, of several lengths, to compare two models with."""
    draw = np.random.default_rng(rows)
    words = [name for label in task.labels[:50] for name in (label.split() or ["a"])]
    made: list[Any] = []
    for row in range(rows):
        some = draw.choice(words, 3 + 4 * row).tolist()
        if task.kind == "image":
            made.append(draw.integers(0, 256, (20, 20, 3), dtype=np.uint8))
        elif task.kind == "audio":
            made.append((draw.normal(0, 0.1, 4000 * (row + 1)).astype(np.float32), 8000))
        else:
            made.append(some if task.kind == "tokens" else " ".join(some))
    return Examples(made, [], [f"sample {row}" for row in range(rows)])


class _Bag(nn.Module):
    """`nn.EmbeddingBag` that sums, as a gather and a sum, which ONNX has."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.weight, self.padding = bag.weight, bag.padding_idx

    def forward(self, ids: Tensor, offsets: None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        shares = torch.ones_like(ids, dtype=self.weight.dtype) if per_sample_weights is None else per_sample_weights
        if self.padding is not None:
            shares = shares * (ids != self.padding)
        return (F.embedding(ids, self.weight) * shares.unsqueeze(-1)).sum(1)


class _Named(nn.Module):
    """A model that takes its inputs in the order of their names."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Tensor) -> Tensor:
        logits: Tensor = self.model(**dict(zip(self.names, values, strict=True)))
        return logits


def _expressible(model: nn.Module) -> nn.Module:
    """A copy that computes the same by what ONNX has."""
    model = copy.deepcopy(model).float().eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.EmbeddingBag):
            model.set_submodule(name, _Bag(module))
        if isinstance(vars(module).get("relative_position_bucket"), KeptBuckets):
            del module.relative_position_bucket  # what is kept goes by lengths, which the file leaves open
    return model


def _convert(task: Task, model: nn.Module, inputs: dict[str, Tensor], folder: Path) -> Any:
    texts = task.kind in ("text", "multilabel", "tokens")
    free = torch.export.Dim.DYNAMIC
    shapes = tuple({0: free, 1: free} if texts else {0: free} for _ in inputs)
    silence, level = io.StringIO(), logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                _Named(model, list(inputs)), tuple(inputs.values()), dynamic_shapes=(shapes,), dynamo=True,
                input_names=list(inputs), output_names=[OUTPUT], verbose=False,
            )  # fmt: skip
        return program.model_proto  # type: ignore[union-attr]
    except Exception as error:  # the exporter raises anything for what it does not know
        raise InputError(f"{folder}: cannot be written as ONNX ({first_line(error)})") from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


@torch.no_grad()
def _difference(session: Any, model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Between the logits of the file and of the model, relative to the largest; infinite for another shape."""
    [theirs] = session.run([OUTPUT], {name: value.numpy() for name, value in inputs.items()})
    ours = model(**inputs).float()
    if tuple(theirs.shape) != tuple(ours.shape):
        return float("inf")
    error = (torch.from_numpy(theirs) - ours).abs().max() / ours.abs().max().clamp_min(1)
    return float("inf") if error.isnan() else float(error)


def _metadata(task: Task) -> dict[str, str]:
    settings = {name: getattr(task.encoder, name) for name in task.encoder.settings}
    return {
        "labels": json.dumps(task.labels, ensure_ascii=False),
        "kind": task.kind,
        "decision": _DECISION.get(task.kind, "the largest logit; softmax gives probabilities")
        + ("; a row without any has that of the largest logit" if task.least else ""),
        "preprocessing": json.dumps({"encoder": type(task.encoder).__name__, **settings}),
        "softsieve": __version__,
    }


def _describe(task: Task, out: Path, error: float) -> str:
    """How the file is called, as Markdown."""
    pretrained = type(task.encoder).__name__ == "PretrainedEncoder"
    inputs = "what the tokenizer gives, int64 (rows, tokens)" if pretrained else _INPUTS[task.kind]
    inputs_of = {"tokens": '[["some", "words"]]', "image": "[open_file.read()]", "audio": "[open_file.read()]"}
    return f"""# {out.name}

A classifier ({task.kind}) of {len(task.labels)} labels, written by softsieve {__version__}.

- inputs: {inputs}
- output: `{OUTPUT}`, float32 (rows, {"positions, " if task.kind == "tokens" else ""}{len(task.labels)})
- decision: {_metadata(task)["decision"]}
- labels: in the metadata of the file, `labels`, a JSON list in the order of the logits
- preprocessing: `{_metadata(task)["preprocessing"]}`
- checked with onnxruntime against torch: {error:.1e} off, relative to the largest logit; {TOLERANCE:.0e} is let pass

Inputs are made by the folder of the model, which softsieve reads:

```python
import json
from pathlib import Path

import onnxruntime
from softsieve.tasks.examples import Examples
from softsieve.tasks.task import Task

session = onnxruntime.InferenceSession("{out.name}")
labels = json.loads(session.get_modelmeta().custom_metadata_map["labels"])
task = Task.load(Path("FOLDER OF THE MODEL"))
rows = task.rows(Examples({inputs_of.get(task.kind, '["a text"]')}, [], ["the first"]))
[logits] = session.run(["{OUTPUT}"], {{name: value.numpy() for name, value in rows.inputs.items()}})
```
"""
