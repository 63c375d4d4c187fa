"""The table of language-model heads, on small made-up ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from experiments import language_heads
from experiments.commands import app
from softsieve.comparisons import head_methods, heads
from softsieve.comparisons.output import read_table
from softsieve.errors import InputError
from softsieve.heads.results import TopK
from softsieve.integrations.head_file import write_head
from softsieve.integrations.hidden_states import Corpus, Head

N, D = 30, 64


def made_up(*names: str, beta: float = 1.0) -> Head:
    """Every query is mostly one row of the weight, so that one logit is far above the others."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(N, D, generator=generator)

    def queries(count: int) -> Tensor:
        rows = torch.randint(N, (count,), generator=generator)
        return 0.3 * weight[rows] + 0.1 * torch.randn(count, D, generator=generator)

    corpora = {name: Corpus(queries(60), queries(25)) for name in names}
    return Head(weight, torch.linspace(-1, 1, N), beta, None, corpora)


class Sieve:
    """Answers exactly, and says that it read half; with ``wrong`` the p of every fifth query is too large."""

    made: list[dict[str, Any]]
    wrong = 1.0

    def __init__(self, weight: Tensor, bias: Tensor, *, beta: float, **options: Any) -> None:
        self.weight, self.bias, self.beta, self.asked = weight, bias, beta, 0
        self.made.append(options | {"calibrated_with": 0})

    def calibrate(self, queries: Tensor, k: int, *, generator: torch.Generator) -> None:
        self.made[-1]["calibrated_with"] = len(queries)

    def topk(self, x: Tensor, k: int, *, generator: torch.Generator) -> TopK:
        logits = self.beta * (x @ self.weight.T + self.bias)
        best = logits.topk(k)
        p = logits.softmax(-1).gather(-1, best.indices)
        number = torch.arange(self.asked, self.asked + len(x))
        self.asked += len(x)
        p[number % 5 == 0] *= self.wrong
        nothing, half = torch.zeros(len(x)), torch.full((len(x),), N * D // 2)
        return TopK(best.indices, p, best.values, nothing, nothing, half, half, number % 2 == 0)


@pytest.fixture
def sieve(monkeypatch: pytest.MonkeyPatch) -> type[Sieve]:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(Sieve, "made", made, raising=False)
    monkeypatch.setattr(language_heads, "AdaptiveSoftmax", Sieve)
    return Sieve


@pytest.mark.parametrize(("wrong", "success"), [(1.0, 1.0), (1.29, 1.0), (1.31, 0.8), (0.69, 0.8)])
def test_figures_follow_from_the_answers(
    sieve: type[Sieve], monkeypatch: pytest.MonkeyPatch, wrong: float, success: float
) -> None:
    monkeypatch.setattr(sieve, "wrong", wrong)
    shares: list[float] = []
    head = made_up("a", "b", beta=1.5)
    rows = language_heads.run(head, calibration=40, k=2, progress=lambda what, share: shares.append(share))
    assert sum(shares) == pytest.approx(1)
    plan = [("calibrated", 0.1), ("calibrated", 0.05), ("calibrated", 0.01), ("pac", 0.1)]
    assert [(row["corpus"], row["guarantee"], row["delta"]) for row in rows] == [(n, *p) for n in "ab" for p in plan]
    assert [(o["guarantee"], o["delta"]) for o in sieve.made] == 2 * plan
    assert [o["calibrated_with"] for o in sieve.made] == 2 * [40, 40, 40, 0] == [row["calibration"] for row in rows]
    assert {(o["method"], o["eps"]) for o in sieve.made} == {("coordinates", 0.3)}
    for row in rows:
        assert row["gain"] == pytest.approx(2)
        assert row["success"] == pytest.approx(success)
        assert row["success_error"] == pytest.approx((success * (1 - success) / 25) ** 0.5)
        assert (row["queries"], row["k"], row["exact"]) == (25, 2, pytest.approx(13 / 25))


def test_a_wrong_row_is_no_success(sieve: type[Sieve], monkeypatch: pytest.MonkeyPatch) -> None:
    def second(self: Sieve, x: Tensor, k: int, *, generator: torch.Generator) -> TopK:
        found = topk(self, x, 2, generator=generator)
        return found._replace(indices=found.indices[:, 1:], probs=found.probs[:, 1:])

    topk = sieve.topk
    monkeypatch.setattr(sieve, "topk", second)
    assert {row["success"] for row in language_heads.run(made_up("a"))} == {0.0}


def test_exact_logits_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    head = made_up("a")
    x = head.corpora["a"].test
    assert head.bias is not None
    expected = 0.5 * (x.double() @ head.weight.double().T + head.bias.double())
    monkeypatch.setattr(heads, "_ROWS", 7)
    torch.testing.assert_close(heads.exact_logits(head.weight, head.bias, x, beta=0.5), expected)


def test_queries_are_spread_over_the_text() -> None:
    rows = torch.arange(100.0)[:, None]
    assert head_methods.spread(rows, 4)[:, 0].tolist() == [0, 33, 66, 99]
    assert torch.equal(head_methods.spread(rows, 500), rows)


def test_real_sieves_keep_their_promise_and_the_seed_decides() -> None:
    head = made_up("a")
    rows = language_heads.run(head, deltas=[0.1], test_queries=20)
    assert rows == language_heads.run(head, deltas=[0.1], test_queries=20)
    assert all(row["success"] >= 0.75 for row in rows)  # 6 of 20 wrong have a chance of 1 % at delta 0.1
    assert rows[0]["gain"] > 1


def test_command_writes_table_and_picture(tmp_path: Path) -> None:
    write_head(tmp_path / "h.safetensors", made_up("a", "b"), notes={"model": "tiny"})
    out = tmp_path / "deep" / "heads"
    options = ["--delta", "0.2", "--delta", "0.1", "--corpus", "b", "--test-queries", "10", "--calibration", "50"]
    done = CliRunner().invoke(app, ["heads", "--head", str(tmp_path / "h.safetensors"), *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    about, rows = read_table(out.with_suffix(".csv"))
    assert about["experiment"] == "heads"
    assert (about["model"], about["n"], about["d"], about["deltas"]) == ("tiny", str(N), str(D), "[0.2, 0.1]")
    assert about["torch"]
    assert "another model" in about["paper"]
    assert [(row["corpus"], row["guarantee"], row["delta"]) for row in rows] == [
        ("b", "calibrated", "0.2"),
        ("b", "calibrated", "0.1"),
        ("b", "pac", "0.2"),
    ]
    assert {row["queries"] for row in rows} == {"10"}
    assert sorted(path.suffix for path in out.parent.iterdir()) == [".csv", ".png", ".svg"]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="corpus: expected one of 'a', found 'c'"):
        language_heads.run(made_up("a"), corpora=["c"])
    with pytest.raises(InputError, match=r"expected tensors NAME.calibration and NAME.test, found none"):
        language_heads.run(made_up())
    for options, message in (
        (["--head", "none.safetensors"], "none.safetensors: no such file"),
        (["--head", str(tmp_path / "h.safetensors"), "--delta", "2"], "delta"),
        (["--head", str(tmp_path / "h.safetensors"), "--k", "31"], "k: "),
    ):
        write_head(tmp_path / "h.safetensors", made_up("a"), notes={})
        done = CliRunner().invoke(app, ["heads", *options, "--out", str(tmp_path / "x")])
        assert done.exit_code == 1
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["h.safetensors"]
