"""`python -m experiments linear-training`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from experiments.commands import app


def test_training_with_and_without_logits(tmp_path: Path) -> None:
    """The same seed gives the same curve; another one does not."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40)
    options = ["--steps", "40", "--size", "16", "--layers", "1", "--length", "8", "--batch", "4"]
    result = CliRunner().invoke(app, ["linear-training", str(text), *options, "--out", str(tmp_path / "curve")])
    assert result.exit_code == 0, result.output
    lines = [line.split(",") for line in (tmp_path / "curve.csv").read_text().splitlines() if not line.startswith("#")]
    names = lines[0]
    place = names.index("apart_most") - len(names)
    apart = {line[0]: float(line[place]) for line in lines[1:] if line[place]}  # dense cross-entropy is another loss
    assert len(lines) == 6
    assert len(apart) == 4
    same, other = apart["without"], max(apart.values())
    assert same < 1e-4 < other
    assert (tmp_path / "curve.png").exists()


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    result = CliRunner().invoke(app, ["linear-training", str(text), "--out", str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "text: expected 256 words at least, found 2" in result.output
