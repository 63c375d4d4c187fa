"""A model and its optimizer where Accelerate puts them: on a CPU, a GPU, or one of several processes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import FSDPModule

from softsieve import _checks
from softsieve.errors import InputError
from softsieve.layers.linear import SieveLinear
from softsieve.layers.optimizers import HeadAdamW, HeadOptimizer, HeadSGD
from softsieve.losses.objectives import Objective
from softsieve.tasks.labels import label_flags
from softsieve.tasks.models import Net, TextBody
from softsieve.tasks.rows import IGNORED, Batch
from softsieve.training.compiled import compile_layers
from softsieve.training.row_adamw import RowAdamW
from softsieve.training.settings import Settings

T = TypeVar("T")
MANY_CLASSES = 2**15  # from which logits cost more than they help
HEAD_STEPS_TAKEN = "head.weight/step"  # among the tensors of the optimizer
FEW_LOGITS = 2**26  # that evaluation holds at a time: 256 MB


class RowPass(NamedTuple):
    """What a pass showed of every row."""

    loss: Tensor
    solved: Tensor
    margin: Tensor


class Replica:
    """The model of this process. All processes take the same decisions; a batch is split among them."""

    def __init__(self, model: nn.Module, objective: Objective, settings: Settings) -> None:
        # A graph must not refer to copies of the weights that autocast made for an earlier call.
        copies = AutocastKwargs(cache_enabled=not settings.graphs)
        # Said aloud, or processes on CPUs would not know of each other.
        cpu = not torch.accelerator.is_available()
        self.accelerator = Accelerator(mixed_precision=settings.precision, kwargs_handlers=[copies], cpu=cpu)
        self.ranks, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.is_main: bool = self.accelerator.is_main_process
        self.device: torch.device = self.accelerator.device
        self.graphs = settings.graphs and self.device.type == "cuda" and self.ranks == 1
        if settings.graphs and not self.graphs and self.is_main:
            found = self.device.type if self.ranks == 1 else f"{self.ranks} processes"
            warnings.warn(
                f"graphs: runs without, for they take one process on a CUDA device, found {found}", stacklevel=2
            )
        self.sharded = "FSDP" in str(self.accelerator.distributed_type)
        # State with whole tensors, which only the main process gets of a sharded model.
        self._whole = states.StateDictOptions(full_state_dict=True, cpu_offload=self.sharded)
        self.class_weight: Tensor | None = None  # (classes,), on the device: what rows of each weigh in the loss
        self.objective, self.head_rate = objective, settings.head_rate or 1.0
        self.head = None if self.sharded else _fused_head(model, objective, settings)
        stepping = self._check_head_step(settings)
        if settings.compiled:
            compile_layers(model)
        self.model, self.optimizer = self.accelerator.prepare(model, self._make_optimizer(model, settings))
        if stepping and self.head is not None:  # where its weight is by now
            self.head = SieveLinear.from_linear(self.head, optimizer=_head_optimizer(settings))

    def _check_head_step(self, settings: Settings) -> bool:
        """Whether the head steps in its backward pass; refused where it cannot."""
        if settings.head_step is None:
            return False
        if self.ranks > 1:
            raise InputError(
                f"head_step: expected one process, found {self.ranks}: each would step a copy of the head by its own "
                "rows, and the copies would differ"
            )
        if self.head is None:
            raise InputError(
                "head_step: expected a linear head of so many classes (many_classes) and a loss without logits "
                "(as-softmax or softmax), found another"
            )
        if settings.head_dtype == "bfloat16":
            self.head.to(torch.bfloat16)
        return True

    @property
    def _head_optimizer(self) -> HeadOptimizer | None:
        """What steps the head in its backward pass, if anything does."""
        return self.head.optimizer if isinstance(self.head, SieveLinear) else None

    def _make_optimizer(self, model: nn.Module, settings: Settings) -> RowAdamW:
        """Weight decay for matrices only; the learning rate as a tensor where a graph must see it change."""
        apart = set() if settings.head_step is None or self.head is None else set(self.head.parameters())
        trainable = [p for p in model.parameters() if p.requires_grad and p not in apart]
        alone = self.accelerator.distributed_type == DistributedType.NO  # one process of torchrun is not
        texts = [module for module in model.modules() if isinstance(module, TextBody) and not self.sharded]
        for body in texts:
            body.by_rows = self.device.type == "cpu" and alone  # its gradient is sparse, which DDP does not take
        tables = [body.table.weight for body in texts]
        known = {id(table) for table in tables}
        groups = [
            {"params": tables, "weight_decay": settings.weight_decay, "by_rows": True},
            {
                "params": [p for p in trainable if p.ndim > 1 and id(p) not in known],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ]
        rate: float | Tensor = settings.learning_rate
        if self.graphs:
            rate = torch.tensor(rate, dtype=torch.float32, device=self.device)
            model.to(self.device)  # the optimizer must find its parameters where they stay
        groups = [group for group in groups if group["params"]]
        return RowAdamW(groups, lr=rate, fused=not self.sharded, capturable=self.graphs)

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._head_optimizer is not None:
            self._head_optimizer.lr = rate * self.head_rate

    def row_losses(self, batch: Batch) -> tuple[Tensor, RowPass]:
        """The outputs of the model, and what they say of every row; a row of tokens is solved, and leads, as its worst.

        Outputs are logits, or without a head what `decide` makes them of.
        """
        outputs, target = self.model(**batch.inputs).float(), batch.target
        tokens = outputs.ndim > 2 and target.shape == outputs.shape[:-1]
        if self.head is not None:
            outcome = self._in_autocast(self.objective.linear, outputs, self.head, target)
        else:
            if target.ndim == outputs.ndim and target.dtype != torch.bool:
                target = label_flags(target, outputs.shape[-1])
            # Flat: else as many positions as classes warn.
            outcome = self.objective(*((outputs.flatten(0, -2), target.flatten()) if tokens else (outputs, target)))
        loss, solved, margin = self._row_pass(*outcome)
        if self.class_weight is not None:
            loss = loss.view(target.shape) * self.class_weight[target.clamp_min(0)]
        if tokens:
            ignored = target == IGNORED
            solved = (solved.view(target.shape) | ignored).all(-1)
            margin = margin.view(target.shape).masked_fill(ignored, 1.0).amin(-1)
            loss = loss.view(target.shape).sum(-1)
        return outputs, RowPass(loss, solved, margin)

    def _row_pass(self, loss: Tensor, solved: Tensor | None, margin: Tensor | None) -> RowPass:
        """What an objective said; of one that solves nothing, nothing is."""
        if solved is None or margin is None:
            return RowPass(loss, torch.zeros_like(loss, dtype=torch.bool), torch.zeros_like(loss.detach()).float())
        return RowPass(loss, solved, margin.float())

    def decide(self, decide: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
        """Answers to the outputs of `row_losses`; without logits of so many rows that they do not fit."""
        if self.head is None:
            return decide(outputs)
        size = max(1, FEW_LOGITS // self.head.out_features)
        parts = torch.split(outputs, size)
        return torch.cat([decide(self._in_autocast(self.head, part).float()) for part in parts])

    def _in_autocast(self, function: Callable[..., T], *args: Any) -> T:
        """A call in the precision that the model runs in."""
        with self.accelerator.autocast():
            return function(*args)

    def plain_model(self) -> nn.Module:
        """The model that was given, with its weights as they are, and with its head."""
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        if self.head is not None:
            model.headless = False  # type: ignore[assignment]
            self.head.float()  # which takes what the rest of the model makes
        return model

    def share(self, index: Tensor, least: int = 0) -> tuple[Tensor, Tensor]:
        """This process's part of the rows ``index``, equally long on all; what fills it up to that has weight 0."""
        short = max(-len(index) % self.ranks, least - len(index))
        weight = torch.ones(len(index) + short, dtype=torch.float32)
        weight[len(index) :] = 0
        index = torch.cat([index, index[:1].expand(short)])
        size = len(index) // self.ranks
        part = slice(self.rank * size, (self.rank + 1) * size)
        return index[part], weight[part]

    def gather(self, value: Tensor, rows: int) -> Tensor:
        """The parts of all processes, without what was filled up."""
        gathered: Tensor = self.accelerator.gather(value) if self.ranks > 1 else value
        return gathered.narrow(0, 0, rows)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        self.model.eval()
        yield
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # which a backward pass would have done, and all that handles weights relies on

    def weights(self) -> dict[str, Tensor]:
        """The model's weights by name; of a sharded model whole, on the main process alone."""
        if self.sharded:
            whole: Any = states.get_model_state_dict(self.model, options=self._whole)
            return dict(whole)
        state: dict[str, Tensor] = self.accelerator.unwrap_model(self.model).state_dict()
        return {name: value.detach().clone() for name, value in state.items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        if self.sharded:
            options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            states.set_model_state_dict(self.model, dict[str, Any](weights), options=options)
        else:
            self.accelerator.unwrap_model(self.model).load_state_dict(weights)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by parameter and name, e.g. ``head.weight/exp_avg``."""
        whole: Any = states.get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=self._whole)
        own = whole.get("state", {}).items()
        named = {f"{name}/{key}": torch.as_tensor(value) for name, state in own for key, value in state.items()}
        return named | self._head_tensors()

    def _head_tensors(self) -> dict[str, Tensor]:
        """The state of a head that steps in its backward pass, named as that of other parameters."""
        optimizer = self._head_optimizer
        if optimizer is None:
            return {}
        states = {f"head.{name.replace('_', '/', 1)}": value for name, value in optimizer.named_buffers()}
        return {**states, HEAD_STEPS_TAKEN: torch.tensor(optimizer.steps)}

    def _load_head_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take up what `_head_tensors` returned, and return the rest."""
        own = self._head_tensors()
        if self._head_optimizer is not None:
            steps = int(tensors[HEAD_STEPS_TAKEN])
            _checks.whole_number(HEAD_STEPS_TAKEN, steps, 0, 2**62)
            for name, value in own.items():
                value.copy_(tensors[name])
            self._head_optimizer.steps = steps
        return {name: value for name, value in tensors.items() if name not in own}

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        whole: Any = states.get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=self._whole)
        own: dict[str, dict[str, Tensor]] = {}
        for name, value in self._load_head_tensors(tensors).items():
            parameter, _, key = name.rpartition("/")
            own.setdefault(parameter, {})[key] = value
        if whole:  # empty where the state will be broadcast to
            whole["state"] = own
        # Not strict: a weight that never had a gradient has no state.
        options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=self.sharded, strict=False)
        states.set_optimizer_state_dict(self.model, self.optimizer.optimizer, whole, options=options)
        for group in self.optimizer.param_groups:  # torch brings scalars to the CPU, where a graph sees no change
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(self.device)

    def random_states(self) -> dict[str, Tensor]:
        """The generators of every process, one a row."""
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        return {name: self.gather(value[None].to(self.device), self.ranks).cpu() for name, value in random.items()}

    def load_random_states(self, random: dict[str, Tensor]) -> None:
        torch.set_rng_state(random["cpu"][self.rank].clone())  # it does not bear a view
        if self.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"][self.rank].clone())


def _head_optimizer(settings: Settings) -> HeadOptimizer:
    """As the settings name it; its learning rate follows that of all."""
    if settings.head_step == "sgd":
        return HeadSGD(settings.learning_rate, weight_decay=settings.weight_decay, seed=settings.seed)
    return HeadAdamW(settings.learning_rate, weight_decay=settings.weight_decay, seed=settings.seed)


def _fused_head(model: nn.Module, objective: Objective, settings: Settings) -> nn.Linear | None:
    """The head that the objective can do without the logits of, if there are many; the model is left without it."""
    many = MANY_CLASSES if settings.many_classes is None else settings.many_classes
    if not objective.takes_hidden or not isinstance(model, Net) or not isinstance(model.head, nn.Linear):
        return None
    if model.head.out_features < many:
        return None
    model.headless = True
    return model.head
