"""A trained model behind HTTP: answers for texts, words, images and sounds, and a page to try it in a browser.

Annotations are values here, not text: FastAPI reads them.
"""

import base64
import binascii
import json
import threading
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from torch import Tensor

from softsieve import __version__
from softsieve.errors import InputError, shown
from softsieve.tasks.columns import read_input
from softsieve.tasks.examples import MEDIA, Examples
from softsieve.training.run import load_model
from softsieve.training.serving import answer, decide, probabilities

LARGEST_BODY = 16 * 2**20  # bytes of a request
MOST_INPUTS = 256  # in one request
LONGEST_TEXT = 2**18  # characters
TOP = 5  # classes that an answer has, if nothing is said


class ServedModel:
    """A model of a folder that answers for whoever asks, one at a time.

    Args:
        folder: of a trained model, or of the run that made it.
        device: where it computes.

    Raises:
        InputError: for a folder without a model.
    """

    def __init__(self, folder: str | Path, *, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.task, self.model = load_model(Path(folder), device=device)
        self._lock = threading.Lock()  # a head that is asked from two threads is nobody's promise

    def answer(self, inputs: list[Any], top: int = TOP) -> list[dict[str, Any]]:
        """For every input its prediction and the ``top`` most probable labels; of words, a list of both for each.

        Inputs are texts; lists of words, or texts to split at spaces; bytes of image or sound files.

        Raises:
            InputError: for an input that cannot be read, naming its number, from 1.
        """
        examples = Examples(inputs, [], [f"input {number}" for number in range(1, len(inputs) + 1)])
        top = min(top, len(self.task.labels))
        with self._lock, torch.no_grad():
            rows = self.task.rows(examples).to(self.device)
            if self.task.kind == "tokens":
                decided = decide(self.task, self.model, rows)
                words = probabilities(self.task, self.model, rows)
                best: list[Any] = [[self._name(*word.topk(top)[::-1]) for word in row] for row in words]
            else:
                decided, classes, found = answer(self.task, self.model, rows, k=top)
                best = [self._name(*pair)[:top] for pair in zip(classes.cpu(), found.cpu(), strict=True)]
            predictions = self.task.predictions(decided, rows)
        return [{"prediction": one, "top": ranked} for one, ranked in zip(predictions, best, strict=True)]

    def _name(self, classes: Tensor, found: Tensor) -> list[dict[str, Any]]:
        pairs = dict(zip(classes.flip(0).tolist(), found.flip(0).tolist(), strict=True))  # a filled-up one comes twice
        return [
            {"label": self.task.labels[n], "probability": round(pairs[n], 6)} for n in dict.fromkeys(classes.tolist())
        ]


def make_app(served: ServedModel) -> FastAPI:
    """The application: ``POST /predict``, ``GET /health``, and ``GET /`` with a page to try it.

    ``/predict`` takes ``{"inputs": [...], "top": 5}``, where images and sounds are base64, or, of these, the bytes of
    one file as they are. It answers ``{"answers": [{"prediction": ..., "top": [{"label": ..., "probability": 1}]}]}``,
    and 400 or 413 with ``{"detail": ...}`` for what it cannot take.
    """
    app = FastAPI(title="softsieve", version=__version__, docs_url=None, redoc_url=None)
    kind, labels = served.task.kind, served.task.labels
    facts = {"kind": kind, "labels": len(labels), "softsieve": __version__}
    page = (Path(__file__).parent / "server.html").read_text(encoding="utf-8").replace("{{kind}}", kind)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", **facts}

    @app.get("/", response_class=HTMLResponse)
    def try_it() -> str:
        return page

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        body = await _read(request)
        sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            raw = kind in MEDIA and sent not in ("", "application/json", "text/json")
            inputs, top = ([body], TOP) if raw else _parse(body, kind)
            return {"answers": await run_in_threadpool(served.answer, inputs, top)}
        except InputError as error:
            raise HTTPException(400, str(error)) from None

    return app


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise HTTPException(413, f"expected a request of at most {LARGEST_BODY // 2**20} MB")
    return bytes(body)


def _parse(body: bytes, kind: str) -> tuple[list[Any], int]:
    """The inputs and the number of labels that a request asks for.

    Raises:
        InputError: naming what is not as expected.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise InputError('expected JSON, such as {"inputs": ["a text"]}') from None
    if not isinstance(content, dict) or "inputs" not in content:
        raise InputError(f'expected an object with "inputs", found {shown(content)}')
    if unknown := content.keys() - {"inputs", "top"}:
        raise InputError(f'expected "inputs" and "top" alone, found {shown(min(unknown))}')
    inputs, top = content["inputs"], content.get("top", TOP)
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= MOST_INPUTS:
        found = f"{len(inputs)} of them" if isinstance(inputs, list) else shown(inputs)
        raise InputError(f"inputs: expected a list of 1 to {MOST_INPUTS}, found {found}")
    if type(top) is not int or not 1 <= top <= 1000:
        raise InputError(f"top: expected a whole number from 1 to 1000, found {shown(top)}")
    return [_decode(value, kind, f"input {number}") for number, value in enumerate(inputs, 1)], top


def _decode(value: Any, kind: str, where: str) -> Any:
    if kind == "tokens":
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise InputError(f"{where}: expected a text or a list of words, found {shown(value)}")
        if sum(map(len, words)) > LONGEST_TEXT:
            raise InputError(f"{where}: expected at most {LONGEST_TEXT} characters")
        return read_input(words, kind, where, Path())
    if not isinstance(value, str):
        raise InputError(f"{where}: expected {'base64 of a file' if kind in MEDIA else 'a text'}, found {shown(value)}")
    if kind not in MEDIA:
        if len(value) > LONGEST_TEXT:
            raise InputError(f"{where}: expected at most {LONGEST_TEXT} characters, found {len(value)}")
        return read_input(value, kind, where, Path())
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{where}: expected base64 of a file, found {shown(value)}") from None
