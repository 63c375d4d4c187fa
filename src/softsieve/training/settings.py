"""All that a training run can be told, checked when it is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from softsieve import _checks
from softsieve.losses.objectives import SINGLE_LABEL, Objective, make_objective
from softsieve.losses.schedule import SHAPES, DeltaSchedule
from softsieve.training.speed import ASSpeed
from softsieve.training.weights import check_class_weights

SKIP = ("no", "solved", "infobatch", "selective-backprop", "seta")
PRECISIONS = ("no", "bf16", "fp16")
HEAD_STEPS, HEAD_DTYPES = ("sgd", "adamw"), ("float32", "bfloat16")
NEWER = (
    "loss_options",
    "skip_margin",
    "skip_after",
    "many_classes",
    "head_step",
    "head_dtype",
    "head_rate",
    "class_weights",
    "freeze_encoder",
    "compiled",
)  # than the first version
BY_DATA: Any = None  # the default of what depends on data and model: `Settings.filled` has the values
# For a model that nothing is known of: what fine-tunes an encoder.
PLAIN: dict[str, Any] = {
    "epochs": 3, "batch_size": 32, "eval_batch_size": 512, "learning_rate": 5e-5, "delta": 0.1, "metric": "accuracy",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train. A checkpoint is resumed only under the settings it was made with.

    Six of them depend on data and model: ``epochs``, ``batch_size``, ``eval_batch_size``, ``learning_rate``, ``delta``
    and ``metric``. Those that are None are filled in where training begins: by `softsieve.training.run.train` with the
    recipe of ``softsieve train``, by a `Trainer`, which knows nothing of its model, with what fine-tunes an encoder.

    Attributes:
        loss: name of the objective, one of ``softsieve.losses.objectives.SINGLE_LABEL`` (or ``MULTI_LABEL``).
        loss_options: of that objective, by name: ``{"margin": 0.2}``; None: as it comes. AS-Softmax has ``delta``.
        class_weights: of rows in the loss: ``"balanced"``, the more the rarer their class is, or by label, where only
            ratios count and a label that is not named has 1; None: all alike. For one label a row or a word.
        freeze_encoder: leave an encoder of Hugging Face as it is and train the head alone, on what it says of every
            text, which is computed once.
        epochs, batch_size: passes over the data and rows of a micro-batch on each process.
        learning_rate, weight_decay, warmup_ratio, max_grad_norm: AdamW with a linear warm-up over a share of training
            and a linear decay to 0, by samples seen; samples that are left out count as seen.
        delta, initial_delta, delta_ratio, delta_shape: margin of AS-Softmax and how it comes down (`DeltaSchedule`).
        speed_steps, speed_lambda: AS-Speed's largest number of micro-batches in an optimizer step (1: off) and lambda.
        merge: run the micro-batches of a window as one pass, which gives the same gradient faster and takes the memory
            of all of them.
        skip: ``"solved"`` leaves out what AS-Softmax has solved (`SolvedSampler`); ``"infobatch"``,
            ``"selective-backprop"`` and ``"seta"`` follow its rivals.
        skip_margin, tolerance, recheck, screen_above: policy of `SolvedSampler`, whose ``margin`` is the first.
        skip_after: optimizer steps before ``"solved"`` leaves anything out: where there are few, none can be spared.
        eval_steps, save_steps, logging_steps: optimizer steps between evaluations, checkpoints and log lines; 0 for
            evaluation means once an epoch, for checkpoints only at the end, and None for checkpoints never.
        metric, greater_is_better: what the best model is best at: a metric of the task, or ``"loss"``, and whether more
            of it is better; None: of all but the loss.
        patience: evaluations without a better metric before training stops; 0: never.
        precision: of the matrix products.
        many_classes: classes from which a linear head and its loss, where that can, go without logits; None: 32,768.
        head_step: ``"sgd"`` or ``"adamw"``: the step of a head that goes without logits happens in the backward pass
            (`SieveLinear`), where no gradient of the size of its weight is ever there; None: as all parameters. Such a
            head is not in the norm that gradients are clipped to. One process, no graphs, not fp16.
        head_dtype: of the weight of such a head; None: ``"float32"``. ``"bfloat16"`` is rounded stochastically.
        head_rate: learning rate of such a head, as a multiple of ``learning_rate``; None: 1. SGD needs a large one.
        graphs: replay steps as CUDA graphs: one process on a GPU, constant delta, not fp16. Without a GPU, on several
            processes, and for a model that cannot be recorded, steps run as they are, with a warning.
        compiled: compile the layers of an encoder, all as one, by `torch.compile`: the first step of a process takes
            half a minute or more, all others less time.
        seed: of weights, order and dropout.

    Raises:
        TypeError, ValueError: naming the setting, what was expected and what was found.

    Example:
        >>> settings = Settings(skip="solved", epochs=4)
        >>> settings.epochs, settings.learning_rate
        (4, None)
        >>> full = settings.filled({"epochs": 8, "learning_rate": 3e-3})
        >>> full.epochs, full.learning_rate
        (4, 0.003)
    """

    loss: str = "as-softmax"
    loss_options: Mapping[str, float] | tuple[tuple[str, float], ...] | None = None
    class_weights: str | Mapping[str, float] | tuple[tuple[str, float], ...] | None = None
    freeze_encoder: bool = False
    epochs: int = BY_DATA
    batch_size: int = BY_DATA
    eval_batch_size: int = BY_DATA
    learning_rate: float = BY_DATA
    weight_decay: float = 0.01
    warmup_ratio: float = 0.1
    max_grad_norm: float = 1.0
    delta: float = BY_DATA
    initial_delta: float = 1.0
    delta_ratio: float = 0.0
    delta_shape: str = "linear"
    speed_steps: int = 1
    speed_lambda: float = 1.0
    merge: bool = True
    skip: str = "no"
    skip_margin: float | None = None
    skip_after: int = 256
    tolerance: float = 0.02
    recheck: float = 0.05
    screen_above: float = 1 / 2
    eval_steps: int = 0
    save_steps: int | None = 0
    save_total_limit: int = 2
    logging_steps: int = 50
    metric: str = BY_DATA
    greater_is_better: bool | None = None
    patience: int = 0
    precision: str = "no"
    many_classes: int | None = None
    head_step: str | None = None
    head_dtype: str | None = None
    head_rate: float | None = None
    graphs: bool = False
    compiled: bool = False
    seed: int = 42

    def __post_init__(self) -> None:
        if self.learning_rate is not None and _checks.number("learning_rate", self.learning_rate, 0) == 0:
            raise ValueError("learning_rate: expected a number above 0, found 0")
        for name in ("epochs", "batch_size", "eval_batch_size", "speed_steps", "logging_steps", "save_total_limit"):
            if name not in PLAIN or getattr(self, name) is not None:
                _checks.whole_number(name, getattr(self, name), 1, 2**31)
        for name in ("eval_steps", "save_steps", "patience", "seed", "skip_after"):
            if name != "save_steps" or self.save_steps is not None:
                _checks.whole_number(name, getattr(self, name), 0, 2**31)
        if self.many_classes is not None:
            _checks.whole_number("many_classes", self.many_classes, 1, 2**31)
        for name in ("weight_decay", "max_grad_norm"):
            _checks.number(name, getattr(self, name), 0)
        _checks.number("warmup_ratio", self.warmup_ratio, 0, 1)
        if self.skip_margin is not None and _checks.number("skip_margin", self.skip_margin, 0, 1) == 0:
            raise ValueError("skip_margin: expected a number in (0, 1], found 0")
        for name, low in {"tolerance": 0, "recheck": 1e-6, "screen_above": 0}.items():
            _checks.number(name, getattr(self, name), low, 1)
        self._check_loss_options()
        object.__setattr__(self, "class_weights", check_class_weights(self.class_weights))
        _checks.choice("delta_shape", self.delta_shape, SHAPES)
        for name in ("freeze_encoder", "compiled"):
            _checks.flag(name, getattr(self, name))
        if self.compiled and self.freeze_encoder:
            raise ValueError("compiled: expected an encoder that is trained, found freeze_encoder")
        _checks.choice("skip", self.skip, SKIP)
        _checks.choice("precision", self.precision, PRECISIONS)
        if self.greater_is_better is None:
            object.__setattr__(self, "greater_is_better", self.metric != "loss")  # said, so that records have it
        self.schedule()
        self.speed()
        if not self.adaptive and (self.skip == "solved" or self.speed_steps > 1):
            what = "skip='solved'" if self.skip == "solved" else f"speed_steps={self.speed_steps}"
            raise ValueError(f"{what}: expected the loss 'as-softmax', which knows what is solved, found {self.loss!r}")
        if self.graphs and (self.precision == "fp16" or (self.adaptive and self.delta_ratio > 0)):
            raise ValueError("graphs: expected a constant delta and a precision other than fp16")

        self._check_head()

    def _check_head(self) -> None:
        """Refuse what a step in the backward pass of the head does not go with."""
        if self.head_step is None:
            for name in ("head_dtype", "head_rate"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: expected with head_step alone, found {getattr(self, name)!r}")
            return
        _checks.choice("head_step", self.head_step, HEAD_STEPS)
        if self.head_dtype is not None:
            _checks.choice("head_dtype", self.head_dtype, HEAD_DTYPES)
        if self.head_rate is not None:
            _checks.positive("head_rate", self.head_rate)
        if self.precision == "fp16":
            raise ValueError("head_step: expected a precision other than fp16, whose losses are scaled, found 'fp16'")
        if self.graphs:
            raise ValueError("head_step: expected no graphs, which cannot capture a loss without logits, found graphs")
        if self.speed_steps > 1 and not self.merge:
            raise ValueError("head_step: expected merge, because every backward pass is a step, found merge=False")

    def _check_loss_options(self) -> None:
        """Refuse what the objective does not take, and keep the rest as pairs, which can be hashed."""
        options: Any = {} if self.loss_options is None else self.loss_options
        if not isinstance(options, Mapping | tuple):
            raise TypeError(f"loss_options: expected a dict, found {type(options).__name__}")
        options = dict(options)
        for name in options.keys() & {"delta", "ignore_index", "reduction"}:
            raise ValueError(f"loss_options: expected options that the loss alone has, found {name!r}")
        if options:
            make_objective(self.loss, multilabel=self.loss not in SINGLE_LABEL, **options)
        object.__setattr__(self, "loss_options", tuple(sorted(options.items())) or None)

    @property
    def adaptive(self) -> bool:
        """Whether the loss has a margin and says which rows are solved."""
        return self.loss == "as-softmax"

    def objective(self, *, multilabel: bool) -> Objective:
        """The loss, row by row: the loop weights and divides."""
        options: dict[str, Any] = dict(self.loss_options or ())
        if self.adaptive:
            options["delta"] = self.schedule()(0)
        return make_objective(self.loss, multilabel=multilabel, reduction="none", **options)

    def filled(self, defaults: Mapping[str, Any] = PLAIN) -> Settings:
        """These with the values of ``defaults`` for what is None; `softsieve.training.recipes.usual` has such ones."""
        return dataclasses.replace(self, **{n: value for n, value in defaults.items() if getattr(self, n) is None})

    def schedule(self) -> DeltaSchedule:
        """The margin as a function of the share of training that is done."""
        delta = PLAIN["delta"] if self.delta is None else self.delta
        return DeltaSchedule(delta, self.initial_delta, self.delta_ratio, total_steps=1, shape=self.delta_shape)

    def speed(self) -> ASSpeed:
        """AS-Speed at its start."""
        return ASSpeed(self.speed_lambda, self.speed_steps)

    def learning_rate_at(self, progress: float) -> float:
        """Linear warm-up and decay over training, ``progress`` in [0, 1]."""
        if progress < self.warmup_ratio:
            return self.learning_rate * progress / self.warmup_ratio
        return self.learning_rate * (1 - progress) / (1 - self.warmup_ratio) if self.warmup_ratio < 1 else 0.0

    def asdict(self) -> dict[str, Any]:
        """As plain values, for JSON; of those that earlier versions did not have, the ones that are given."""
        values = dataclasses.asdict(self)
        if self.loss_options is not None:
            values["loss_options"] = dict(self.loss_options)
        if isinstance(self.class_weights, tuple):
            values["class_weights"] = dict(self.class_weights)
        if self.skip != "solved":
            values["skip_after"] = None
        values |= dict.fromkeys(name for name in ("freeze_encoder", "compiled") if not values[name])
        return {name: value for name, value in values.items() if name not in NEWER or value is not None}
