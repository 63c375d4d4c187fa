"""vLLM's server with the adaptive head under load: clients that ask for all kinds of things, a kill and a restart."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from softsieve.errors import InputError

ADAPTIVE: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
)
KINDS: tuple[dict[str, Any], ...] = (
    *ADAPTIVE,
    {"temperature": 1.0},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0, "stream": False, "min_tokens": 4},
)


class Result(NamedTuple):
    """What came of it."""

    clients: int
    seconds: float
    asked: int
    answered: int  # whole: as many tokens as were asked for
    tokens: int
    tokens_s: float
    first_mib: float  # memory of the server's processes after the first tenth of the time
    last_mib: float  # at the end
    most_mib: float
    adaptive: float  # share of tokens that the adaptive head answered
    exact: dict[str, int]  # the others, by reason
    restarted: bool  # killed and started again, the engine found its index


def measure(
    model: Path, prompts: Sequence[Sequence[int]], *, clients: int, seconds: float, tokens: int, adaptive: bool
) -> Result:
    """Start a server, ask, kill it, start another one and ask once more.

    If ``adaptive``, for what the adaptive head can answer alone, and it answers, even where the exact one is faster.
    """
    with serving(model, adaptive=adaptive) as server:
        kinds = ADAPTIVE if adaptive else KINDS
        outcomes = _load(server, prompts, kinds, clients=clients, seconds=seconds, tokens=tokens)
        counted = server.counted()
        server.kill()
    with serving(model, adaptive=adaptive) as server:
        server.ask({"prompt": list(prompts[0]), "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
        restarted = sum(server.counted().values()) > 0  # an engine without its index counts nothing
    asked, answered, taken, memory, elapsed = outcomes
    answers = counted.pop("answers", 0)
    whole = answers + sum(counted.values())
    early = memory[len(memory) // 10]
    return Result(
        clients, elapsed, asked, answered, taken, taken / elapsed, early, memory[-1], max(memory),
        answers / max(1, whole), counted, restarted,
    )  # fmt: skip


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, model: Path) -> None:
        self.process, self.address, self.model = process, address, model

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a completion request."""
        content = json.dumps({"model": str(self.model), **body}).encode()
        request = urllib.request.Request(
            f"{self.address}/v1/completions", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)  # type: ignore[no-any-return]

    def counted(self) -> dict[str, int]:
        """Tokens of the adaptive head as "answers", and those of the exact one by reason."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=60) as response:
            text = response.read().decode()
        found = {
            name: int(float(count))
            for name, count in re.findall(r'^softsieve_exact_total{reason="(\w+)"} (\S+)', text, re.M)
        }
        answers = re.search(r"^softsieve_answers_total (\S+)", text, re.M)
        return {name: count for name, count in found.items() if count} | {
            "answers": int(float(answers[1])) if answers else 0
        }

    def memory(self) -> float:
        """Resident memory of the server and the processes that it has started, in MiB."""
        import psutil  # type: ignore[import-untyped]  # vLLM brings it

        first = psutil.Process(self.process.pid)
        return float(sum(one.memory_info().rss for one in [first, *first.children(recursive=True)]) / 2**20)

    def kill(self) -> None:
        """Stop all of its processes at once, as a machine that fails does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def serving(model: Path, *, adaptive: bool) -> Iterator[Server]:
    """A server of vLLM that is strict about its index."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(256 << 20),
        "--additional-config", json.dumps({"softsieve": {"strict": True, **({"batch": 64} if adaptive else {})}}),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    server = Server(process, f"http://127.0.0.1:{port}", model)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{server.address}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise InputError(
                        f"{model}: expected a model that vLLM serves, found that it does not start"
                    ) from None
                time.sleep(1)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def _load(
    server: Server,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[dict[str, Any]],
    *,
    clients: int,
    seconds: float,
    tokens: int,
) -> tuple[int, int, int, list[float], float]:
    """Requests, whole answers, tokens, memory over time, and seconds until the last answer."""
    outcomes: list[int] = []  # tokens that were missing, of each request
    lock, start = threading.Lock(), time.perf_counter()

    def client(number: int) -> None:
        draw = random.Random(number)
        while time.perf_counter() - start < seconds:
            kind, prompt = draw.choice(kinds), list(draw.choice(prompts))
            try:
                answer = server.ask({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **kind})
                missing = tokens - int(answer["usage"]["completion_tokens"])
            except (OSError, KeyError, ValueError):
                missing = tokens
            with lock:
                outcomes.append(missing)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    memory = [server.memory()]
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(5.0, seconds / 20))
        memory.append(server.memory())
    elapsed = time.perf_counter() - start
    asked = len(outcomes)
    return asked, sum(missing == 0 for missing in outcomes), asked * tokens - sum(outcomes), memory, elapsed
