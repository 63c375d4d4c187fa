"""Results of record are JSON that every reader takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from softsieve._records import write_record


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write_record(file, "linear", {"rates": (1.5, math.nan)}, [{"ms": 2.0, "error": math.nan}])
    record = json.loads(file.read_text(), parse_constant=lambda name: name)
    assert record["settings"] == {"rates": [1.5, None]}
    assert record["results"] == [{"ms": 2.0, "error": None}]
