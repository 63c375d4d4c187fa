"""What `softsieve train` can be told, and the settings that come of it.

The names of Hugging Face's training scripts and of the published AS-Softmax code do as well (`softsieve.cli.script`),
so that their command lines work as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from softsieve import _checks
from softsieve.cli.devices import DEVICE_HELP
from softsieve.cli.script import CONFIG_HELP, LENGTH_HELP
from softsieve.errors import InputError, shown
from softsieve.tasks.files import parse_json, read_text
from softsieve.training.settings import Settings
from softsieve.training.weights import BALANCED

STRATEGIES = ("steps", "epoch", "no")
OF_ONE_RUN = ("out", "overwrite", "resume", "config", "show_progress", "quiet")  # say nothing of what comes out
NEVER = 2**31  # a number of steps that no run gets to


def _panel(title: str) -> Callable[..., Any]:
    """Makes the options that stand under a title in the help."""

    def option(help: str, default: Any = None, **more: Any) -> Any:
        made = typer.Option(help=help, rich_help_panel=title, show_default=False, **more)
        return field(default=default, metadata={"option": made})

    return option


_data, _model, _training = _panel("What to learn from"), _panel("The model"), _panel("Training")
_margin = _panel("AS-Softmax (--loss as-softmax)")
_when, _output = _panel("When to evaluate, log and save"), _panel("Output")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `softsieve train`, as they were given."""

    data: str | None = _data(
        "a file (.csv, .tsv, .jsonl, .json, .parquet, .conll, .txt), a folder (one folder per class, or train.csv and "
        "so on), a Hugging Face data set or a data set we know (see --task_name)",
    )
    validation_data: str | None = _data("validation data of its own")
    test_data: str | None = _data("test data of its own")
    task_name: str | None = _data(
        "a data set we know: sst5, clinc150, goemotions, reuters, eurlex57k, conll2003, sighan15, mnist, eurosat, "
        "cifar10 or fsdd, read from --data_dir",
    )
    data_dir: Path | None = _data("where the data sets we know are, a folder each; data if not given")  # noqa: RUF009
    kind: str | None = _data("text, multilabel, tokens, image or audio; found from the data if not given")
    text_column: str | None = _data("column of texts, words or file names, where its name does not tell")
    label_column: str | None = _data("column of labels, where its name does not tell")
    validation_share: float | None = _data(
        "share of the rows held out where there are no validation data; 0.1 if not given"
    )
    max_train_samples: int | None = _data("train on so many rows, drawn at random with --seed", min=1)
    max_eval_samples: int | None = _data("judge by so many validation and test rows, drawn in the same way", min=1)
    on_error: str = _data("stop at a bad row, image or sound, or skip it and say how many there were; stop", "stop")
    delimiter: str | None = _data("between the cells of .csv and .tsv files, tab for one; found if not given")
    encoding: str | None = _data("of text files, such as utf-8, utf-16 or cp1252; found if not given")
    max_length: int | None = _data(LENGTH_HELP)
    workers: int = _data("threads that decode images and sounds; 0", 0, min=0)
    dataloader_pin_memory: bool = _data("accepted for scripts: all rows are on the device", True, hidden=True)

    model: str | None = _model("name or folder of a Hugging Face encoder; a small built-in model if not given")
    pooling: str | None = _model(
        "what becomes of the encoder's states of a text: mean, which learns from fewer rows, or model, what its own "
        "classifier makes of them, for a folder that transformers loads as it is; mean if not given",
    )
    freeze_encoder: bool = _model(
        "leave the encoder as it is and train the head alone, on what it says of every text: minutes become seconds, "
        "and with few rows the answers are often better",
        False,
    )
    cache_dir: Path | None = _model("where to keep what is downloaded from Hugging Face")  # noqa: RUF009

    do_train: bool = _training(
        "train; of --do_train, --do_eval and --do_predict, all three are done if none is given", False
    )
    do_eval: bool = _training("evaluate on the validation data", False)
    do_predict: bool = _training("evaluate on the test data", False)
    loss: str = _training(
        "as-softmax (this if not given), softmax, t-softmax, sparse-softmax, sparsemax, entmax-1.5, label-smoothing or "
        "am-softmax; multi-label: as-softmax, softmax (ZLPR), bce, focal-bce or asymmetric",
        "as-softmax",
    )
    epochs: float | None = _training("passes over the data; as many as rows and model want")
    lr: float | None = _training("peak of the learning rate; what the model wants, 1e-4 or 5e-5 for an encoder")
    batch_size: int | None = _training("rows of a batch on each process")
    eval_batch_size: int | None = _training("rows of a batch in evaluation", min=1)
    weight_decay: float = _training("of AdamW; 0.01", 0.01)
    warmup_ratio: float = _training("share of training in which the learning rate rises; 0.1", 0.1)
    max_grad_norm: float = _training("gradients are clipped to this norm, 0 for never; 1", 1.0)
    class_weights: str | None = _training(
        "what rows weigh in the loss: balanced, by how rare their class is, or a JSON file of weights by label"
    )
    device: str | None = _training(DEVICE_HELP)
    precision: str | None = _training("no (this if not given), bf16 or fp16, which without a GPU is float32")
    fp16: bool = _training("as --precision fp16", False, hidden=True)
    bf16: bool = _training("as --precision bf16", False, hidden=True)
    head_step: str | None = _training(
        "sgd or adamw: from 32,768 classes on, step the last layer inside the backward pass, without a gradient of the "
        "size of its weight; it takes no part in --max_grad_norm"
    )
    head_dtype: str | None = _training("of the weight of that layer: float32 (this if not given) or bfloat16")
    head_rate: float | None = _training("its learning rate, as a multiple of the others'; 1, and more suits sgd")
    head_index: bool | None = _training(
        "save an index of the last layer with the model, by which predict answers without reading all of it; from "
        "32,768 classes on, if there are validation rows enough to calibrate it with"
    )
    graphs: bool = _training("replay steps as CUDA graphs, which small models gain from", False)
    compiled: bool = _training("compile an encoder's layers: a slow first step, faster ones after it", False)
    seed: int = _training("of weights, order and dropout; 42", 42)

    delta: float | None = _margin(
        "the margin: a row is solved when its label beats every other class by it; 0.1, multi-label 0.7"
    )
    as_warm_up: bool = _margin("bring the margin down to its value from --initial_as_delta", False)
    initial_as_delta: float = _margin("margin at the start of --as_warm_up; 1.0, plain softmax", 1.0)
    ratio: float = _margin("share of training that --as_warm_up takes; 0", 0.0)
    as_speed_up: bool = _margin("AS-Speed: larger steps the more rows are solved", False)
    accu_steps: int = _margin("batches in a step of --as_speed_up at most; 2", 2)
    accu_lambda: float = _margin("how soon --as_speed_up takes larger steps; 1", 1.0)
    skip_solved: bool = _margin("leave out rows that lead safely and screen them again later", False)
    skip_margin: float | None = _margin("lead from which --skip_solved leaves rows out; measured while training")
    skip_after: int | None = _margin("optimizer steps before --skip_solved leaves anything out; 256")
    tolerance: float | None = _margin("share of wrongly left out rows for --skip_solved; 0.02")

    eval_strategy: str | None = _when("steps, epoch (this if not given) or no, which leaves one evaluation at the end")
    eval_steps: int | None = _when("optimizer steps between evaluations; 500", min=1)
    logging_strategy: str | None = _when("steps (this if not given), epoch or no")
    logging_steps: int | None = _when("optimizer steps between log lines; 50", min=1)
    save_strategy: str | None = _when(
        "steps, epoch (as many steps as one has when nothing is skipped) or no; if not given, one checkpoint at the "
        "end, from which --resume goes on with more --epochs"
    )
    save_steps: int | None = _when("optimizer steps between checkpoints; 500", min=1)
    save_total_limit: int = _when("checkpoints to keep; 2", 2)
    metric: str | None = _when(
        "loss, accuracy, macro_f1, micro_f1 or entity_f1; found from the kind of data if not given"
    )
    greater_is_better: bool | None = _when("whether it is; found from the metric if not given")
    load_best_model_at_end: bool = _when(
        "keep the weights of the best evaluation; for the last ones, --eval_strategy no", True
    )
    patience: int = _when("evaluations without a better one before training stops; 0: never", 0)

    out: Path = _output(  # noqa: RUF009
        "for the model, its metrics, checkpoints and the log; softsieve-run if not given", Path("softsieve-run")
    )
    overwrite: bool = _output("replace the run that is there", False)
    resume: str | None = _output("a checkpoint's folder to go on from; bare or True, the latest in --out")
    show_progress: bool = _output("show a progress bar", True)
    quiet: bool = _output("print nothing but errors", False)
    config: Path | None = _output(f"{CONFIG_HELP}; OUT/options.json repeats a run")  # noqa: RUF009

    @property
    def asks_evaluation(self) -> bool:
        """Whether it was said that there should be evaluations on validation data."""
        often = self.eval_strategy in ("steps", "epoch") or self.eval_steps is not None
        return self.do_eval or often or self.patience > 0

    @property
    def asked_precision(self) -> str:
        """Of the matrix products, whichever way it was said."""
        flags = {name for name in ("fp16", "bf16") if getattr(self, name)}
        asked = flags | ({self.precision} if self.precision is not None else set())
        if len(asked) > 1:
            raise InputError(f"precision: expected one of no, bf16 and fp16, found {' and '.join(sorted(asked))}")
        return asked.pop() if asked else "no"

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


def repeating(options: Options, settings: Settings) -> dict[str, Any]:
    """The options that make the same run again in another folder, as plain values, with what a recipe chose said."""
    said = {f.name: getattr(options, f.name) for f in fields(Options) if getattr(options, f.name) != f.default}
    chosen = {name: getattr(settings, name) for name in ("epochs", "batch_size", "eval_batch_size", "metric", "delta")}
    values = {**said, **chosen, "lr": settings.learning_rate}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if name not in OF_ONE_RUN}


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


def _read_weights(asked: str | None) -> str | dict[str, float] | None:
    """What --class_weights says: a word, or what its file holds."""
    if asked is None or asked == BALANCED:
        return asked
    if not asked.endswith(".json"):
        raise InputError(f"class_weights: expected {BALANCED} or a file .json, found {asked!r}")
    weights = parse_json(read_text(Path(asked)), asked)
    if not isinstance(weights, dict):
        raise InputError(f"{asked}: expected weights by label, found {shown(weights)}")
    return weights


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

    eval_steps = steps_between("eval", options.eval_strategy, options.eval_steps, "epoch", 500, 0)
    if validation and eval_steps != NEVER and not options.load_best_model_at_end:
        raise InputError(
            "load_best_model_at_end: expected True, found False: for the last weights give --eval_strategy no"
        )
    precision = options.asked_precision
    for name in ("skip_margin", "skip_after", "tolerance"):
        if getattr(options, name) is not None and not options.skip_solved:
            raise InputError(f"{name}: expected only with --skip_solved")
    epochs = float(either(options.epochs, "epochs"))
    if not epochs.is_integer():
        raise InputError(f"epochs: expected a whole number, found {epochs:g}")
    batch_size = either(options.batch_size, "batch_size")
    _checks.whole_number("batch_size", batch_size, 1, NEVER)
    epoch = -(-rows // (batch_size * processes))
    delta = either(options.delta, "delta")
    for name, value in {"delta": delta, "initial_as_delta": options.initial_as_delta}.items():
        _checks.number(name, value, 0, 1)
    metric = either(options.metric, "metric").removeprefix("eval_")
    save_steps = steps_between("save", options.save_strategy, options.save_steps, "no", 500, epoch)
    same = ("loss", "weight_decay", "warmup_ratio", "max_grad_norm", "save_total_limit", "greater_is_better")
    return Settings(
        **{
            name: getattr(options, name)
            for name in (*same, "freeze_encoder", "graphs", "compiled", "seed", "head_step", "head_dtype", "head_rate")
        },
        class_weights=_read_weights(options.class_weights),
        epochs=int(epochs),
        batch_size=batch_size,
        eval_batch_size=either(options.eval_batch_size, "eval_batch_size"),
        learning_rate=either(options.lr, "learning_rate"),
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
        save_steps=save_steps if save_steps != NEVER else 0 if options.save_strategy is None else None,
        metric=metric,
        patience=options.patience,
        precision="no" if precision == "fp16" and not gpu else precision,
    )
