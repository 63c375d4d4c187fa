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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from softsieve import _probes
from softsieve._records import provenance
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
    def sound(self) -> bool:
        """Whether all that is installed works."""
        return not any(found.state == "broken" for found in (*self.backends, *self.extras, *self.numbers))

    def asdict(self) -> dict[str, Any]:
        """As plain values for JSON, without names of people, machines and folders."""
        checks = {
            name: [found._asdict() for found in getattr(self, name)] for name in ("backends", "extras", "numbers")
        }
        return {"sound": self.sound, "versions": self.versions, "machine": self.machine, "gpus": self.gpus, **checks}


def examine(*, progress: Callable[[str], object] = lambda name: None) -> Report:
    """Look at everything and try everything, in processes of its own where one could crash.

    Args:
        progress: told the name of what is being tried.
    """
    known = gpus()
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    numbers = [f"{name}, {device}" for device in devices for name in _probes.NUMBERS]
    found = tried([*_probes.BACKENDS, *numbers, *_probes.PACKAGES], progress=progress)
    backends, extras, checked = (
        [found[name] for name in names] for names in (_probes.BACKENDS, _probes.PACKAGES, numbers)
    )
    return Report(versions(), machine(), known, backends, extras, checked)


# -- what is here ------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of all that may matter, with the commit of the source where that is known."""
    facts = provenance()
    found = dict(facts["versions"])
    if facts["commit"]:
        found["commit"] = facts["commit"] + (" with changes" if facts["modified"] else "")
    for name in (*CORE, "triton", *(name for extra in EXTRAS.values() for name in extra.packages)):
        with suppress(PackageNotFoundError):
            found.setdefault(name, version(name))
    return found


def machine() -> dict[str, Any]:
    """Processor, threads, memory in GB and the instruction sets that matter."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
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
    found = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        found.append(
            {
                "name": facts.name,
                "memory_gb": round(facts.total_memory / 1e9, 1),
                "capability": f"{facts.major}.{facts.minor}",
                "processors": facts.multi_processor_count,
                "driver": driver,
                "cuda": torch.version.cuda or torch.version.hip,
            }
        )
    return found


# -- what works --------------------------------------------------------------------------------------------------------


def tried(names: Sequence[str], *, progress: Callable[[str], object] = lambda name: None) -> dict[str, Finding]:
    """Try the probes in another process; after one that ends it, go on with the next in a new one."""
    left, found = list(names), dict[str, Finding]()
    environment: dict[str, str] = {}
    while left:
        at, status, words = _run(left, environment, found, progress)
        left = [name for name in left if name not in found]
        if not left:
            break
        at = at or left[0]  # it may not even have begun
        finding = Finding(at, "broken", _death(status, words))
        if status in (-signal.SIGILL, 128 + signal.SIGILL) and not environment:
            environment = next((some for some in REMEDIES if _helps(some, at, progress)), {})
            if environment:
                setting = " ".join(f"{key}={value}" for key, value in environment.items())
                finding = finding._replace(
                    detail=f"{finding.detail}; with {setting} it works, and all after it was tried with that",
                    remedy=f"export {setting}, before torch is imported",
                )
        found[at] = finding
        left.remove(at)
    return {name: found[name] for name in names}


def _helps(environment: dict[str, str], name: str, progress: Callable[[str], object]) -> bool:
    found = dict[str, Finding]()
    _run([name], environment, found, progress)
    return name in found and found[name].state == "works"


def _run(
    names: Sequence[str],
    environment: dict[str, str],
    found: dict[str, Finding],
    progress: Callable[[str], object],
) -> tuple[str | None, int | None, str]:
    """Start a process and note what it finds; the name it ended at if it did, its status and its last words."""
    at = None
    with subprocess.Popen(
        [*CHILD, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    ) as child:
        words: list[str] = []
        reader = threading.Thread(target=lambda: words.extend(child.stderr or ()), daemon=True)
        reader.start()
        waiting = _Patience(child)
        for line in child.stdout or ():
            said = _message(line)
            if "begin" in said:
                at = said["begin"]
                progress(at)
                waiting.begin()
            elif "name" in said:
                found[said["name"]] = Finding(**{key: private(str(value)) for key, value in said.items()})
                at = None
        waiting.end()
        status = child.wait()
        reader.join(5)
    last = private(next((word.strip() for word in reversed(words) if word.strip()), ""))
    return at, None if waiting.over else status, last


class _Patience:
    """Ends a process that is at one try for too long."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child, self.over = child, False
        self.timer: threading.Timer | None = None
        self.begin()

    def begin(self) -> None:
        self.end()
        self.timer = threading.Timer(PATIENCE, self._stop)
        self.timer.daemon = True
        self.timer.start()

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _stop(self) -> None:
        self.over = True
        self.child.kill()


def _message(line: str) -> dict[str, Any]:
    """A line of a child, if it is one of ours: libraries print, too."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _death(status: int | None, cause: str) -> str:
    if status is None:
        return f"did not end within {PATIENCE} s"
    number = -status if status < 0 else status - 128
    with suppress(ValueError):
        if number > 0:
            return f"ended the process with {signal.Signals(number).name} (status {128 + number})"
    return f"ended the process with status {status}" + (f": {cause[:200]}" if cause else "")


# -- what is nobody's business -----------------------------------------------------------------------------------------

_PATHS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/]+[^\s\\/:'\"<>|,;]+){2,}")


def private(text: str) -> str:
    """A message without folders, and without the names of the user and of the machine.

    Example:
        >>> private("cannot open '/home/someone/work/libfoo.so': no such file")
        "cannot open '.../libfoo.so': no such file"
    """
    text = _PATHS.sub(lambda found: ".../" + re.split(r"[\\/]", found.group())[-1], text)
    names = {socket.gethostname()}
    with suppress(Exception):  # a user without a name
        names.add(getpass.getuser())
    for name in names:
        if len(name) > 2:
            text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text
