"""``python -m benchmarks.record_tests FILE``: what ``pytest --junit-xml`` wrote becomes a record (`make test-gpu`)."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

from softsieve._records import write_record


def record_tests(path: Path) -> None:
    """Turn what ``pytest --junit-xml`` wrote into a record in its place: how many tests of a file passed."""
    counts: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        kind = next((part.tag for part in case if part.tag in ("failure", "error", "skipped")), "passed")
        of_file = counts.setdefault(case.get("classname", ""), {})
        of_file[kind] = of_file.get(kind, 0) + 1
    write_record(path.with_suffix(".json"), "tests", {}, [{"file": file, **found} for file, found in counts.items()])
    path.unlink()


if __name__ == "__main__":
    record_tests(Path(sys.argv[1]))
