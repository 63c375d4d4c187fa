"""`softsieve train` as a person uses it, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.cli.options import NEVER, Options, make_settings, takes_options
from softsieve.cli.script import App
from softsieve.training.loop import Trainer
from softsieve.training.run import load_model
from softsieve.training.settings import Settings
from tests.training.helpers import equal_weights

PUBLISHED = """
--task_name sst5 --do_train --do_eval --do_predict --seed 42 --max_seq_length 128 --per_device_train_batch_size 16
--learning_rate 2e-5 --num_train_epochs 7 --output_dir results --fp16 --cache_dir sst5 --load_best_model_at_end True
--save_strategy steps --logging_strategy steps --evaluation_strategy steps --save_steps 200 --logging_steps 200
--eval_steps 200 --greater_is_better True --metric_for_best_model accuracy --overwrite_output_dir --warmup_ratio 0.1
--initial_as_delta 1.0 --min_as_delta 0.10 --as_speed_up False --as_warm_up False --ratio 0 --accu_steps 2
--accu_lambda 1 --dataloader_num_workers 4 --dataloader_pin_memory True
"""
DEFAULTS = {
    "epochs": 3, "batch_size": 32, "eval_batch_size": 64, "learning_rate": 1e-3, "metric": "accuracy", "delta": 0.1
}  # fmt: skip
QUICK = ["--epochs", "2", "--batch_size", "16"]


def train(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def trained(*arguments: object) -> str:
    """What a run prints that succeeds."""
    result = train(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return str(result.stdout)


def refused(*arguments: object, code: int = 1) -> str:
    """The one line of a run that does not."""
    result = train(*arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("softsieve: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def parse(line: str) -> Options:
    caught: list[Options] = []
    alone = App()
    alone.command()(takes_options(caught.append))
    result = CliRunner().invoke(alone, shlex.split(line))
    assert result.exit_code == 0, result.output
    return caught[0]


def settings(line: str, **more: Any) -> Settings:
    return make_settings(parse(line), DEFAULTS, **{"rows": 100, "validation": True, **more})


def log(output: Path, kind: str) -> list[int]:
    """Steps of the log lines of a kind."""
    lines = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == kind]


# Options


def test_the_published_command_line_means_what_it_says() -> None:
    options = parse(f"--model bert {PUBLISHED}")
    assert (options.trains, options.evaluates, options.predicts) == (True, True, True)
    assert options.out == Path("results")
    assert options.workers == 4
    expected = Settings(
        loss="as-softmax",
        epochs=7,
        batch_size=16,
        eval_batch_size=64,
        learning_rate=2e-5,
        warmup_ratio=0.1,
        delta=0.1,
        delta_ratio=0.0,
        speed_steps=1,
        eval_steps=200,
        save_steps=200,
        logging_steps=200,
        metric="accuracy",
        precision="fp16",
        seed=42,
    )
    assert make_settings(options, DEFAULTS, rows=8544, validation=True, gpu=True) == expected
    assert make_settings(options, DEFAULTS, rows=8544, validation=True, gpu=False).precision == "no"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--as_speed_up True --accu_steps 4 --accu_lambda 0.5", {"speed_steps": 4, "speed_lambda": 0.5}),
        ("--as_speed_up False --accu_steps 4", {"speed_steps": 1}),
        ("--as_warm_up True --ratio 0.3 --initial_as_delta 0.8", {"delta_ratio": 0.3, "initial_delta": 0.8}),
        ("--as_warm_up False --ratio 0.3", {"delta_ratio": 0.0}),
        ("--delta 0.3", {"delta": 0.3}),
        ("--skip_solved --tolerance 0.05", {"skip": "solved", "tolerance": 0.05}),
        ("--skip_solved --skip_margin 0.8", {"skip": "solved", "skip_margin": 0.8}),
        ("--skip_solved --skip_after 9", {"skip": "solved", "skip_after": 9}),
        ("--skip-solved=0", {"skip": "no"}),
        ("--bf16 1", {"precision": "bf16"}),
        ("--bf16 --bf16 false", {"precision": "no"}),
        ("--no-bf16", {"precision": "no"}),
        ("--epochs 5.0", {"epochs": 5}),
        ("--metric eval_macro_f1", {"metric": "macro_f1", "greater_is_better": True}),
        ("--metric loss", {"metric": "loss", "greater_is_better": False}),
        ("--greater_is_better False", {"greater_is_better": False}),
        ("", {"eval_steps": 0, "save_steps": 0, "logging_steps": 50}),
        ("--eval_steps 7 --save_steps=8 --logging_steps 9", {"eval_steps": 7, "save_steps": 8, "logging_steps": 9}),
        ("--eval_strategy epoch --save_strategy epoch", {"eval_steps": 0, "save_steps": 4}),
        ("--evaluation_strategy no --logging_strategy no", {"eval_steps": NEVER, "logging_steps": NEVER}),
        ("--save_strategy no --load_best_model_at_end False --eval_strategy no", {"save_steps": None}),
        ("--early_stopping_patience 3 --save_total_limit 5", {"patience": 3, "save_total_limit": 5}),
        ("--weight_decay 0 --max_grad_norm 0.5", {"weight_decay": 0.0, "max_grad_norm": 0.5}),
        ("--loss label-smoothing --seed 7", {"loss": "label-smoothing", "seed": 7}),
    ],
)
def test_options_act(line: str, expected: dict[str, Any]) -> None:
    found = settings(line).asdict()
    assert {name: found[name] for name in expected} == expected


def test_an_epoch_has_fewer_steps_on_two_processes() -> None:
    assert settings("--save_strategy epoch --logging_strategy epoch", processes=2).save_steps == 2
    assert settings("--logging_strategy epoch", processes=2).logging_steps == 2


@pytest.mark.parametrize(
    ("line", "does"),
    [
        ("", (True, True, True)),
        ("--do_train", (True, False, False)),
        ("--do_train True --do_eval False", (True, False, False)),
        ("--do_train --eval_steps 9", (True, True, False)),
        ("--do_train --evaluation_strategy no", (True, False, False)),
        ("--do_eval", (False, True, False)),
        ("--do_predict", (False, False, True)),
    ],
)
def test_what_is_done(line: str, does: tuple[bool, bool, bool]) -> None:
    options = parse(line)
    assert (options.trains, options.evaluates, options.predicts) == does


@pytest.mark.parametrize(
    ("line", "value"),
    [("--resume", "True"), ("--resume a/b --fp16", "a/b"), ("--fp16", None)],
)
def test_resume_takes_a_folder_or_nothing(line: str, value: str | None) -> None:
    assert parse(line).resume == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--eval_strategy daily", "eval_strategy: expected one of 'steps', 'epoch', 'no', found 'daily'"),
        ("--eval_strategy epoch --eval_steps 3", "eval_steps: expected only with the strategy steps"),
        ("--epochs 2.5", "epochs: expected a whole number, found 2.5"),
        ("--epochs nan", "epochs: expected a whole number, found nan"),
        ("--batch_size 0", "batch_size: expected an int in"),
        ("--load_best_model_at_end False", "load_best_model_at_end: expected True"),
        ("--fp16 --bf16", "expected one of no, bf16 and fp16, found bf16 and fp16"),
        ("--tolerance 0.1", "tolerance: expected only with --skip_solved"),
        ("--skip_margin 0.8", "skip_margin: expected only with --skip_solved"),
        ("--skip_after 0", "skip_after: expected only with --skip_solved"),
        ("--loss softmax --skip_solved", "expected the loss 'as-softmax'"),
        ("--loss hinge", "loss: expected one of 'softmax', 't-softmax'"),
        ("--lr -1", "learning_rate"),
        ("--delta 2", "delta: expected a number in [0, 1], found 2"),
        ("--metric f1", "metric: expected one of loss, accuracy, macro_f1, micro_f1"),
    ],
)
def test_options_refused(reviews: Path, line: str, message: str) -> None:
    assert message in refused("--data", reviews, *shlex.split(line))
    assert not Path("softsieve-run").exists()


# Runs


def test_a_table_is_trained_with_two_words(reviews: Path) -> None:
    said = trained("--data", reviews, "--test_data", reviews)
    for words in ("reviews, text; rows: 72 training, 8 validation, 80 test; 2 classes", "built-in", "delta 0.1",
                  "learning rate: 0.003", "validation", "test", "100.00", "solved", "softsieve-run/model"):  # fmt: skip
        assert words in said
    task, _ = load_model(Path("softsieve-run"))
    assert task.labels == ["neg", "pos"]
    metrics = json.loads(Path("softsieve-run/model/metrics.json").read_text())
    assert metrics["validation"]["accuracy"] == metrics["test"]["accuracy"] == 1
    assert Path("softsieve-run/confusion.png").read_bytes()[:4] == b"\x89PNG"
    assert log(Path("softsieve-run"), "train")
    assert not [path for path in Path("softsieve-run").iterdir() if path.name.startswith(".")]


def test_the_published_command_runs(reviews: Path, bert: Path) -> None:
    rows = [line.split(",") for line in reviews.read_text().splitlines()]
    folder = Path("data/sst5")
    folder.mkdir(parents=True)
    for name in ("train", "dev", "test"):
        (folder / f"{name}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    said = trained("--model", bert, *PUBLISHED.split(), "--epochs", "2", "--save_steps", "4")
    assert "float32 (fp16 needs a GPU)" in said
    assert "model: results/model" in said
    assert sorted(path.name for path in Path("results").glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-8"]
    task, model = load_model(Path("results"))
    assert sum(p.numel() for p in model.parameters()) < 20_000
    assert task.encoder.max_length == 128  # type: ignore[attr-defined]


def test_cache_dir_is_where_hugging_face_looks(reviews: Path) -> None:
    program = """
import sys
from softsieve.cli import app
try:
    app(sys.argv[1:])
finally:
    import huggingface_hub.constants
    print(huggingface_hub.constants.HF_HUB_CACHE)
"""
    command = ["train", "--data", "missing.csv", "--cache_dir", "kept"]
    found = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr == "softsieve: missing.csv: no such file or folder\n"
    assert found.stdout == "kept\n"


@pytest.mark.parametrize(
    ("line", "evaluations", "logged", "checkpoints"),
    [
        ("--eval_strategy no --logging_strategy epoch --save_strategy epoch", [10], [5, 10], [5, 10]),
        ("--eval_strategy epoch --logging_strategy no", [5, 10], [], [10]),
        ("--eval_strategy epoch --logging_strategy no --save_strategy no", [5, 10], [], []),
        ("--eval_steps 4 --logging_steps 3 --save_steps 4 --save_total_limit 2", [4, 8, 10], [3, 6, 9], [8, 10]),
    ],
)
def test_strategies_act(
    reviews: Path, line: str, evaluations: list[int], logged: list[int], checkpoints: list[int]
) -> None:
    trained("--data", reviews, *QUICK, *line.split())
    output = Path("softsieve-run")
    assert (log(output, "validation"), log(output, "train")) == (evaluations, logged)
    assert sorted(int(path.name[11:]) for path in output.glob("checkpoint-*")) == checkpoints


def test_training_alone_and_judging_alone(reviews: Path) -> None:
    said = trained("--data", reviews, "--do_train")
    assert "80 training;" in said
    assert "accuracy" not in said
    before = {path: path.read_bytes() for path in Path("softsieve-run/model").iterdir()}
    said = trained("--data", reviews, "--test_data", reviews, "--do_predict")
    assert "100.00" in said
    assert "test" in said
    assert {path: path.read_bytes() for path in Path("softsieve-run/model").iterdir()} == before
    assert "expected test data, found none; give --test_data" in refused("--data", reviews, "--do_predict")
    assert train("--data", reviews, "--do_eval", "--eval_batch_size", -1).exit_code == 2
    colours = images(Path("colours"))
    assert "colours: expected text as the model" in refused("--data", colours, "--kind", "image", "--do_eval")


def test_quiet(reviews: Path) -> None:
    assert trained("--data", reviews, *QUICK, "--quiet") == ""


def test_a_run_is_not_overwritten_unless_told(reviews: Path) -> None:
    trained("--data", reviews, *QUICK, "--save_steps", "5")
    output = Path("softsieve-run")
    assert "holds a run; give --overwrite" in refused("--data", reviews)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    refused("--data", "missing.csv", "--overwrite")
    refused("--data", reviews, "--overwrite", "--metric", "entity_f1")
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    trained("--data", reviews, "--overwrite", "--epochs", 1)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-5"]
    assert json.loads((output / "checkpoint-5" / "state.json").read_text())["settings"]["epochs"] == 1
    assert log(output, "validation") == [5]


def test_resume_ends_as_if_it_had_not_stopped(reviews: Path) -> None:
    options = ["--data", reviews, *QUICK, "--save_steps", "3", "--save_total_limit", "9"]
    trained(*options, "--out", "whole")
    trained(*options, "--out", "again", "--resume", "whole/checkpoint-3")
    files = [Path(name, "model", "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert files[0] == files[1]
    assert log(Path("again"), "validation") == [5, 10]
    said = trained(*options, "--out", "whole", "--resume")
    assert "10 steps" in said
    assert "expected a checkpoint" in refused(*options, "--out", "new", "--resume", "True")
    assert "made with epochs=2" in refused(*options, "--epochs", 1, "--out", "again", "--resume")


# Kinds


def multilabel(path: Path) -> Path:
    rows = [{"text": f"{'red ' * (i % 2)}{'blue ' * (i // 2 % 2)}thing {i}", "labels": []} for i in range(80)]
    for row in rows:
        row["labels"] = [word for word in ("red", "blue") if word in row["text"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens(path: Path) -> Path:
    sentences = [f"in O\n{('Rome', 'Oslo')[i % 2]} B-LOC\nstood O\nMarcus B-PER\nAurelius I-PER\n" for i in range(40)]
    path.write_text("\n".join(sentences))
    return path


def images(folder: Path) -> Path:
    library = pytest.importorskip("PIL.Image")
    for i in range(40):
        pixels = np.full((12, 12, 3), 20 + i, np.uint8)
        pixels[:, :, i % 2] = 220
        path = folder / ("red", "green")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        library.fromarray(pixels).save(path)
    return folder


def sounds(folder: Path) -> Path:
    library = pytest.importorskip("soundfile")
    for i in range(40):
        wave = np.sin(np.arange(3000) * (0.1, 1.0)[i % 2] + i).astype(np.float32) / 2
        path = folder / ("low", "high")[i % 2] / f"{i}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        library.write(path, wave, 8000)
    return folder


@pytest.mark.parametrize(
    ("make", "name", "metric"),
    [
        (multilabel, "things.jsonl", "micro_f1"),
        (tokens, "places.conll", "entity_f1"),
        (images, "colours", "accuracy"),
        (sounds, "tones", "accuracy"),
    ],
)
def test_every_kind(make: Callable[[Path], Path], name: str, metric: str) -> None:
    source = make(Path(name).absolute())
    said = trained("--data", source, "--epochs", "15", "--workers", "2")
    assert f"best by: {metric}" in said
    assert json.loads(Path("softsieve-run/model/metrics.json").read_text())["validation"][metric] > 0.9
    assert Path("softsieve-run/confusion.png").exists() == (metric == "accuracy")
    out = Path("answers.jsonl")
    result = CliRunner().invoke(app, ["predict", "softsieve-run", "--data", str(source), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert metric in result.output
    answers = list(map(json.loads, out.read_text().splitlines()))
    assert len(answers) == (80 if metric == "micro_f1" else 40)
    assert sum(sorted(answer["prediction"]) == sorted(answer["label"]) for answer in answers) > 0.9 * len(answers)


# What goes wrong


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


TWO = "text,label\ngood,pos\nbad,neg\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("words,mark\ngood,pos\nbad,neg\n", [], "in.csv: no column of labels found among 'words', 'mark'"),
        (TWO, ["--text_column", "review"], "in.csv: no column 'review', there are 'text', 'label'"),
        (TWO, ["--on_error", "ignore"], "on_error: expected one of 'stop', 'skip', found 'ignore'"),
        (TWO, ["--delimiter", "::"], "delimiter: expected one character or 'tab', found '::'"),
        (TWO, ["--encoding", "utf-9"], "encoding: expected a name such as utf-8 or cp1252, found 'utf-9'"),
        ("", [], "in.csv: no rows"),
        ("text,label\ngood,pos\nfine,pos\n", [], "in.csv: expected at least 2 classes to train on, found ['pos']"),
        (TWO, [], "too few rows (2) to hold any out"),
        (TWO, ["--validation_share", "2"], "validation_share: expected a number from 0 to below 1, found 2"),
        (TWO, ["--kind", "video"], "expected one of text, multilabel, tokens, image, audio, found 'video'"),
        (TWO, ["--task_name", "sst5"], "expected --data or --task_name, found both"),
        (TWO, ["--data_dir", "."], "data_dir: expected with one of sst5"),
        (TWO, ["--validation_share", "0", "--eval_steps", "3"], "in: expected validation data, found none"),
        (TWO, ["--validation_share", "0", "--model", "./no"], "model ./no: cannot be loaded"),
        (TWO, ["--validation_share", "0", "--max_length", "1"], "max_length: expected a whole number from 4"),
    ],
)  # fmt: skip
def test_bad_input(content: str, options: list[str], message: str) -> None:
    assert message in refused("--data", write("in.csv", content), *options)
    assert not Path("softsieve-run").exists()


def test_labels_and_rows_as_they_come() -> None:
    write("in.csv", TWO.replace(",", ";") + "worse;neg;3\nsad\n")
    write("test.csv", TWO.replace("neg", "so-so"))
    done = train("--data", "in.csv", "--validation_share", "0", "--test_data", "test.csv", "--on_error", "skip")
    assert done.exit_code == 0, done.output
    assert "rows: 2 training, 2 test; 2 classes" in done.output
    assert "in.csv: left out 2 of 4 rows: in.csv:4: expected 2 columns" in done.output
    assert "test: 1 of 2 rows have labels that training has not seen and count as wrong: 'so-so'" in done.output
    assert "accuracy % │ 50.00" in re.sub(" +", " ", done.output)


def test_bad_presets() -> None:
    assert "expected --data or --task_name, found neither" in refused()
    assert "data/clinc150: no such folder, expected there for clinc150" in refused("--task_name", "clinc150")
    assert "preset: expected one of sst5," in refused("--task_name", "glue")
    assert "text_column: expected with data of your own" in refused("--data", "sst5", "--text_column", "x")


def test_unreadable_image() -> None:
    folder = images(Path("colours"))
    (folder / "red" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    assert "colours/red/0.png: unreadable image" in refused("--data", folder)
    assert not Path("softsieve-run").exists()


def test_a_loss_that_is_no_number(reviews: Path) -> None:
    assert "try a smaller learning rate" in refused("--data", reviews, "--lr", "1e30")
    assert not Path("softsieve-run/model").exists()


def test_a_checkpoint_of_another_run(reviews: Path, bert: Path) -> None:
    transformers = pytest.importorskip("transformers")
    wide = shutil.copytree(bert, "wide")
    config = transformers.BertConfig.from_pretrained(str(bert), hidden_size=32)
    transformers.BertModel(config).save_pretrained(wide)
    options = [*QUICK, "--save_steps", "5", "--out"]
    trained("--data", reviews, "--model", bert, *options, "made")
    resume = ["other", "--resume", "made/checkpoint-5"]
    message = refused("--data", reviews, "--model", wide, *options, *resume)
    assert "checkpoint-5/model.safetensors: not a checkpoint of this model: body.encoder" in message
    three = write("three.csv", reviews.read_text().replace("film number 9,neg", "film number 9,odd"))
    message = refused("--data", three, "--model", bert, *options, *resume, "--validation_share", "0.1")
    assert "checkpoint-5: made with" in message
    assert not Path("other").exists()


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file grows beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(reviews: Path) -> None:
    output = Path("softsieve-run")
    options = ["--data", reviews, *QUICK, "--save_steps", "5"]
    with small_files(2**20):
        assert "cannot be written" in refused("--data", reviews, *QUICK)
        assert sorted(path.name for path in output.iterdir() if path.is_dir()) in ([], ["tensorboard"])
        assert "checkpoint-5: cannot be written" in refused(*options, "--overwrite")
    trained(*options, "--overwrite", "--save_steps", "4")
    kept = {path: path.read_bytes() for path in output.glob("*-8/*")}
    assert kept
    with small_files(2**20):
        assert "cannot be written" in refused(*options, "--save_steps", "9", "--resume")
    assert {path: path.read_bytes() for path in output.glob("*-8/*")} == kept
    assert not [path for path in output.iterdir() if path.name.startswith(".")]
    trained(*options, "--resume")


def test_a_folder_that_cannot_be_written(reviews: Path) -> None:
    write("file", "")
    assert "file" in refused("--data", reviews, "--out", "file/run")


def test_ctrl_c(reviews: Path) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.5)
    try:
        assert refused("--data", reviews, "--epochs", "5000", code=130) == "softsieve: interrupted\n"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not Path("softsieve-run/model").exists()


def test_ctrl_c_leaves_a_checkpoint_and_names_the_command_that_goes_on(
    reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--data", reviews, *QUICK]
    trained(*options, "--out", "whole run")
    step, before = Trainer._take_step, signal.getsignal(signal.SIGINT)

    def pressed(self: Trainer, *arguments: Any) -> None:
        step(self, *arguments)
        if self.state.step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_take_step", pressed)
        said = refused(*options, "--out", "my run", code=130)
    command = "softsieve train --config 'my run/options.json' --out 'my run' --resume"
    assert said == f"softsieve: interrupted; to go on: {command}\n"
    assert [path.name for path in Path("my run").glob("checkpoint-*")] == ["checkpoint-7"]
    assert signal.getsignal(signal.SIGINT) is before
    trained(*shlex.split(command)[2:])
    runs = [load_model(Path(name))[1].state_dict() for name in ("whole run", "my run")]
    assert equal_weights(*runs)


def test_a_finished_run_is_made_longer(reviews: Path) -> None:
    trained("--data", reviews, *QUICK)
    first = json.loads(Path("softsieve-run/run.json").read_text())
    trained("--data", reviews, *QUICK[2:], "--resume_from_checkpoint", "true", "--num_train_epochs", "5")
    record = json.loads(Path("softsieve-run/run.json").read_text())
    assert (first["settings"]["epochs"], record["settings"]["epochs"]) == (2, 5)
    assert record["results"][0]["steps"] == first["results"][0]["steps"] * 5 // 2
    assert "made with epochs=5, this run has 2" in refused("--data", reviews, *QUICK, "--resume")
    trained("--data", reviews, *QUICK, "--out", "bare", "--save_strategy", "no")
    assert "expected a checkpoint to resume from" in refused("--data", reviews, *QUICK, "--out", "bare", "--resume")


def test_the_end_tells_the_share_of_solved_rows_and_what_was_trained_and_screened(reviews: Path) -> None:
    said = trained("--data", reviews, "--epochs", "12", "--skip_solved", "--skip_after", "5", "--logging_steps", "2")
    record = json.loads(Path("softsieve-run/run.json").read_text())["results"][0]
    assert record["screened"] > 0
    assert f"rows trained: {record['trained']:,} ({record['trained'] / 72:.1f} times the data)" in said
    assert f"screened: {record['screened']:,}; {record['solved']:.1%} of the 72 rows solved when last seen" in said
    assert record["solved"] > 0.9  # of those that are still trained, few are
    assert "solved" not in trained("--data", reviews, *QUICK, "--loss", "softmax", "--out", "plain")


def test_progress_in_lines_where_there_is_no_terminal(reviews: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softsieve.training.journal.LEAST_SECONDS", 0.0)
    said = trained("--data", reviews, *QUICK, "--logging_steps", "1")
    lines = [line for line in said.splitlines() if "samples/s" in line]
    assert len(lines) >= 5
    assert re.fullmatch(r" *\d+%  loss \d.\d{4}  solved \d+%  (accuracy \d.\d{4}  )?\d+ samples/s, \d+ s", lines[2])
    assert lines[-1].startswith("100%  ")
    for silent in ("--quiet", "--no-show_progress"):
        assert "samples/s" not in trained("--data", reviews, *QUICK, "--logging_steps", "1", "--overwrite", silent)


def test_only_the_main_process_speaks(reviews: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = train("--data", "missing.csv")
    assert (result.exit_code, result.output) == (1, "")


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTSIEVE_DEBUG", "1")
    assert train("--data", "missing.csv").exc_info[0].__name__ == "InputError"
    assert os.environ["SOFTSIEVE_DEBUG"] == "1"
