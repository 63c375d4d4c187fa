"""What is here, what of it works, and whether its numbers are right: what a bug report should say."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from softsieve import _probes
from softsieve._records import cpu_info, installed, provenance
from softsieve.extras import EXTRAS

CORE = ("torch", "filelock", "numba", "numpy", "safetensors", "typer", "rich")
SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm")
PATIENCE = 240  # seconds that one try may take: kernels are compiled at the first
# What keeps oneDNN from instructions that a virtual machine says to have and has not.
REMEDIES = ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"})
CHILD = (sys.executable, "-m", "softsieve._probes")


class Finding(NamedTuple):
    """What came of one try: ``state`` is "works", "not here" (which is no fault) or "broken"."""

    name: str
    state: str
    detail: str
    remedy: str = ""


class Report(NamedTuple):
    """All that the doctor found."""

    versions: dict[str, str]
    machine: dict[str, Any]
    gpus: list[dict[str, Any]]
    backends: list[Finding]
    extras: list[Finding]
    numbers: list[Finding]

    @property
    def findings(self) -> list[Finding]:
        """Of all tries."""
        return [*self.backends, *self.extras, *self.numbers]

    @property
    def sound(self) -> bool:
        """Whether all that is installed works."""
        return not any(finding.state == "broken" for finding in self.findings)

    def asdict(self) -> dict[str, Any]:
        """As plain values for JSON, without names of people, machines and folders."""
        checks = {name: [one._asdict() for one in getattr(self, name)] for name in ("backends", "extras", "numbers")}
        return {"sound": self.sound, **self._asdict(), **checks}


def examine(*, progress: Callable[[str], object] = lambda name: None) -> Report:
    """Look at everything and try everything, in processes of its own where one could crash.

    Args:
        progress: told the name of what is being tried.
    """
    known = gpus()
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    numbers = [f"{name}, {device}" for device in devices for name in _probes.NUMBERS]
    findings = tried([*_probes.BACKENDS, *numbers, *_probes.PACKAGES], progress=progress)
    groups = ([findings[name] for name in names] for names in (_probes.BACKENDS, _probes.PACKAGES, numbers))
    return Report(versions(), machine(), known, *groups)


# -- what is here ------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of all that may matter, with the commit of the source where that is known."""
    facts = provenance()
    names = (*CORE, "triton", *(name for extra in EXTRAS.values() for name in extra.packages))
    commit = {"commit": facts["commit"] + (" with changes" if facts["modified"] else "")} if facts["commit"] else {}
    return {**facts["versions"], **commit, **installed(*(name for name in names if name not in facts["versions"]))}


def machine() -> dict[str, Any]:
    """Processor, threads, memory in GB and the instruction sets that matter."""
    flags = (cpu_info("flags") or cpu_info("Features")).split()
    memory = None
    with suppress(AttributeError, OSError, ValueError):
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": provenance()["machine"]["processor"],
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": memory,
        "instruction_sets": [name for name in SETS if name in flags],
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
    }


def gpus() -> list[dict[str, Any]]:
    """CUDA devices that torch can use."""
    if not torch.cuda.is_available():
        return []
    driver = None
    with suppress(OSError):
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        driver = next(iter(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", line)), None)
    return [
        {
            "name": facts.name,
            "memory_gb": round(facts.total_memory / 1e9, 1),
            "capability": f"{facts.major}.{facts.minor}",
            "processors": facts.multi_processor_count,
            "driver": driver,
            "cuda": torch.version.cuda or torch.version.hip,
        }
        for facts in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


# -- what works --------------------------------------------------------------------------------------------------------


def tried(names: Sequence[str], *, progress: Callable[[str], object] = lambda name: None) -> dict[str, Finding]:
    """Try the probes in another process; after one that ends it, go on with the next in a new one."""
    waiting, findings = list(names), dict[str, Finding]()
    environment: dict[str, str] = {}
    while waiting:
        child = _Child(waiting, environment, progress)
        findings |= child.findings
        waiting = [name for name in waiting if name not in findings]
        if not waiting:
            break
        name = child.trying or waiting[0]  # it may not even have begun
        finding = Finding(name, "broken", child.death)
        if child.status in (-signal.SIGILL, 128 + signal.SIGILL) and not environment:
            helps = (some for some in REMEDIES if name in _Child([name], some, progress).working)
            environment = next(helps, {})
            if environment:
                setting = " ".join(f"{key}={value}" for key, value in environment.items())
                finding = finding._replace(
                    detail=f"{finding.detail}; with {setting} it works, and all after it was tried with that",
                    remedy=f"export {setting}, before torch is imported",
                )
        findings[name] = finding
        waiting.remove(name)
    return {name: findings[name] for name in names}


class _Child:
    """A process that tries some probes: what it found, what it was trying when it ended, and how that was."""

    def __init__(self, names: Sequence[str], environment: dict[str, str], progress: Callable[[str], object]) -> None:
        self.findings: dict[str, Finding] = {}
        self.trying: str | None = None
        self.late = False
        words: list[str] = []
        with subprocess.Popen(
            [*CHILD, *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
        ) as child:
            reader = threading.Thread(target=lambda: words.extend(child.stderr or ()), daemon=True)
            reader.start()

            def stop() -> None:
                self.late = True
                child.kill()

            def wait() -> threading.Timer:
                timer = threading.Timer(PATIENCE, stop)
                timer.daemon = True
                timer.start()
                return timer

            timer = wait()
            for line in child.stdout or ():
                message = _message(line)
                if "begin" in message:
                    self.trying = message["begin"]
                    progress(message["begin"])
                    timer.cancel()
                    timer = wait()
                elif "name" in message:
                    finding = Finding(**{key: private(str(value)) for key, value in message.items()})
                    self.findings[finding.name], self.trying = finding, None
            timer.cancel()
            self.status = child.wait()
            reader.join(5)
        self.last_words = private(next((word.strip() for word in reversed(words) if word.strip()), ""))

    @property
    def working(self) -> set[str]:
        """What works."""
        return {name for name, finding in self.findings.items() if finding.state == "works"}

    @property
    def death(self) -> str:
        """How it ended."""
        if self.late:
            return f"did not end within {PATIENCE} s"
        number = -self.status if self.status < 0 else self.status - 128
        with suppress(ValueError):
            if number > 0:
                return f"ended the process with {signal.Signals(number).name} (status {128 + number})"
        cause = f": {self.last_words[:200]}" if self.last_words else ""
        return f"ended the process with status {self.status}{cause}"


def _message(line: str) -> dict[str, Any]:
    """A line of a child, if it is one of ours: libraries print, too."""
    with suppress(ValueError):
        message = json.loads(line)
        return message if isinstance(message, dict) else {}
    return {}


# -- what is nobody's business -----------------------------------------------------------------------------------------

_PATHS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/]+[^\s\\/:'\"<>|,;]+){2,}")


def private(text: str) -> str:
    """A message without folders, and without the names of the user and of the machine.

    Example:
        >>> private("cannot open '/home/someone/work/libfoo.so': no such file")
        "cannot open '.../libfoo.so': no such file"
    """
    text = _PATHS.sub(lambda match: ".../" + re.split(r"[\\/]", match.group())[-1], text)
    names = {socket.gethostname()}
    with suppress(Exception):  # a user without a name
        names.add(getpass.getuser())
    for name in names:
        if len(name) > 2:
            text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text
