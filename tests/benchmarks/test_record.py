"""Records: what was measured, with what, on what."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.record_tests import record_tests

XML = """<testsuites><testsuite name="pytest">
<testcase classname="tests.a" name="one" time="0.1"/><testcase classname="tests.a" name="two" time="0.1"/>
<testcase classname="tests.a" name="three"><failure message="no">no</failure></testcase>
<testcase classname="tests.b" name="four"><skipped message="later"/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_by_file(tmp_path: Path) -> None:
    path = tmp_path / "gpu.xml"
    path.write_text(XML)
    record_tests(path)
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["results"] == [{"file": "tests.a", "passed": 2, "failure": 1}, {"file": "tests.b", "skipped": 1}]
    assert record["provenance"]["versions"]["torch"]
    assert not path.exists()
