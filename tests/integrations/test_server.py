"""The server: what it answers and refuses, from many threads, in a process of its own and in a browser."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from softsieve.cli import app as commands
from softsieve.losses.objectives import make_objective
from softsieve.tasks.encode import AudioEncoder, Encoder, ImageEncoder, TextEncoder, TokensEncoder
from softsieve.tasks.task import Task

server = pytest.importorskip("softsieve.integrations.server")
testclient = pytest.importorskip("fastapi.testclient")

HOSTILE = '<img src=x onerror="window.hacked=1">'
LABELS = ["neg", HOSTILE, "pos"]
ENCODERS: dict[str, Encoder] = {
    "text": TextEncoder(16),
    "multilabel": TextEncoder(16),
    "tokens": TokensEncoder(16),
    "image": ImageEncoder(8, 0),
    "audio": AudioEncoder(4000),
}


def saved(folder: Path, kind: str = "text") -> Path:
    """A folder with a model of random weights, of which the second label is always the most probable."""
    from softsieve.training.run import save_model

    several = kind == "multilabel"
    objective = make_objective("as-softmax", multilabel=several)
    task = Task(kind, LABELS, ENCODERS[kind], objective=objective)
    torch.manual_seed(0)
    model = task.model(objective).eval()
    with torch.no_grad():
        model.get_parameter("head.bias").copy_(torch.tensor([-9.0, 9.0, -8.0]))
    save_model(folder, task, objective, model.state_dict(), {})
    return folder


@pytest.fixture
def client(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    kind = getattr(request, "param", "text")
    return testclient.TestClient(server.make_app(server.ServedModel(saved(tmp_path / "model", kind))))


def png() -> bytes:
    image = pytest.importorskip("PIL.Image").fromarray(np.zeros((9, 9, 3), np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def wav() -> bytes:
    buffer = io.BytesIO()
    pytest.importorskip("soundfile").write(buffer, np.sin(np.arange(4000) / 5), 8000, format="WAV")
    return buffer.getvalue()


def test_texts(client: Any) -> None:
    response = client.post("/predict", json={"inputs": ["a film", "another"], "top": 2})
    assert response.status_code == 200
    first, second = response.json()["answers"]
    assert first["prediction"] == second["prediction"] == HOSTILE
    assert [one["label"] for one in first["top"]] == [HOSTILE, "pos"]
    assert first["top"][0]["probability"] > 0.99
    assert client.post("/predict", json={"inputs": "a film"}).json()["answers"] == [
        {**first, "top": client.post("/predict", json={"inputs": ["a film"], "top": 3}).json()["answers"][0]["top"]}
    ]
    assert client.get("/health").json() == {
        "status": "ok", "kind": "text", "labels": 3, "softsieve": server.__version__,
    }  # fmt: skip
    assert 'const kind = "text"' in client.get("/").text


@pytest.mark.parametrize("client", ["multilabel"], indirect=True)
def test_several_labels(client: Any) -> None:
    [answer] = client.post("/predict", json={"inputs": ["a film"]}).json()["answers"]
    assert answer["prediction"] == [HOSTILE]
    assert [one["probability"] > 0.5 for one in answer["top"]] == [True, False, False]


def test_an_empty_text_is_refused(client: Any) -> None:
    response = client.post("/predict", json={"inputs": ["a film", " "]})
    assert (response.status_code, response.json()["detail"]) == (400, "input 2: empty text")


@pytest.mark.parametrize("client", ["tokens"], indirect=True)
def test_words(client: Any) -> None:
    first, second = client.post("/predict", json={"inputs": ["two words", ["a", "b", "c"]]}).json()["answers"]
    assert first["prediction"] == [HOSTILE] * 2
    assert [word[0]["label"] for word in second["top"]] == [HOSTILE] * 3
    assert client.post("/predict", json={"inputs": [[]]}).status_code == 400


@pytest.mark.parametrize(("client", "content"), [("image", png), ("audio", wav)], indirect=["client"])
def test_files(client: Any, content: Any) -> None:
    content = content()
    inputs = [base64.b64encode(content).decode()]
    coded = client.post("/predict", json={"inputs": inputs}).json()
    assert coded["answers"][0]["prediction"] == HOSTILE
    raw = client.post("/predict", content=content, headers={"content-type": "application/octet-stream"})
    assert raw.json() == coded
    broken = client.post("/predict", content=content[:20], headers={"content-type": "image/png"})
    assert broken.status_code == 400
    assert broken.json()["detail"].startswith("input 1: unreadable")
    assert client.post("/predict", json={"inputs": ["%"]}).json()["detail"].startswith("input 1: expected base64")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b"[]", 'expected an object with "inputs", found []'),
        (b'{"inputs": []}', "inputs: expected a list of 1 to 256, found 0 of them"),
        (b'{"inputs": 3}', "inputs: expected a list of 1 to 256, found 3"),
        (b'{"inputs": [3]}', "input 1: expected a text, found 3"),
        (b'{"inputs": ["a"], "top": 0}', "top: expected a whole number from 1 to 1000, found 0"),
        (b'{"inputs": ["a"], "topk": 3}', "found 'topk'"),
        (json.dumps({"inputs": ["a"] * 257}).encode(), "found 257 of them"),
        (json.dumps({"inputs": ["a" * 300_000]}).encode(), "input 1: expected at most 262144 characters"),
    ],
)
def test_what_cannot_be_taken_is_told(client: Any, body: bytes, words: str) -> None:
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert words in response.json()["detail"]


def test_a_request_that_is_too_large_is_refused(client: Any) -> None:
    response = client.post("/predict", content=b"x" * (server.LARGEST_BODY + 1))
    assert response.status_code == 413
    assert response.json()["detail"] == "expected a request of at most 16 MB"
    assert client.get("/predict").status_code == 405


def test_many_threads_get_the_answers_of_one(client: Any) -> None:
    texts = [f"text {'word ' * (number % 5)}{number}" for number in range(24)]

    def ask(text: str) -> Any:
        return client.post("/predict", json={"inputs": [text]}).json()

    alone = [ask(text) for text in texts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, texts)) == alone


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where `softsieve serve` listens, in a process of its own."""
    folder = saved(tmp_path_factory.mktemp("served") / "model")
    code = "from softsieve.cli import app; app()"
    command = [sys.executable, "-u", "-c", code, "serve", str(folder), "--port", "0"]
    environment = {**os.environ, "COLUMNS": "500"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        try:
            assert found, line
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@pytest.mark.subprocess
def test_a_process_serves(address: str) -> None:
    body = json.dumps({"inputs": ["a film"]}).encode()
    request = urllib.request.Request(f"{address}/predict", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert json.load(response)["answers"][0]["prediction"] == HOSTILE


@pytest.mark.browser
def test_the_page_in_a_browser(address: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a Chromium browser on the path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 700})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if address not in request.url else None)
        page.goto(address)
        page.get_by_label("A text").fill("a film")
        page.get_by_role("button", name="Classify").click()
        page.locator("#top tr").first.wait_for()
        assert page.locator("#prediction").inner_text() == HOSTILE
        assert page.locator("#top tr").count() == 3
        assert re.fullmatch(r"(9\d\.\d|100\.0) %", page.locator("#top tr").first.locator("td").last.inner_text())
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.get_by_label("A text").fill("a" * 300_000)
        page.get_by_role("button", name="Classify").click()
        page.locator("#error:not(:empty)").wait_for()
        assert page.locator("#error").inner_text().startswith("input 1: expected at most 262144 characters")
        assert problems == []
        browser.close()


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(commands, ["serve", *arguments])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("softsieve: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def test_what_cannot_be_served_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "expected a folder with a trained model, found none" in refused(str(tmp_path / "no"), "--port", "0")
    (tmp_path / "empty").mkdir()
    assert "task.json" in refused(str(tmp_path / "empty"), "--port", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        message = refused(str(saved(tmp_path / "model")), "--port", port)
        assert f"cannot listen at 127.0.0.1, port {port}: Address already in use" in message
    assert "cannot listen at no.such.host.invalid" in refused(str(tmp_path), "--host", "no.such.host.invalid")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "softsieve serve needs the package uvicorn: pip install 'softsieve[serve]'" in refused(str(tmp_path))
