"""The real Lightning Trainer on a tiny model: what it steps, visits, validates and resumes."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from softsieve import ASCrossEntropyLoss, ASMultiLabelLoss, LinearASCrossEntropyLoss
from softsieve.errors import InputError
from softsieve.training import ASSpeed, SolvedSampler

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from softsieve.integrations.lightning import DeltaCallback, SkipCallback, SpeedCallback

ROWS, CLASSES, BATCH = 64, 4, 4


def rows(ambiguous: int = 16) -> list[tuple[int, Tensor, Tensor]]:
    """(index, features, label); of the last ``ambiguous`` rows, which all look alike, little can be learned."""
    label = torch.arange(ROWS) % CLASSES
    features = torch.eye(CLASSES)[label]
    features[ROWS - ambiguous :] = 0.25
    return list(zip(range(ROWS), features, label, strict=True))


class Module(pl.LightningModule):
    """A linear classifier that tells what Lightning made of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(CLASSES, CLASSES)
        self.criterion = ASCrossEntropyLoss(0.1, return_stats=True)
        self.visited = Counter[int]()
        self.windows: list[int] = []  # micro-batches of every optimizer step
        self.rates: list[float] = []
        self.places: list[float] = []  # in epochs, at the start of every micro-batch
        self.deltas: list[float] = []
        self.validations = 0
        self._waiting = 0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        index, features, target = batch
        self.visited.update(index.tolist())
        self.deltas.append(self.criterion.delta)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.places.append(self.trainer.current_epoch + batch_idx / len(self.trainer.train_dataloader))  # type: ignore[arg-type]
        self._waiting += 1
        loss, stats = self.criterion(self.layer(features), target)
        return {"loss": loss, "solved": stats.solved, "index": index}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self._waiting == self.trainer.accumulate_grad_batches or self.trainer.is_last_batch
        self.windows.append(self._waiting)
        self._waiting = 0

    def starts(self) -> list[int]:
        """The first micro-batch of every window."""
        return [sum(self.windows[:step]) for step in range(len(self.windows))]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validations += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(
    callbacks: list[pl.Callback],
    skip: SkipCallback | None = None,
    resume: Path | None = None,
    make: type[Module] = Module,
    **settings: Any,
) -> tuple[Module, pl.Trainer]:
    module = make()
    chosen = {"max_epochs": 6, "accelerator": "cpu", "devices": 1, **settings}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen.setdefault("enable_checkpointing", any(isinstance(c, ModelCheckpoint) for c in callbacks))
    trainer = pl.Trainer(callbacks=callbacks + ([skip] if skip else []), **quiet, **chosen)
    data: Any = rows()
    order: Any = torch.utils.data.RandomSampler(data) if skip is None else skip.sampler
    loader: DataLoader[Any] = DataLoader(data, BATCH, sampler=order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, DataLoader(data, ROWS), ckpt_path=resume)
    return module, trainer


def skipper() -> SkipCallback:
    return SkipCallback(ROWS, tolerance=1.0)


@pytest.mark.parametrize("most", [2, 4])
def test_speed_makes_fewer_optimizer_steps_of_the_same_rows(most: int) -> None:
    module, trainer = fit([SpeedCallback(ASSpeed(max_steps=most))])
    assert set(module.visited.values()) == {6}
    assert trainer.global_step == len(module.windows) < 0.7 * 6 * ROWS / BATCH
    assert (min(module.windows), max(module.windows)) == (1, most)
    starts = [start for start, length in zip(module.starts(), module.windows, strict=True) for _ in range(length)]
    assert module.rates == pytest.approx([0.1 * (1 - start / 96) for start in starts])
    assert trainer.accumulate_grad_batches == 1  # as it was


@pytest.mark.parametrize("accumulate", [1, 2])
def test_skipping_visits_fewer_rows_and_goes_on_validating(accumulate: int) -> None:
    module, trainer = fit([], skipper(), max_epochs=10, accumulate_grad_batches=accumulate)
    assert trainer.current_epoch == 10
    visited = torch.tensor([module.visited[row] for row in range(ROWS)]) / 10
    assert visited.min() > 0
    assert visited[:-16].mean() < 0.6
    assert visited[-16:].mean() > visited[:-16].mean()
    assert module.validations == 1 + 10  # the first is the sanity check
    begins = module.starts()
    nominal = [int(module.places[start] * 16 / accumulate + 1e-6) for start in begins]
    assert [module.rates[start] for start in begins] == pytest.approx(
        [0.1 * (1 - step / (160 / accumulate)) for step in nominal]
    )


@pytest.mark.parametrize("limit", [{"max_epochs": 6}, {"max_epochs": -1, "max_steps": 40}])
@pytest.mark.parametrize(
    "checkpoint",
    [
        {"every_n_epochs": 1},
        {"every_n_epochs": 1, "save_on_train_epoch_end": False},
        {"every_n_train_steps": 8},  # at the end of epochs and in the middle
        {"every_n_train_steps": 5},
    ],
)
def test_resumed_training_ends_where_the_uninterrupted_one_does(
    tmp_path: Path, checkpoint: dict[str, Any], limit: dict[str, Any]
) -> None:
    def callbacks() -> list[pl.Callback]:
        speed = SpeedCallback(ASSpeed(max_steps=2))
        return [speed, DeltaCallback(0.1, ratio=0.5), ModelCheckpoint(tmp_path, save_top_k=-1, **checkpoint)]

    whole, trainer = fit(callbacks(), skipper(), **limit)
    saved = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)[:4]
    assert len(saved) >= 3
    for path in saved:
        resumed, again = fit(callbacks(), skipper(), path, **limit)
        assert again.global_step == trainer.global_step
        left = whole.rates[len(whole.rates) - len(resumed.rates) :]
        assert resumed.rates == left
        assert resumed.deltas == whole.deltas[-len(resumed.deltas) :]
        assert resumed.windows == whole.windows[-len(resumed.windows) :]
        torch.testing.assert_close(resumed.layer.weight, whole.layer.weight, rtol=0, atol=0)


class Short(Module):
    """Ends its epochs itself."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def test_an_epoch_cut_short_is_over_all_the_same() -> None:
    skip = skipper()
    module, _ = fit([], skip, make=Short, max_epochs=3)
    assert sum(module.visited.values()) == 3 * 3 * BATCH
    assert skip.solved.state_dict()["epoch"] == 2


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 32}])
def test_margin_comes_down(limit: dict[str, Any]) -> None:
    module, _ = fit([DeltaCallback(0.2, initial_delta=0.9, ratio=0.5)], **limit)
    assert module.deltas[:17] == pytest.approx([0.9 - 0.7 * step / 16 for step in range(17)])
    assert set(module.deltas[16:]) == {0.2}


class Linear(Module):
    """The last layer is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = LinearASCrossEntropyLoss(CLASSES, CLASSES, return_stats=True)  # type: ignore[assignment]


class MultiLabel(Module):
    """Any number of labels a row, of which there is always one here."""

    against = "threshold"

    def __init__(self) -> None:
        super().__init__()
        self.criterion = ASMultiLabelLoss(1.0, against=self.against, return_stats=True)  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        index, features, target = batch
        return super().training_step((index, features, nn.functional.one_hot(target, CLASSES)), batch_idx)


class ByLabels(MultiLabel):
    against = "labels"


@pytest.mark.parametrize(
    ("make", "given", "final"),
    [(MultiLabel, None, 0.7), (MultiLabel, 0.3, 0.3), (ByLabels, None, 0.1), (Module, None, 0.1)],
)
def test_margin_unless_given_is_that_of_the_kind_of_loss(make: type[Module], given: float | None, final: float) -> None:
    module, _ = fit([DeltaCallback(given, ratio=0.5)], make=make, max_epochs=2)
    assert module.deltas[0] == 1
    assert module.deltas[-1] == final


def test_margin_of_a_layer_with_its_loss_comes_down() -> None:
    module, _ = fit([DeltaCallback(0.2, initial_delta=0.9, ratio=0.5)], make=Linear, max_epochs=2)
    assert module.deltas[0] == pytest.approx(0.9)
    assert module.criterion.delta == module.deltas[-1] == 0.2


class Manual(Module):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        outputs = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(outputs["loss"])
        optimizer.step()
        return outputs


def test_speed_refuses_manual_optimization_and_skipping_does_not() -> None:
    with pytest.raises(InputError, match=r"automatic_optimization: expected True, .* AS-Speed .* found False"):
        fit([SpeedCallback(ASSpeed())], make=Manual)
    module, _ = fit([], skipper(), make=Manual, max_epochs=4)
    assert sum(module.visited.values()) < 0.9 * 4 * ROWS


@pytest.mark.parametrize("count", [ROWS - 1, ROWS + 1, 2 * ROWS])
def test_skipping_wants_a_sampler_of_all_rows(count: int) -> None:
    with pytest.raises(InputError, match=rf"num_samples: expected {ROWS}, the rows of the data set, found {count}"):
        fit([], SkipCallback(count))


def test_the_loader_has_its_length_before_training() -> None:
    skip = skipper()
    loader: DataLoader[Any] = DataLoader(rows(), BATCH, sampler=skip.sampler)  # type: ignore[arg-type]
    assert len(loader) == ROWS // BATCH
    assert sorted(skip.sampler) == list(range(ROWS))


def test_looks_are_told_in_their_order() -> None:
    skip, expected = SkipCallback(8), SolvedSampler(8)
    expected.next_epoch()
    for rows, margin in (([0, 1, 2], 0.9), ([3, 4], 0.0), ([5, 6, 7], 0.5)):
        look = torch.tensor(rows), torch.full((len(rows),), margin)
        skip._noted.append(look)
        expected.update(*look)
    for name in ("margins", "passes"):
        assert torch.equal(skip.state_dict()["solved"][name], expected.state_dict()[name])


class Leading(Module):
    """Also says by how much rows lead."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        outputs = super().training_step(batch, batch_idx)
        margin = torch.linspace(0.2, 0.9, len(outputs["solved"]))
        return {**outputs, "solved": torch.arange(len(margin)) % 2 == 0, "margin": margin}


def test_margins_are_told_where_they_are_known() -> None:
    """A row that is not solved does not lead, whatever its margin says of a loss with another delta."""
    told: list[tuple[Tensor, Tensor]] = []

    class Watch(SkipCallback):
        def _tell(self) -> None:
            told.extend(self._noted)
            super()._tell()

    for make in (Leading, Module):
        told.clear()
        skip = Watch(ROWS)
        fit([], skip, make=make, max_epochs=1)
        skip.state_dict()
        assert sum(len(index) for index, _ in told) == ROWS
        for _, shown in told:
            if make is Leading:
                expected = torch.where(torch.arange(BATCH) % 2 == 0, torch.linspace(0.2, 0.9, BATCH), -1.0)
                assert torch.equal(shown, expected)
            else:
                assert shown.dtype == torch.bool
        if make is Leading:
            assert int(skip.solved.solved.sum()) == ROWS // 2


def test_a_margin_of_ones_own_is_that_of_all_rows_whatever_is_solved() -> None:
    skip = SkipCallback(ROWS, margin=0.5)
    fit([], skip, make=Leading, max_epochs=1)
    skip.state_dict()
    leading = int((torch.linspace(0.2, 0.9, BATCH) >= 0.5).sum())
    assert int(skip.solved.solved.sum()) == leading * ROWS // BATCH
    with pytest.raises(InputError, match="training_step: expected a dict with 'margin', found loss, solved, index"):
        fit([], SkipCallback(ROWS, margin=0.5), max_epochs=1)


def test_refusals() -> None:
    with pytest.raises(InputError, match="accumulate_grad_batches: expected 1, AS-Speed sets it, found 2"):
        fit([SpeedCallback(ASSpeed())], accumulate_grad_batches=2)
    with pytest.raises(InputError, match="train_dataloader: expected a DataLoader with the callback's sampler"):
        fit([skipper()])
    with pytest.raises(InputError, match="expected max_epochs or max_steps"):
        fit([DeltaCallback()], max_epochs=-1)
    with pytest.raises(InputError, match="training_step: expected a dict with 'solved', found loss"):
        SpeedCallback(ASSpeed()).on_train_batch_end(pl.Trainer(), Module(), {"loss": 0}, None, 0)
    with pytest.raises(InputError, match="expected an AS loss among the modules"):
        DeltaCallback().on_train_start(pl.Trainer(max_epochs=1), pl.LightningModule())


def test_two_processes_take_the_same_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the machine's name need not lead anywhere
    speed = SpeedCallback(ASSpeed(lam=1.2, max_steps=2))
    fit([speed, Note(tmp_path)], skipper(), make=Unequal, devices=2, strategy="ddp_spawn")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["windows"] == second["windows"]
    assert max(first["windows"]) == 2
    assert torch.equal(first["plan"], second["plan"])
    assert sum(first["visited"].values()) == sum(second["visited"].values()) < 0.8 * 6 * ROWS / 2
    assert set(first["visited"]) | set(second["visited"]) == set(range(ROWS))


class Unequal(Module):
    """Only the first process has solved rows to report."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "solved": outputs["solved"] & (self.trainer.global_rank == 0)}


class Note(pl.Callback):
    """Leaves what a process saw in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Module)
        skip = next(callback for callback in trainer.callbacks if isinstance(callback, SkipCallback))  # type: ignore[attr-defined]
        seen = {"windows": pl_module.windows, "visited": dict(pl_module.visited), "plan": skip.solved.next_epoch()}
        torch.save(seen, self.folder / f"{trainer.global_rank}.pt")


def test_the_margin_of_a_language_model_that_trains_without_logits() -> None:
    pytest.importorskip("transformers")
    from softsieve.integrations.causal_loss import accelerate_loss
    from tests.integrations.architectures import make

    class Language(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make("Llama")
            self.loss = accelerate_loss(self.model, delta=0.1)
            self.deltas: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.deltas.append(self.loss.delta)
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows_of_tokens: Any = torch.arange(3, 35).view(8, 4)
    module, loader = Language(), DataLoader[Tensor](rows_of_tokens, batch_size=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    callback = DeltaCallback(0.2, initial_delta=1.0, ratio=0.5)
    pl.Trainer(max_epochs=1, callbacks=[callback], enable_model_summary=False, **quiet).fit(module, loader)  # type: ignore[arg-type]
    assert module.deltas == pytest.approx([1.0, 0.6, 0.2, 0.2])
