"""What `softsieve train` can be told, and the settings that come of it.

The options have the names of Hugging Face's training scripts and of the published AS-Softmax code, so that their
command lines work as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from softsieve import _checks
from softsieve.errors import InputError
from softsieve.training.settings import Settings

STRATEGIES = ("steps", "epoch", "no")
NEVER = 2**31  # a number of steps that no run gets to
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _panel(title: str) -> Callable[..., Any]:
    """Makes the options that stand under a title in the help."""

    def option(help: str, default: Any = None, *, names: Sequence[str] = (), **more: Any) -> Any:
        made = typer.Option(*names, help=help, rich_help_panel=title, show_default=False, **more)
        return field(default=default, metadata={"option": made})

    return option


_data, _model, _training = _panel("What to learn from"), _panel("The model"), _panel("Training")
_margin = _panel("AS-Softmax (--loss as-softmax)")
_when, _output = _panel("When to evaluate, log and save"), _panel("Output")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `softsieve train`, as they were given."""

    data: str | None = _data(
        "a file (.csv, .tsv, .jsonl, .parquet, .conll), a folder (one folder per class, or train.csv and so on), a "
        "Hugging Face data set or a data set we know (see --task-name)",
    )
    validation_data: str | None = _data("validation data of its own")
    test_data: str | None = _data("test data of its own")
    task_name: str | None = _data(
        "a data set we know: sst5, clinc150, goemotions, reuters, eurlex57k, conll2003, sighan15, mnist, eurosat, "
        "cifar10 or fsdd, read from --data-dir",
    )
    data_dir: Path | None = _data("where the data sets we know are, a folder each; data if not given")  # noqa: RUF009
    task: str | None = _data("text, multilabel, tokens, image or audio; found from the data if not given")
    text_column: str | None = _data("column of texts, words or file names, where its name does not tell")
    label_column: str | None = _data("column of labels, where its name does not tell")
    validation_share: float | None = _data(
        "share of the rows held out where there are no validation data; 0.1 if not given"
    )
    max_seq_length: int = _data("words or tokens of a text that the model reads; 128", 128)
    dataloader_num_workers: int = _data("threads that decode images and sounds; 0", 0, min=0)
    dataloader_pin_memory: bool = _data(
        "nothing to do here, accepted for scripts: all rows are on the device from the start", True
    )

    model_name_or_path: str | None = _model(
        "name or folder of a Hugging Face encoder; a small built-in model if not given"
    )
    cache_dir: Path | None = _model("where to keep what is downloaded from Hugging Face")  # noqa: RUF009

    do_train: bool = _training(
        "train; of --do-train, --do-eval and --do-predict, all three are done if none is given", False
    )
    do_eval: bool = _training("evaluate on the validation data", False)
    do_predict: bool = _training("evaluate on the test data", False)
    loss: str = _training(
        "as-softmax (this if not given), softmax, t-softmax, sparse-softmax, sparsemax, entmax-1.5, label-smoothing or "
        "am-softmax; multi-label: as-softmax, softmax (ZLPR), bce, focal-bce or asymmetric",
        "as-softmax",
    )
    num_train_epochs: float | None = _training("passes over the data; 3, and more for the built-in models")
    learning_rate: float | None = _training("peak; 5e-5, and more for the built-in models")
    per_device_train_batch_size: int | None = _training("rows of a batch on each process")
    per_device_eval_batch_size: int | None = _training("rows of a batch in evaluation", min=1)
    weight_decay: float = _training("of AdamW; 0.01", 0.01)
    warmup_ratio: float = _training("share of training in which the learning rate rises; 0.1", 0.1)
    max_grad_norm: float = _training("gradients are clipped to this norm, 0 for never; 1", 1.0)
    fp16: bool = _training("mixed precision on a GPU; without one, float32 and a word about it", False)
    bf16: bool = _training("mixed precision", False)
    head_step: str | None = _training(
        "sgd or adamw: from 32,768 classes on, step the last layer inside the backward pass, without a gradient of the "
        "size of its weight; it takes no part in --max-grad-norm"
    )
    head_dtype: str | None = _training("of the weight of that layer: float32 (this if not given) or bfloat16")
    head_rate: float | None = _training("its learning rate, as a multiple of the others'; 1, and more suits sgd")
    head_index: bool | None = _training(
        "save an index of the last layer with the model, by which predict answers without reading all of it; from "
        "32,768 classes on, if there are validation rows enough to calibrate it with"
    )
    graphs: bool = _training("replay steps as CUDA graphs, which small models gain from", False)
    seed: int = _training("of weights, order and dropout; 42", 42)

    min_as_delta: float | None = _margin(
        "the margin: a row is solved when its label beats every other class by it; 0.1, multi-label 0.7",
        names=("--min-as-delta", "--delta"),
    )
    as_warm_up: bool = _margin("bring the margin down to its value from --initial-as-delta", False)
    initial_as_delta: float = _margin("margin at the start of --as-warm-up; 1.0, plain softmax", 1.0)
    ratio: float = _margin("share of training that --as-warm-up takes; 0", 0.0)
    as_speed_up: bool = _margin("AS-Speed: larger steps the more rows are solved", False)
    accu_steps: int = _margin("batches in a step of --as-speed-up at most; 2", 2)
    accu_lambda: float = _margin("how soon --as-speed-up takes larger steps; 1", 1.0)
    skip_solved: bool = _margin("leave out rows that lead safely and screen them again later", False)
    skip_margin: float | None = _margin("lead from which --skip-solved leaves rows out; measured while training")
    skip_after: int | None = _margin("optimizer steps before --skip-solved leaves anything out; 256")
    tolerance: float | None = _margin("share of wrongly left out rows for --skip-solved; 0.01")

    evaluation_strategy: str | None = _when(
        "steps, epoch (this if not given) or no, which leaves one evaluation at the end",
        names=("--evaluation-strategy", "--eval-strategy"),
    )
    eval_steps: int | None = _when("optimizer steps between evaluations; 500", min=1)
    logging_strategy: str | None = _when("steps (this if not given), epoch or no")
    logging_steps: int | None = _when("optimizer steps between log lines; 50", min=1)
    save_strategy: str | None = _when(
        "steps, epoch (as many steps as one has when nothing is skipped) or no (this if not given)"
    )
    save_steps: int | None = _when("optimizer steps between checkpoints; 500", min=1)
    save_total_limit: int = _when("checkpoints to keep; 2", 2)
    metric_for_best_model: str | None = _when(
        "loss, accuracy, macro_f1, micro_f1 or entity_f1; found from the kind of data if not given"
    )
    greater_is_better: bool | None = _when("whether it is; found from the metric if not given")
    load_best_model_at_end: bool = _when(
        "keep the weights of the best evaluation; for the last ones, --evaluation-strategy no", True
    )
    early_stopping_patience: int = _when("evaluations without a better one before training stops; 0: never", 0)

    output_dir: Path = _output(  # noqa: RUF009
        "for the model, its metrics, checkpoints and the log; softsieve-run if not given", Path("softsieve-run")
    )
    overwrite_output_dir: bool = _output("replace the run that is there", False)
    resume_from_checkpoint: str | None = _output(
        "a checkpoint's folder to go on from; bare or True, the latest in --output-dir"
    )
    show_progress: bool = _output("show a progress bar", True)
    quiet: bool = _output("print nothing but errors", False)

    @property
    def asks_evaluation(self) -> bool:
        """Whether it was said that there should be evaluations on validation data."""
        often = self.evaluation_strategy in ("steps", "epoch") or self.eval_steps is not None
        return self.do_eval or often or self.early_stopping_patience > 0

    @property
    def does_all(self) -> bool:
        """Whether nothing was said of what to do."""
        return not (self.do_train or self.do_eval or self.do_predict)

    @property
    def trains(self) -> bool:
        """Whether to train, or only to judge the model that is there."""
        return self.do_train or self.does_all

    @property
    def evaluates(self) -> bool:
        """Whether to use the validation data."""
        return self.asks_evaluation or self.does_all

    @property
    def predicts(self) -> bool:
        """Whether to use the test data."""
        return self.do_predict or self.does_all


def takes_options(command: Callable[[Options], None]) -> Callable[..., None]:
    """The command as a function of single options, as Typer wants it."""
    types = get_type_hints(Options)
    hints: dict[str, Any] = {f.name: Annotated[types[f.name], f.metadata["option"]] for f in fields(Options)}
    parameters = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(Options)
    ]

    def call(**values: Any) -> None:
        command(Options(**values))

    call.__name__, call.__doc__, call.__annotations__ = command.__name__, command.__doc__, hints
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


class ScriptCommand(TyperCommand):
    """Takes underscores for dashes, and flags bare or followed by True or False."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """With what scripts write put into what Typer reads."""
        flags = {name for p in self.params if getattr(p, "is_flag", False) for name in p.opts}
        return super().parse_args(ctx, list(plain_arguments(args, flags)))


def plain_arguments(args: Sequence[str], flags: set[str]) -> Iterator[str]:
    """Arguments with dashes for underscores in names, flags without values, and other options with them.

    Example:
        >>> args = ["--fp16", "False", "--do_eval", "--save_steps=9", "--resume_from_checkpoint", "--do_train", "True"]
        >>> list(plain_arguments(args, {"--fp16", "--do-eval", "--do-train"}))
        ['--no-fp16', '--do-eval', '--save-steps=9', '--resume-from-checkpoint', 'True', '--do-train']
    """
    rest = list(args)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in flags and not equals and rest and rest[0].lower() in TRUTH:
            equals, value = "=", rest.pop(0)
        if name in flags and value.lower() in TRUTH:
            yield name if TRUTH[value.lower()] else f"--no-{name[2:]}"
            continue
        yield name + equals + value
        if name == "--resume-from-checkpoint" and not equals and (not rest or rest[0].startswith("-")):
            yield "True"


def steps_between(what: str, strategy: str | None, steps: int | None, usual: str, often: int, epoch: int) -> int:
    """Optimizer steps from one evaluation, log line or checkpoint (``what``) to the next.

    ``usual`` is the strategy when none was asked for, ``often`` the steps when only "steps" was, and ``epoch`` what
    stands for once an epoch.
    """
    strategy = strategy or ("steps" if steps is not None else usual)
    _checks.choice(f"{what}_strategy", strategy, STRATEGIES)
    if strategy != "steps" and steps is not None:
        raise InputError(f"{what}_steps: expected only with the strategy steps, found it with {strategy}")
    return {"steps": steps or often, "epoch": epoch, "no": NEVER}[strategy]


def make_settings(
    options: Options, defaults: Mapping[str, Any], *, rows: int, validation: bool, processes: int = 1, gpu: bool = False
) -> Settings:
    """The settings of a run with so many training ``rows``, shared by ``processes``, where there is a ``gpu`` or not.

    ``defaults`` has epochs, batch_size, eval_batch_size, learning_rate, metric and delta, for what was not asked for.

    Raises:
        InputError, TypeError, ValueError: naming the option, what was expected and what was found.
    """

    def either(asked: Any, name: str) -> Any:
        return defaults[name] if asked is None else asked

    eval_steps = steps_between("eval", options.evaluation_strategy, options.eval_steps, "epoch", 500, 0)
    if validation and eval_steps != NEVER and not options.load_best_model_at_end:
        raise InputError(
            "load_best_model_at_end: expected True, found False: for the last weights give --evaluation_strategy no"
        )
    if options.fp16 and options.bf16:
        raise InputError("precision: expected fp16 or bf16, found both")
    for name in ("skip_margin", "skip_after", "tolerance"):
        if getattr(options, name) is not None and not options.skip_solved:
            raise InputError(f"{name}: expected only with --skip_solved")
    epochs = float(either(options.num_train_epochs, "epochs"))
    if not epochs.is_integer():
        raise InputError(f"num_train_epochs: expected a whole number, found {epochs:g}")
    batch_size = either(options.per_device_train_batch_size, "batch_size")
    _checks.whole_number("per_device_train_batch_size", batch_size, 1, NEVER)
    epoch = -(-rows // (batch_size * processes))
    delta = either(options.min_as_delta, "delta")
    for name, value in {"min_as_delta": delta, "initial_as_delta": options.initial_as_delta}.items():
        _checks.number(name, value, 0, 1)
    metric = either(options.metric_for_best_model, "metric").removeprefix("eval_")
    save_steps = steps_between("save", options.save_strategy, options.save_steps, "no", 500, epoch)
    same = ("loss", "weight_decay", "warmup_ratio", "max_grad_norm", "save_total_limit", "greater_is_better")
    return Settings(
        **{name: getattr(options, name) for name in (*same, "graphs", "seed", "head_step", "head_dtype", "head_rate")},
        epochs=int(epochs),
        batch_size=batch_size,
        eval_batch_size=either(options.per_device_eval_batch_size, "eval_batch_size"),
        learning_rate=either(options.learning_rate, "learning_rate"),
        delta=delta,
        initial_delta=options.initial_as_delta,
        delta_ratio=options.ratio if options.as_warm_up else 0.0,
        speed_steps=options.accu_steps if options.as_speed_up else 1,
        speed_lambda=options.accu_lambda,
        skip="solved" if options.skip_solved else "no",
        skip_margin=options.skip_margin,
        skip_after=Settings.skip_after if options.skip_after is None else options.skip_after,
        tolerance=Settings.tolerance if options.tolerance is None else options.tolerance,
        eval_steps=eval_steps if validation else 0,
        logging_steps=steps_between("logging", options.logging_strategy, options.logging_steps, "steps", 50, epoch),
        save_steps=0 if save_steps == NEVER else save_steps,
        metric=metric,
        patience=options.early_stopping_patience,
        precision="bf16" if options.bf16 else "fp16" if options.fp16 and gpu else "no",
    )
