"""The command line as a person uses it."""

from __future__ import annotations

from typer.testing import CliRunner

from softsieve.cli import app


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("train", "predict", "compare", "head", "generate", "report", "doctor", "demo"):
        assert command in result.output
    assert "experiment" not in result.output
