"""Language models of Hugging Face whose training loss needs no logits: `accelerate_loss` and `restore_loss`.

Two methods of the model's instance are replaced, its ``forward`` and that of its output layer. While it trains with
labels the layer hands back `LazyLogits`, on which the model's own code computes its own loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import _checks
from softsieve.errors import InputError, first_line
from softsieve.integrations.causal_checks import check_model, evaluating, is_sharded, own_loss, probe
from softsieve.integrations.causal_layer import as_product, check_adapter, check_layer, has_lora, own_layer, rounding
from softsieve.integrations.deferred_logits import defer
from softsieve.integrations.hidden_states import layer_of
from softsieve.integrations.lazy_logits import After, LazyLogits, Product
from softsieve.losses.linear import LinearASStats, check_options, compute

WEIGHTS = "token_weights"  # of a batch: one for each label
TEMPERATURE = "token_log_probs_temperature"  # by which `token_log_probs` asks a forward pass for log-probabilities
WRAPPERS = 8  # of other packages around a forward pass, at most
SHIFTS: dict[str, Callable[[Tensor, float], Tensor]] = {  # what models do to their labels, with a fill for the end
    "padded": lambda values, fill: F.pad(values, (0, 1), value=fill)[..., 1:],
    "cut": lambda values, fill: values[..., 1:],
    "none": lambda values, fill: values,
}


class CausalLoss:
    """How a model's loss is computed by `accelerate_loss`, and what the latest batches were like.

    Attributes:
        delta: margin of the loss in training, in [0, 1]; may be changed at any time. In evaluation it is 1.
        evaluates: whether the loss of an evaluation needs no logits either. Then ``outputs.logits`` is a
            `DeferredLogits` there, or with ``"tokens"`` the predicted tokens.
        stats: `LinearASStats` of the latest batch, one entry for each label as the loss got them.
        counted: which of these labels were not ignored.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> loss = accelerate_loss(model, delta=0.1)
        >>> tokens = torch.arange(6)[None]
        >>> model.train()(input_ids=tokens, labels=tokens).loss.backward()
        >>> loss.summary()["tokens"]
        5
    """

    def __init__(self, delta: float, backend: str, memory: int | None = None) -> None:
        self.delta, self.backend, self.memory = delta, backend, memory
        self.evaluates: bool | str = False
        self.stats: LinearASStats | None = None
        self.counted: Tensor | None = None
        self.collecting = False  # whether the layer hands back lazy logits
        self.training = True
        self.labels: Tensor | None = None  # of the batch under way
        self.weights: Tensor | None = None  # of these labels
        self.shift: str | None = None  # which of `SHIFTS` the model's code does, once that is known
        self.called = False  # whether anyone has asked for a loss
        self.rounding = 0.0  # relative, of the dtype that the latest logits would have
        self._totals: dict[bool, Tensor] = {}  # tokens, right, solved, lse, margin: in training and in evaluation

    def judge(
        self, logits: LazyLogits, target: Tensor, *, weight: Tensor | None, ignore_index: int, reduction: str
    ) -> Tensor:
        """The loss of these logits, in place of `F.cross_entropy`."""
        if target.shape != logits.shape[:-1]:
            raise InputError(
                f"labels: expected one for each of the {logits.shape[:-1].numel()} positions of the logits, "
                f"found {target.numel()}"
            )
        delta = self.delta if self.training else 1.0
        first = not (torch.compiler.is_compiling() or self.called)  # the few tokens of `_compare`
        if self.shift is None and self.labels is not None and (first or self.weights is not None):
            self._find_shift(self.labels, target, ignore_index)
        row_weight = None if self.weights is None else self._shifted(self.weights, target, ignore_index)

        return self._compute(
            logits, target, delta=delta, ignore_index=ignore_index, reduction=reduction, class_weight=weight,
            row_weight=row_weight,
        )  # fmt: skip

    def log_probs(self, logits: LazyLogits, target: Tensor, *, delta: float = 1.0, ignore_index: int = -100) -> Tensor:
        """Of each label, differentiable; 0 where it is ignored. With a delta below 1 minus the loss of each."""
        return -self._compute(logits, target, delta=delta, ignore_index=ignore_index, reduction="none")

    def _compute(
        self, logits: LazyLogits, target: Tensor, *, delta: float, ignore_index: int, reduction: str,
        class_weight: Tensor | None = None, row_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        def work(product: Product) -> Any:
            return compute(
                product.hidden, product.weight, target, bias=product.bias, delta=delta, ignore_index=ignore_index,
                reduction=reduction, class_weight=class_weight, row_weight=row_weight, softcap=product.softcap,
                backend=self.backend, group=None, return_stats=True, memory=self.memory, loss_dtype=_loss_dtype(logits),
            )  # fmt: skip

        loss, stats = logits.judged(work)
        self.called = True
        self._note(stats, target != ignore_index)
        return loss  # type: ignore[no-any-return]

    def _note(self, stats: LinearASStats, counted: Tensor) -> None:
        self.stats, self.counted = stats, counted
        solved = stats.solved if self.training else stats.margin > self.delta  # an evaluation's own delta is 1
        parts = (counted, stats.right, solved, stats.lse, stats.margin.clamp_min(0))
        sums = torch.stack([part.sum(dtype=torch.float64).detach() for part in parts])
        before = self._totals.get(self.training)
        self._totals[self.training] = sums if before is None else before.to(sums.device) + sums

    def totals(self, *, training: bool = True) -> Tensor:
        """Sums over the labels since the last call: how many, right, solved, log Z and margins above 0."""
        found = self._totals.get(training)
        if found is None:
            return torch.zeros(5, dtype=torch.float64)
        self._totals[training] = torch.zeros_like(found)  # still there: a compiled model need not be compiled again
        return found

    def summary(self, totals: Tensor | None = None, *, training: bool = True) -> dict[str, float]:
        """What the batches since the last call were like, or those that some `totals` are of.

        Args:
            totals: of several processes together; None: this one's.
            training: whether the batches of training are meant, or those of evaluation.

        Returns:
            ``tokens`` that counted, ``token_accuracy`` (the share whose label has the largest logit), ``solved`` (the
            share that leads by the margin, whose gradient in training is 0), mean ``lse`` (log Z) and mean ``margin``
            (0 where another token leads). Only ``tokens`` when there were none.
        """
        sums = self.totals(training=training) if totals is None else totals
        count, right, solved, lse, margin = sums.tolist()
        if count == 0:
            return {"tokens": 0}
        means = {"token_accuracy": right, "solved": solved, "lse": lse, "margin": margin}
        return {"tokens": int(count), **{name: value / count for name, value in means.items()}}

    def _find_shift(self, labels: Tensor, target: Tensor, ignore_index: int) -> None:
        """Find out how the model's code has shifted its labels, which labels that are all ignored do not tell."""
        moved = {way: shifted(labels, ignore_index).flatten() for way, shifted in SHIFTS.items()}
        fitting = [way for way, values in moved.items() if torch.equal(values, target.flatten().to(values.dtype))]
        if len(fitting) == 1:
            self.shift = fitting[0]

    def _shifted(self, weights: Tensor, target: Tensor, ignore_index: int) -> Tensor | None:
        """The weights of the batch, shifted as the model's code has shifted its labels."""
        if self.shift is not None:
            return SHIFTS[self.shift](weights, 0.0).reshape(target.shape)
        if bool((target != ignore_index).any()):
            raise InputError(f"{WEIGHTS}: expected a model that shifts its labels by one or not at all, found another")
        return None  # there is nothing to weigh

    @contextmanager
    def collect(self, *, training: bool, labels: Tensor | None = None, weights: Tensor | None = None) -> Iterator[None]:
        """While this lasts, the output layer hands back lazy logits."""
        self.collecting, self.training, self.labels, self.weights = True, training, labels, weights
        try:
            yield
        finally:
            self.collecting, self.labels, self.weights = False, None, None


def _loss_dtype(logits: LazyLogits) -> torch.dtype:
    """That of the dense loss, which models compute in float32."""
    return torch.promote_types(logits.dtype, torch.float32)


def _with_weights(forward: Any) -> inspect.Signature:
    """The signature of a ``forward`` that takes weights of tokens, too."""
    signature = inspect.signature(forward)
    parameters = [*signature.parameters.values()]
    if WEIGHTS not in signature.parameters:
        last = parameters[-1].kind == inspect.Parameter.VAR_KEYWORD
        extra = inspect.Parameter(WEIGHTS, inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters.insert(len(parameters) - last, extra)
    return signature.replace(parameters=parameters)


class SignedForward:
    """``forward`` of a model that will have an accelerated loss: it names the weights of tokens, and leaves them out.

    A Trainer asks for the signature before training starts, and drops what is not in it from the data.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.own = model.__dict__.get("forward")
        self.before = self.own or type(model).forward.__get__(model)
        self.__signature__ = _with_weights(self.before)
        model.forward = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        options.pop(WEIGHTS, None)
        return self.before(*args, **options)

    def leave(self) -> None:
        if self.model.__dict__.get("forward") is self:
            del self.model.forward
            if self.own is not None:
                self.model.forward = self.own


class ModelForward:
    """``forward`` of a model with an accelerated loss; an object, so that a copy of the model calls the copy."""

    def __init__(self, model: Any, loss: CausalLoss) -> None:
        self.model, self.loss = model, loss
        self.own = model.__dict__.get("forward")  # what stood there, of another package
        self.before = self.own or type(model).forward.__get__(model)
        self.__signature__ = _with_weights(self.before)
        self.position = [*self.__signature__.parameters].index("labels")
        self.layer: LayerForward | None = None
        self.active = True

    def __call__(self, *args: Any, **options: Any) -> Any:
        if TEMPERATURE in options:
            return self._log_probs(options.pop(TEMPERATURE), options.pop("labels"), options)
        weights = options.pop(WEIGHTS, None)
        labels = args[self.position] if len(args) > self.position else options.get("labels")
        loss, training = self.loss, self.model.training
        if not self.active or labels is None or not (training or loss.evaluates):
            return self.before(*args, **options)
        self.follow()
        if _checks.tensor("labels", labels).is_floating_point():
            raise TypeError(f"labels: expected integers, found {labels.dtype}")
        if weights is not None:
            _checks.each_row(WEIGHTS, weights, labels)
            weights = weights if training else None  # an evaluation is that of the model without them
        if options.pop("fused_lm_head", False):  # TRL asks for log-probabilities in this way
            from softsieve.integrations.causal_trl import fused_outputs

            return fused_outputs(self, args, options, weights)
        with loss.collect(training=training, labels=labels, weights=weights):
            outputs = self.before(*args, **options)
        return outputs if training else _evaluated(outputs, loss.evaluates)

    def _log_probs(self, temperature: float, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """Those of the next tokens, made in here: what wraps the model sees parameters that are used, and whole."""
        self.follow()
        with self.loss.collect(training=self.model.training):
            logits: LazyLogits = self.before(**options).logits
            return self.loss.log_probs(logits[:, :-1] / temperature, labels[:, 1:])

    def follow(self) -> None:
        """Be where the model's output layer is now, which PEFT may have replaced, with the adapter that is on."""
        layer = layer_of(self.model)
        if self.layer is None or self.layer.layer is not layer:
            check_adapter(layer) if is_sharded(layer) else check_layer(layer)
            if self.layer is not None:
                self.layer.leave()
            self.layer = LayerForward(layer, self.loss)
        elif has_lora(own_layer(layer)):
            check_adapter(layer)

    def leave(self) -> None:
        self.active = False
        if self.layer is not None:
            self.layer.leave()
        if self.model.__dict__.get("forward") is self:  # else another package has wrapped it, and it passes on
            del self.model.forward
            if self.own is not None:
                self.model.forward = self.own


class LayerForward:
    """``forward`` of an output layer: lazy logits while the model asks for them, else what it was."""

    def __init__(self, layer: Any, loss: CausalLoss) -> None:
        self.layer, self.loss = layer, loss
        self.own = layer.__dict__.get("forward")
        self.before = self.own or type(layer).forward.__get__(layer)
        layer.forward = self

    def __call__(self, hidden: Tensor, *args: Any, work: Any = None, **options: Any) -> Any:
        if work is not None:
            return work(hidden)
        if not self.loss.collecting:
            return self.before(hidden, *args, **options)
        if args or options:
            what = ", ".join(options) or f"{1 + len(args)} arguments"
            raise InputError(f"model: expected an output layer that is given states alone, found {what}")
        _check_shape(self.loss.labels, hidden.shape[:-1])
        kind = hidden.device.type
        casts = torch.is_autocast_enabled(kind)
        inside = torch.get_autocast_dtype(kind) if casts else hidden.dtype
        self.loss.rounding = torch.finfo(inside).eps

        def run(states: Tensor, after: After, work: Callable[[Product], Any]) -> Any:
            # Called through the module, so that what shards its weight has it whole in there.
            def within(states: Tensor) -> Any:
                with torch.autocast(kind, dtype=inside if casts else None, enabled=casts):
                    return work(after.of(*as_product(self.layer, states)))

            return self.layer(states, work=within)

        return LazyLogits(hidden, _classes(self.layer), run, self.loss.judge, dtype=inside)

    def leave(self) -> None:
        if self.layer.__dict__.get("forward") is self:
            del self.layer.forward
            if self.own is not None:
                self.layer.forward = self.own


def _check_shape(labels: Tensor | None, positions: torch.Size) -> None:
    """Refuse as many labels as positions in another order, which a model's code flattens without a word."""
    if labels is None or len(positions) != 2 or labels.numel() != positions.numel() or labels.shape == positions:
        return
    raise InputError(f"labels: expected {tuple(positions)}, one for each position, found {tuple(labels.shape)}")


def _evaluated(outputs: Any, evaluates: bool | str) -> Any:
    """The outputs of an evaluation with tensors in them alone: predicted tokens, or logits that are made when used."""

    def tensor_of(value: Any) -> Any:
        if not isinstance(value, LazyLogits):
            return value
        return value.argmax(-1) if evaluates == "tokens" else defer(value)

    if not isinstance(outputs, dict):
        return tuple(tensor_of(value) for value in outputs)
    for name, value in outputs.items():
        outputs[name] = tensor_of(value)
    return outputs


def _classes(layer: Any) -> int:
    inner = own_layer(layer)
    return len((inner.get_base_layer() if has_lora(inner) else inner).weight)


def inner_model(model: Any) -> Any:
    """The model of transformers inside one of PEFT, `torch.compile` or a data-parallel wrapper."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def loss_of(model: Any) -> ModelForward | None:
    """What `accelerate_loss` has put into a model; None when it has not."""
    forward: Any = inner_model(model).__dict__.get("forward") if isinstance(model, nn.Module) else None
    for _ in range(WRAPPERS):
        if isinstance(forward, ModelForward) or forward is None:
            return forward
        forward = inside(forward)
    return None


def inside(forward: Any) -> Any:
    """What a wrapper of ``forward`` calls, where that can be told."""
    for name in ("__wrapped__", "model_forward", "__func__", "func"):
        inner = getattr(forward, name, None)
        if inner is not None and inner is not forward:
            return inner
    return None


def check_evaluate(value: object) -> None:
    """Refuse what does not say how evaluations are made."""
    if not isinstance(value, bool) and value != "tokens":
        raise ValueError(f"evaluate: expected True, False or 'tokens', found {value!r}")


def accelerate_loss(
    model: Any, delta: float = 0.1, *, backend: str = "auto", memory: int | None = None, evaluate: bool | str = False
) -> CausalLoss:
    """Let a language model train without its logits, by AS-Softmax; with ``delta=1.0`` by its own cross-entropy.

    The model's forward pass stays its own: shifting of labels, ``num_items_in_batch``, scaling and soft-capping of
    logits, auxiliary losses. Without labels, in evaluation and in ``generate`` it does what it did. In training a
    batch may have ``token_weights``, a number for each label. ``outputs.logits`` is a `LazyLogits` while the model
    trains with labels.

    Works with PEFT (also LoRA on the output layer), `torch.compile`, gradient checkpointing, DDP and FSDP2. On a
    model that a trainer of TRL has been given, call it after the trainer is made.

    Args:
        model: a causal or sequence-to-sequence language model of Hugging Face, or one of PEFT.
        delta: margin in [0, 1]: a token whose probability leads all others by more than it has no gradient.
        backend: that of `linear_as_cross_entropy`.
        memory: also its: bytes that the loss may take beyond states and gradients. On a GPU more makes it faster, most
            where the logits of a batch fit, in the dtype of the pass.
        evaluate: whether the loss of an evaluation, which is the plain cross-entropy, needs no logits either. With True
            ``outputs.logits`` is a tensor that is made when something first needs it (`DeferredLogits`), with
            ``"tokens"`` the predicted tokens stand there, for a ``compute_metrics`` that needs no more.

    Returns:
        What may be changed while training, and tells of the batches. The model is left as it was if anything is wrong.

    Raises:
        InputError: for a model without a linear output layer in memory, on one device, or whose loss another package
            has replaced; when a few tokens show another loss than the model's own.
        TypeError, ValueError: for options that there are not.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> tokens = torch.arange(6)[None]
        >>> dense = model.train()(input_ids=tokens, labels=tokens).loss
        >>> _ = accelerate_loss(model, delta=1.0)
        >>> torch.allclose(model(input_ids=tokens, labels=tokens).loss, dense)
        True
    """
    if memory is not None:
        _checks.whole_number("memory", memory, 1, 2**62)
    loss = CausalLoss(_checks.number("delta", delta, 0, 1), backend, memory)
    check_options(-100, "mean", backend)
    check_evaluate(evaluate)
    model = inner_model(model)
    if (before := loss_of(model)) is not None and before.active:
        raise InputError("model: expected one with its own loss, found an accelerated one: call restore_loss first")
    check_model(model)
    dense = own_loss(model)
    forward = ModelForward(model, loss)
    model.forward = forward
    try:
        forward.follow()
        if dense is not None:
            _compare(model, loss, dense)
    except BaseException:
        forward.leave()
        raise
    loss.evaluates = evaluate
    return loss


def restore_loss(model: Any) -> None:
    """Give a model its own loss back.

    Raises:
        InputError: when it has it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> _ = accelerate_loss(model)
        >>> restore_loss(model)
        >>> "forward" in vars(model)
        False
    """
    forward = loss_of(model)
    if forward is None or not forward.active:
        raise InputError("model: expected an accelerated loss, found the model's own")
    forward.leave()


@torch.no_grad()
def _compare(model: Any, loss: CausalLoss, dense: float) -> None:
    """Refuse a model whose loss comes out differently for a few tokens."""
    loss.evaluates = True
    with evaluating(model):
        try:
            ours = float(model(**probe(model), return_dict=True).loss)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"model: expected a loss that needs no logits, found {first_line(error)}") from error
    if not loss.called:
        raise InputError("model: expected a loss of its output layer's logits, found one of something else")
    rounded = max(loss.rounding, rounding(check_adapter(layer_of(model)).weight))
    bound = max(1e-4, 32 * rounded) * max(1.0, abs(dense))
    if math.isfinite(dense) and not abs(ours - dense) <= bound:
        raise InputError(f"model: expected the model's own loss at delta 1, {dense:.6g}, found {ours:.6g}")
    loss._totals = {kind: torch.zeros_like(loss.totals(training=False)) for kind in (True, False)}
    loss.stats = loss.counted = None
    loss.called = False
