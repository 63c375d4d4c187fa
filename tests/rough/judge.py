"""Reads spoilt files of one format in a process of its own, which a crash may end: python -m tests.rough.judge."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

LIMIT = 20  # seconds that a file may take, before the process is ended
ROOM = 3 * 2**30  # bytes of address space beyond what the process has when it begins
SIGNED = (
    "unlabelled",
    "hostile_metadata",
    "reshaped",
    "revalued",
    "hostile_state",
    "hostile_json_in_header",
)  # digests are right


def spoil(content: bytes, how: Any, other: bytes | None, random: Random) -> tuple[str, bytes]:
    """The name of a mutation, and what it makes of a file; or a file of another kind."""
    if other is not None:
        return "foreign", other
    mutation = random.choice(how)
    return mutation.__name__, mutation(content, random)


def in_order(content: bytes, how: Any) -> bytes:
    """A safetensors file with the header sorted, which has another order every time."""
    from tests.rough.mutations import SAFETENSORS, put_together, taken_apart

    if how is not SAFETENSORS:
        return content
    header, data = taken_apart(content)
    about = header.get("__metadata__")
    return put_together(header if about is None else {**header, "__metadata__": dict(sorted(about.items()))}, data)


def judge(name: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """How many files were refused, said the same as before, or something else; and all that should not have been."""
    import torch

    from softsieve.errors import InputError
    from tests.rough.formats import FORMATS, small
    from tests.rough.mutations import foreign

    torch.set_num_threads(1)
    torch.manual_seed(0)
    small()
    warnings.simplefilter("ignore")
    prepared = FORMATS[name](folder)
    before = {path: prepared.read(path) for path in prepared.files}
    before = {path: prepared.read(path) for path in prepared.files}  # by now, everything is compiled
    if {path: prepared.read(path) for path in prepared.files} != before:
        raise AssertionError("reading the same files twice says different things")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    random = Random(seed)
    whole = {path: in_order(path.read_bytes(), prepared.files[path]) for path in prepared.files}
    others = foreign(folder / "marker") * min(len(whole), 4)
    progress = os.open(folder / "progress", os.O_RDWR | os.O_CREAT)
    found: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.process_time()
    for number in range(count):
        path = random.choice(list(whole))
        other = others[number] if number < len(others) else None
        kind, content = spoil(whole[path], prepared.files[path], other, random)
        os.pwrite(progress, f"{number} {path.name} {kind}\n".ljust(100).encode(), 0)
        path.write_bytes(content)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            said = prepared.read(path)
            outcome = "same" if said == before[path] else "other"
            if outcome == "other" and prepared.digests and kind not in SIGNED and content != whole[path]:
                outcome = "unnoticed"
        except InputError as error:
            outcome = "refused" if str(folder) in str(error) else "unnamed"
            if outcome == "unnamed":
                wrong.append(f"{number} {path.name} {kind}: does not name the file: {error}")
            elif "\n" in str(error) or len(str(error)) > 2000:
                outcome = "long"
                wrong.append(f"{number} {path.name} {kind}: not one line: {str(error)[:300]}")
        except BaseException:
            outcome = "wrong"
            wrong.append(f"{number} {path.name} {kind}: {traceback.format_exc(limit=-4)}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        if outcome == "unnoticed":
            wrong.append(f"{number} {path.name} {kind}: damage was not noticed")
        found[outcome] += 1
        path.write_bytes(whole[path])
    if (folder / "marker").exists():
        wrong.append("code in a file was run")
    if {path: prepared.read(path) for path in prepared.files} != before:
        wrong.append("after all that, whole files say something else")
    taken = (time.process_time() - began) / count
    return {"found": dict(found), "wrong": wrong, "milliseconds": round(1000 * taken, 2)}


def main(folder: Path, counts: dict[str, int]) -> None:
    """Judge formats one after the other, each in a process of its own, which is forked to save the imports."""
    import tests.rough.formats  # noqa: F401

    results: dict[str, Any] = {}
    for name, count in counts.items():
        place = folder / name.replace(" ", "-")
        place.mkdir()
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                (place / "result").write_text(json.dumps(judge(name, count, 0, place)))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        at = (place / "progress").read_text() if (place / "progress").exists() else "the whole files"
        results[name] = (
            json.loads((place / "result").read_text())
            if code == 0
            else {"found": {}, "wrong": [f"the process ended with {code} at {at.strip()}"]}
        )
        results[name]["seconds"] = round(time.monotonic() - started, 1)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
