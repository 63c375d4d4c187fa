"""What is said while something takes long."""

from __future__ import annotations

import io

import pytest

from softsieve.cli.progress import plain_console, told


def test_what_takes_long_is_said_once_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("softsieve.cli.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with told(plain_console(file=out), after=2.0) as progress:
        for _ in range(8):
            progress("reading a.csv", 0.1)
            now[0] += 1
        progress("encoding texts", 1.0)  # over at once
    assert out.getvalue() == "reading a.csv ...\n"


def test_a_terminal_shows_a_bar() -> None:
    out = io.StringIO()
    with told(plain_console(file=out, force_terminal=True)) as progress:
        progress("reading a.csv", 0.5)
    assert "reading a.csv" in out.getvalue()
