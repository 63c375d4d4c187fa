"""Every kind of file that the project reads: a small one, and what reading and using it comes to."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import tarfile
import warnings
import wave
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from softsieve._records import write_record
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax
from softsieve.losses.objectives import make_objective
from softsieve.tasks import encode, models
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.read import read_data
from softsieve.tasks.task import Task
from softsieve.training.checkpoint import checkpoints
from tests.report.conftest import JUDGED
from tests.rough.mutations import BYTES, JSON, LINES, NPY, SAFETENSORS, STATE, TEXT, Mutation


class Prepared(NamedTuple):
    """Files to spoil, each with how, and how they are read and used."""

    files: Mapping[Path, Sequence[Mutation]]
    read: Callable[
        [Path], Any
    ]  # what the one with this file says: equal if and only if they say the same; InputError for damage
    digests: bool = False  # whether damage of any bit must be noticed


Make = Callable[[Path], Prepared]
FORMATS: dict[str, Make] = {}


def a_format(name: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        FORMATS[name] = make
        return make

    return register


def expect(fine: bool, what: str) -> None:
    """What was loaded must be fit for use."""
    if not fine:
        raise AssertionError(what)


def answers(head: AdaptiveSoftmax, x: torch.Tensor, k: int) -> Any:
    """Of some queries; a ValueError is a clear answer, too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = head.topk(x, k, generator=torch.Generator().manual_seed(0))
    except (ValueError, RuntimeError) as error:
        expect(isinstance(error, ValueError) or "calibrated" in str(error), repr(error))
        return str(error)
    expect(bool(found.probs.isfinite().all()), "probabilities that are not finite")
    expect(int(found.indices.min()) >= 0 and int(found.indices.max()) < len(head.weight), "rows that are not there")
    return found.indices.tolist(), found.probs.tolist()


def above(head: AdaptiveSoftmax, x: torch.Tensor) -> Any:
    """Of some queries, likewise."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = head.above(x, 3.0)
    except (ValueError, RuntimeError) as error:
        expect(isinstance(error, ValueError) or "calibrate" in str(error), repr(error))
        return str(error)
    expect(bool((found.logits > 3).all()), "logits that are not above")
    expect(bool((found.indices < len(head.weight)).all()), "rows that are not there")
    return found.counts.tolist(), found.indices.tolist(), found.logits.tolist()


# -- heads -------------------------------------------------------------------------------------------------------------


@a_format("head index")
def head_index(folder: Path) -> Prepared:
    weight, queries = torch.randn(90, 24), torch.randn(300, 24) * 2
    cascade = AdaptiveSoftmax(weight, torch.linspace(0, 1, 90), delta=0.1, method="cascade")
    cascade.calibrate(queries, [1, 3], generator=torch.Generator().manual_seed(0))
    cascade.calibrate(queries, threshold=2.0, generator=torch.Generator().manual_seed(0))
    cascade.save(folder / "cascade")
    cascade.save(folder / "apart", weight=False)
    order = AdaptiveSoftmax(weight[:30].bfloat16(), delta=0.1, method="coordinates")
    order.calibrate(queries[:60], 3, generator=torch.Generator().manual_seed(0))
    order.save(folder / "coordinates")
    AdaptiveSoftmax(weight[:9], method="exact").save(folder / "exact")
    bias = cascade.bias

    def read(path: Path) -> Any:
        own = {"weight": weight, "bias": bias} if path.name == "apart" else {}
        head = AdaptiveSoftmax.load(path, **own)
        fitted = repr(head.calibrations), repr(head.thresholds)
        found = answers(head, queries[:2], ks[path.name]), above(head, queries[:2])
        return repr(head), head.beta, head.seed, fitted, found

    ks = {"cascade": 3, "apart": 1, "coordinates": 3, "exact": 2}
    return Prepared({folder / name: SAFETENSORS for name in ks}, read, digests=True)


@a_format("weight and queries")
def head_file(folder: Path) -> Prepared:
    from softsieve.integrations.head_file import read_head, write_head
    from softsieve.integrations.hidden_states import Corpus, Head
    from softsieve.integrations.matrix_file import read_queries, read_weight

    path = folder / "head.safetensors"
    corpora = {"news": Corpus(torch.randn(12, 6), torch.randn(5, 6))}
    write_head(path, Head(torch.randn(9, 6), torch.randn(9), 1.5, 30.0, corpora), notes={"model": "tiny"})

    def read(path: Path) -> Any:
        head, notes = read_head(path)
        weight, bias = read_weight(path)
        parts = [*read_queries(path, None, "calibration", step=2), *read_queries(path, ["news"], "test", step=1)]
        said = [head.beta, head.softcap, sorted(notes.items())]
        for rows in (*parts, *(part for corpus in head.corpora.values() for part in corpus)):
            made = AdaptiveSoftmax(weight, bias, beta=head.beta, method="exact")
            said.append(answers(made, rows, 1))
        return said

    return Prepared({path: SAFETENSORS}, used(read), digests=True)


@a_format("weight and queries, .npy")
def npy(folder: Path) -> Prepared:
    from softsieve.integrations.matrix_file import read_queries, read_weight

    np.save(folder / "weight.npy", np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32))
    np.save(folder / "queries.npy", np.random.default_rng(1).normal(size=(20, 5)).astype(np.float32))

    def read(path: Path) -> Any:
        weight, _ = read_weight(folder / "weight.npy")
        queries = list(read_queries(folder / "queries.npy", None, "calibration", step=2))
        head = AdaptiveSoftmax(weight, method="exact")
        return [answers(head, part, 1) for part in queries]

    return Prepared({folder / "weight.npy": NPY, folder / "queries.npy": NPY}, used(read))


def used(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """What is read is used at once: what a head refuses with the name of an argument is fine, too."""

    def attempt(path: Path) -> Any:
        try:
            return read(path)
        except InputError:
            raise
        except (TypeError, ValueError) as error:
            expect(str(error).startswith(("weight: ", "bias: ", "x: ", "queries: ", "beta: ")), repr(error))
            return str(error)

    return attempt


@a_format("index for vLLM")
def vllm_index(folder: Path) -> Prepared:
    """An engine that may not start without it; with a rank's head, which has digests, and states that have none."""
    from softsieve.integrations.vllm import crossover, index_folder
    from softsieve.integrations.vllm.layer import Adaptive, Site
    from softsieve.integrations.vllm.requests import Need

    crossover.COLD, crossover.GROUPS, crossover.TRIES = 4096, 1, 1
    crossover.BATCHES = (1, 2)  # type: ignore[assignment]
    place, weight, states = folder / "index", torch.randn(90, 24), torch.randn(300, 24) * 2
    place.mkdir()
    made = AdaptiveSoftmax(weight, delta=0.1, method="cascade")
    made.calibrate(states, [1, 3], generator=torch.Generator().manual_seed(0))
    made.save(place / "rank-0-of-1.safetensors", weight=False)
    index_folder.write_states(place, states, {})
    own = index_folder.fingerprint(weight, None)
    index_folder.write_description(place, index_folder.Description(90, 24, "float32", 1.0, 0.3, 0.1, [1, 3], [own]))
    method = type("UnquantizedEmbeddingMethod", (), {})()
    rows = SimpleNamespace(num_org_elements=90, num_added_elements=0)
    lm_head = SimpleNamespace(weight=weight, shard_indices=rows, quant_method=method)
    processor = SimpleNamespace(org_vocab_size=90, scale=1.0, soft_cap=None)

    def read(path: Path) -> Any:
        head = Adaptive(Site(place=place, required=True, strict=True))
        head._prepare(processor, lm_head, None, lambda x: x @ weight.T)
        serving = head.serving
        expect(serving is not None, "neither an index nor an error")
        found = [serving.topk(states[:2], k).indices.tolist() for k in serving.batches]  # type: ignore[union-attr]
        return sorted(serving.batches), serving.rows, serving.serves(Need(1), 10**6)[1], found  # type: ignore[union-attr]

    spoilt = {"index.json": JSON, "rank-0-of-1.safetensors": SAFETENSORS, index_folder.STATES: SAFETENSORS}
    return Prepared({place / name: how for name, how in spoilt.items()}, read)


# -- training ----------------------------------------------------------------------------------------------------------


@a_format("checkpoint")
def checkpoint(folder: Path) -> Prepared:
    from softsieve.training.checkpoint import restore_run
    from tests.training.helpers import Net, points, trainer

    def make(output: Path | None) -> Any:
        chosen: dict[str, Any] = {"skip": "solved", "save_steps": 3, "epochs": 2, "eval_batch_size": 16}
        return trainer(points(40), model=Net(dropout=0.2), validation=points(10), output=output, **chosen)

    make(folder).fit()
    place = checkpoints(folder)[-1]
    made = make(None)

    def read(path: Path) -> Any:
        restore_run(made, place)
        before = made.state.step, made.state.epoch, {name: float(value.sum()) for name, value in made.weights().items()}
        made.update_sampler()
        made._fill_queue(8)
        if len(made.state.queue):
            made._take_step(made.state.queue[:8], 1)
        try:
            made.results.figures(made.state.step)
        except InputError as error:  # weights beyond reason are said to be
            expect(str(error).startswith("the loss is"), repr(error))
        made.sampler.next_epoch()
        return before

    files = {path: STATE if path.suffix == ".json" else SAFETENSORS for path in sorted(place.iterdir())}
    return Prepared(files, read, digests=True)


@a_format("model")
def model(folder: Path) -> Prepared:
    from softsieve.training.run import encode, load_model, train
    from softsieve.training.serving import decide
    from softsieve.training.settings import Settings

    words = {"good": ["fine", "great"], "bad": ["poor", "awful"]}
    texts = [(f"{word} {number}", label) for label, some in words.items() for word in some for number in range(3)]
    places = [str(number) for number in range(len(texts))]
    inputs, labels = [list(some) for some in zip(*texts, strict=True)]
    kinds = {"text": Examples(inputs, labels, places)}
    kinds["tokens"] = Examples([text.split() for text in inputs], [[label, "O"] for label in labels], places)
    kinds["multilabel"] = Examples(inputs, [[str(label == "good")] for label in labels], places)
    encoded = {}
    for kind, examples in kinds.items():
        task = Task.build(Data("d", kind, examples, None, None))
        if kind == "multilabel":
            task.bool_labels, task.columns = True, [1, 0]
        train(task, encode(task, examples, None, None), Settings(epochs=1, batch_size=6), output=folder / kind)
        encoded[kind] = examples

    def read(path: Path) -> Any:
        place = path.parent.parent
        task, net = load_model(place)
        rows = task.rows(encoded[place.name]._replace(labels=[]))
        expect(task.columns is None or sorted(task.columns) == [0, 1], "columns that are not there")
        expect(not task.bool_labels or sorted(task.labels) == ["False", "True"], "booleans of other names")
        return task.labels, task.columns, task.predictions(decide(task, net, rows), rows)

    files: dict[Path, Sequence[Mutation]] = {}
    for kind in kinds:
        files[folder / kind / "model" / "task.json"] = JSON
        files[folder / kind / "model" / "model.safetensors"] = SAFETENSORS
    return Prepared(files, read)


@a_format("model with a tokenizer")
def pretrained(folder: Path) -> Prepared:
    return _with_an_encoder(folder, None)


@a_format("folder of transformers")
def transformers_folder(folder: Path) -> Prepared:
    return _with_an_encoder(folder, "model")


def _with_an_encoder(folder: Path, pooling: str | None) -> Prepared:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from softsieve.training.checkpoint import save_tensors
    from softsieve.training.run import load_model
    from softsieve.training.serving import decide

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "fine", "great", "poor", "awful"]
    raw = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(str(folder / "hf"))
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(vocabulary), intermediate_size=8, max_position_embeddings=16, **sizes)
    BertModel(config).save_pretrained(str(folder / "hf"))  # type: ignore[no-untyped-call]
    examples = Examples(["fine great", "poor"], ["good", "bad"], ["1", "2"])
    data = Data("d", "text", examples, None, None)
    task = Task.build(data, model=str(folder / "hf"), max_length=8, pooling=pooling)
    objective, place = make_objective("softmax"), folder / "model"
    task.save(place, objective)
    save_tensors(place / "model.safetensors", task.pack(task.model(objective).state_dict(), objective))

    def read(path: Path) -> Any:
        task, net = load_model(place)
        rows = task.rows(examples._replace(labels=[]))
        return task.labels, task.predictions(decide(task, net, rows), rows)

    inside = sorted((place / "pretrained").iterdir() if pooling is None else place.glob("*.json"))
    weights: Mapping[Path, Sequence[Mutation]] = {} if pooling is None else {place / "model.safetensors": SAFETENSORS}
    return Prepared({place / "task.json": JSON, **dict.fromkeys(inside, JSON), **weights}, read)


@a_format("state of ASTrainer")
def trainer_state(folder: Path) -> Prepared:
    from softsieve.integrations.transformers import SAMPLER, ASTrainerMixin
    from softsieve.integrations.transformers import STATE as FILE
    from softsieve.training.checkpoint import save_tensors
    from softsieve.training.sampler import SolvedSampler
    from softsieve.training.speed import ASSpeed

    sampler = SolvedSampler(40)
    list(sampler)
    sampler.update(torch.arange(40), torch.arange(40) < 30)
    state = sampler.state_dict()
    save_tensors(folder / SAMPLER, {name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
    plain = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    (folder / FILE).write_text(json.dumps({"epoch": 1, "batches": 2, "speed": {"steps": 2}, "sampler": plain}))

    def read(path: Path) -> Any:
        own = SolvedSampler(40)
        speed = ASSpeed(max_steps=4)
        made: Any = SimpleNamespace(args=SimpleNamespace(ignore_data_skip=False), _speed=speed, _sampler=own)
        ASTrainerMixin._restore(made, folder)
        own.next_epoch()
        own.update(own.plan, torch.ones(len(own.plan), dtype=torch.bool))
        own.next_epoch()
        return made._epoch, made._batches, speed.steps, own.plan.tolist()

    return Prepared({folder / FILE: JSON, folder / SAMPLER: SAFETENSORS}, read)


@a_format("log.jsonl")
def log(folder: Path) -> Prepared:
    from softsieve.training.journal import _whole_lines

    path = folder / "log.jsonl"
    lines = [{"step": s, "kind": "train", "loss": 1 / s, "solved": 0.5, "delta": 0.1} for s in range(1, 9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read(path: Path) -> Any:
        found = _whole_lines(path)
        for line in found:
            for name, value in line.items():
                expect(
                    isinstance(value, str) if name == "kind" else isinstance(value, int | float), f"{name}: {value!r}"
                )
        return [sorted(line.items()) for line in found]

    return Prepared({path: LINES}, read)


# -- records -----------------------------------------------------------------------------------------------------------


@a_format("table of an experiment")
def table(folder: Path) -> Prepared:
    from softsieve.comparisons.output import read_table, write_table

    path = folder / "a.csv"
    rows = [{"k": k, "eps": 0.1 * k, "name": f"row {k}", "none": None} for k in range(6)]
    write_table(path, {"experiment": "synthetic", "n": 10}, rows)

    def read(path: Path) -> Any:
        about, found = read_table(path)
        for row in found:
            expect(all(isinstance(cell, str) for cell in (*row, *row.values())), f"cells {row}")
        return about, found

    return Prepared({path: TEXT}, read)


@a_format("runs of a comparison")
def runs(folder: Path) -> Prepared:
    from softsieve.comparisons import losses as compare
    from softsieve.training.settings import Settings

    jobs = [
        compare.Job("sst5", row, Settings(loss="softmax").filled(), None, 128, "") for row in ("softmax", "as-softmax")
    ]
    place = folder / "a.runs"
    place.mkdir()
    made = {"gpu": None, "commit": "1234", "machine": {"processor": "any", "threads": 1}, "versions": {"torch": "2"}}
    for job in jobs:
        run = {
            "task": "sst5",
            "row": job.row,
            "seed": 42,
            "model": "built-in",
            "parameters": 10,
            "test": {"accuracy": 0.5},
            "validation": {"accuracy": 0.5},
            **dict.fromkeys(
                ("seconds", "evaluation_seconds", "steps", "best_step", "trained_rows", "screened_rows"), 3
            ),
            "solved": [0.1],
            "training_curve": [{"step": 3, "progress": 1.0, "samples": 9}],
            "validation_curve": [{"step": 3, "progress": 1.0, "loss": 0.25, "accuracy": 0.5}],
            "settings": job.settings.asdict(),
            "max_length": 128,
            "rows": {"train": 10},
            "classes": 5,
            "provenance": made,
            "side_by_side": 1,
        }
        (place / f"{job.name}.json").write_text(json.dumps(run))

    def read(path: Path) -> Any:
        found = [run for _, run in compare.run_all(jobs, place)]
        return compare.summarise(found), compare.markdown(found, "softsieve compare"), json.dumps(found)

    return Prepared(dict.fromkeys(place.iterdir(), JSON), read)


@a_format("trials of a search")
def trials(folder: Path) -> Prepared:
    from softsieve.comparisons import losses as compare
    from softsieve.comparisons import search
    from softsieve.training.settings import Settings

    base = compare.Job("sst5", "am-softmax", Settings(loss="am-softmax").filled(), None, 128, "")
    jobs = [search._trial(base, number) for number in (1, 2)]
    place = folder / "a.runs"
    place.mkdir()
    for job in jobs:
        run = {"validation": {"accuracy": 0.5, "loss": 0.25}, "seconds": 3.5, "settings": job.settings.asdict()}
        (place / f"{job.name}.json").write_text(json.dumps(run))

    def read(path: Path) -> Any:
        found = search.conclude([base], jobs, dict(compare.run_each(jobs, place)))
        return found.jobs, search.markdown(found.trials), json.dumps(found.trials)

    return Prepared(dict.fromkeys(place.iterdir(), JSON), read)


@a_format("run of a report")
def report(folder: Path) -> Prepared:
    from safetensors.torch import save_file

    from softsieve.report.read import read_all

    place = folder / "run"
    settings = {"data": "digits", "kind": "image", "classes": 3, "labels": ["0", "1", "2"], "rows": {"train": 9}}
    settings |= {"loss": "as-softmax", "delta": 0.1, "seed": 1, "metric": "accuracy", "epochs": 2, "batch_size": 4}
    numbers = {"steps": 4, "best_step": 4, "trained": 9, "screened": 0, "seconds": 1.0, "evaluation_seconds": 0.5}
    scores = {"validation": {"accuracy": 0.5}, "test": {"accuracy": 0.25}}
    write_record(place / "run.json", "train", settings, [{**scores, **numbers}])
    lines = [{"step": s, "kind": "train", "loss": 1 / s, "progress": s / 4, "solved": 0.5} for s in range(1, 5)]
    (place / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tensors = {"logits": torch.randn(6, 3), "target": torch.arange(6) % 3}
    save_file(tensors, place / "logits.safetensors", {"part": "validation", "delta": "0.1"})
    (place / "judged.json").write_text(json.dumps(JUDGED))

    def read(path: Path) -> Any:
        found = read_all([place])
        if not found.runs:
            return repr(found.records)
        run = found.runs[0]
        shown = run.logits
        if shown is not None:
            expect(bool(shown.logits.softmax(-1).gather(1, shown.target[:, None]).isfinite().all()), "logits")
        logits = None if shown is None else (shown.logits.tolist(), shown.part)
        return repr(run.record), repr(run.log), logits, repr(run.judged)

    files = {"run.json": JSON, "log.jsonl": LINES, "logits.safetensors": SAFETENSORS, "judged.json": JSON}
    return Prepared({place / name: how for name, how in files.items()}, read)


# -- data --------------------------------------------------------------------------------------------------------------

TEXTS = [("what a film", "good"), ('so "so", really', "fair"), ("näh", "bad"), ("oh no", "bad"), ("fine, yes", "good")]
TEXTS += [("a film, again", "fair"), ("no", "bad"), ("yes", "good")]


def data_from(path: Path, how: Sequence[Mutation], **options: Any) -> Prepared:
    """Read, encode: what `softsieve train --data` does before it trains."""

    def read(_: Path) -> Any:
        data = read_data(path, **options)
        task = Task.build(data, max_length=16)
        rows = [task.rows(part) for part in (data.train, data.validation) if part is not None]
        return (
            data.kind,
            task.labels,
            [(tuple(r.target.shape), str(r.target.tolist())) for r in rows],
            str(data.train[0]),
        )

    return Prepared({path: how}, read)


def delimited(comma: str) -> bytes:
    if comma == "\t":
        return "".join(f"{text}\t{label}\n" for text, label in (("text", "label"), *TEXTS)).encode()
    quoted = [(text.replace('"', '""'), label) for text, label in TEXTS]
    return ("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in quoted)).encode()


@a_format("CSV")
def csv(folder: Path) -> Prepared:
    (folder / "a.csv").write_bytes(delimited(","))
    return data_from(folder / "a.csv", TEXT)


@a_format("CSV, .gz")
def csv_gz(folder: Path) -> Prepared:
    (folder / "a.csv.gz").write_bytes(gzip.compress(delimited(","), mtime=0))
    return data_from(folder / "a.csv.gz", (*BYTES, repacked(TEXT, gzip.decompress, gzip.compress)))


@a_format("TSV")
def tsv(folder: Path) -> Prepared:
    (folder / "a.tsv").write_bytes(delimited("\t"))
    return data_from(folder / "a.tsv", TEXT)


@a_format("JSONL")
def jsonl(folder: Path) -> Prepared:
    rows = [
        {"text": text, "labels": [label, "all"], "more": {"n": number}} for number, (text, label) in enumerate(TEXTS)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data_from(folder / "a.jsonl", LINES)


@a_format("JSON table")
def json_table(folder: Path) -> Prepared:
    rows = [{"text": text, "label": label, "n": number} for number, (text, label) in enumerate(TEXTS)]
    (folder / "a.json").write_text(json.dumps(rows))
    return data_from(folder / "a.json", JSON)


@a_format("fastText")
def fasttext(folder: Path) -> Prepared:
    (folder / "a.txt").write_text("".join(f"__label__{label} {text}\n" for text, label in TEXTS))
    return data_from(folder / "a.txt", TEXT)


@a_format("labels and texts")
def plain(folder: Path) -> Prepared:
    (folder / "a.txt").write_text("".join(f"{label}\t{text}\n" for text, label in TEXTS))
    return data_from(folder / "a.txt", TEXT)


@a_format("CoNLL")
def conll(folder: Path) -> Prepared:
    lines = "".join(f"{word} X {tag}\n" for word, tag in (("Ann", "B-PER"), ("saw", "O"), ("Bob", "B-PER")))
    (folder / "a.conll").write_text(f"-DOCSTART- X O\n\n{lines}\n" + f"{lines}\n" * 5)
    return data_from(folder / "a.conll", TEXT)


@a_format("Parquet")
def parquet(folder: Path) -> Prepared:
    import pyarrow
    from pyarrow.parquet import write_table

    texts, labels = [list(some) for some in zip(*TEXTS, strict=True)]
    write_table(pyarrow.table({"text": texts, "label": labels}), folder / "a.parquet")
    return data_from(folder / "a.parquet", BYTES)


@a_format("saved Hugging Face data set")
def saved_dataset(folder: Path) -> Prepared:
    import datasets

    datasets.disable_progress_bars()
    texts, labels = [list(some) for some in zip(*TEXTS, strict=True)]
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=sorted(set(labels)))}
    )
    rows = {"text": texts, "label": [sorted(set(labels)).index(label) for label in labels]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / "set"))
    prepared = data_from(folder / "set", BYTES)
    files = {path: JSON if path.suffix == ".json" else BYTES for path in sorted((folder / "set").iterdir())}
    return prepared._replace(files=files)


@a_format("images")
def images(folder: Path) -> Prepared:
    from PIL import Image

    draw = np.random.default_rng(0)
    for number, end in enumerate(("png", "jpg", "bmp", "webp", "png", "jpg")):
        place = folder / "set" / ("a", "b")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (9, 9, 3), np.uint8)).save(place / f"{number}.{end}")
    prepared = data_from(folder / "set", BYTES)
    return prepared._replace(files=dict.fromkeys(sorted((folder / "set").rglob("*.*")), BYTES))


@a_format("sounds")
def sounds(folder: Path) -> Prepared:
    import soundfile

    draw = np.random.default_rng(0)
    for number, end in enumerate(("wav", "flac", "ogg", "wav", "flac", "wav")):
        place = folder / "set" / ("a", "b")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        soundfile.write(place / f"{number}.{end}", draw.normal(size=400) * 0.1, 8000)
    prepared = data_from(folder / "set", BYTES)
    return prepared._replace(files=dict.fromkeys(sorted((folder / "set").rglob("*.*")), BYTES))


def repacked(how: Sequence[Mutation], unpack: Callable[[bytes], bytes], pack: Callable[[bytes], bytes]) -> Mutation:
    """What is inside, spoilt."""

    def inside(content: bytes, random: Random) -> bytes:
        return pack(random.choice(how)(unpack(content), random))

    return inside


@a_format("files of known data sets")
def presets(folder: Path) -> Prepared:
    from softsieve.tasks.presets import load_preset

    os.chdir(folder)
    content = {
        name: [["hello there", "greet"], ["bye", "leave"]]
        for part in ("train", "val", "test")
        for name in (part, f"oos_{part}")
    }
    for name in ("clinc150", "mnist", "fsdd"):
        (folder / name).mkdir()
    clinc = folder / "clinc150" / "data_full.json.gz"
    clinc.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    files: dict[Path, Sequence[Mutation]] = {clinc: (*BYTES, *[repacked(JSON, gzip.decompress, gzip.compress)] * 10)}
    inner = repacked(BYTES, gzip.decompress, gzip.compress)
    for part, count in (("train", 24), ("t10k", 6)):
        for what, shape in (("images-idx3", (count, 8, 8)), ("labels-idx1", (count,))):
            path = folder / "mnist" / f"{part}-{what}-ubyte.gz"
            header = np.array([0x800 + len(shape), *shape], ">i4").tobytes()
            values = (np.arange(int(np.prod(shape))) % 2).astype(np.uint8)
            path.write_bytes(gzip.compress(header + values.tobytes(), mtime=0))
            files[path] = (*BYTES, *[inner] * 10)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for digit in (0, 1):
            for index in range(12):
                sound = io.BytesIO()
                with wave.open(sound, "wb") as file:
                    file.setnchannels(1)
                    file.setsampwidth(2)
                    file.setframerate(8000)
                    file.writeframes(bytes(range(200)))
                about = tarfile.TarInfo(f"recordings/{digit}_ann_{index}.wav")
                about.size = len(sound.getvalue())
                archive.addfile(about, io.BytesIO(sound.getvalue()))
    tar = folder / "fsdd" / "recordings.tar.xz"
    tar.write_bytes(lzma.compress(packed.getvalue(), preset=0))
    files[tar] = (*BYTES, *[repacked(BYTES, lzma.decompress, lambda inside: lzma.compress(inside, preset=0))] * 10)

    def read(path: Path) -> Any:
        data = load_preset(path.parent.name, folder)
        return len(data.train.inputs), str(data.train.labels), str(data.test and data.test.labels)

    return Prepared(files, read)


@a_format("sequences of items")
def sequences(folder: Path) -> Prepared:
    from experiments.item_sequences import leave_last_out, read_sequences

    text = "\n".join(f"u{user} i{(user + n) % 7}" for user in range(5) for n in range(1 + user)).encode()
    plain, packed = folder / "taken.txt", folder / "taken.txt.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text, mtime=0))

    def read(path: Path) -> Any:
        taken = read_sequences(path)
        split = leave_last_out(taken, path)
        largest = max(int(items.max()) for items in taken.users)
        expect(largest == len(taken.items) - 1, "item numbers that have no name")
        return [items.tolist() for items in taken.users], taken.items, split.test.answers.tolist()

    return Prepared({plain: TEXT, packed: (*BYTES, *[repacked(TEXT, gzip.decompress, gzip.compress)] * 4)}, read)


def small() -> None:
    """Tables of hashed words so small that making a model takes no time."""
    for module in (models, encode):
        vars(module)["BUCKETS"] = 64
    models.TEXT_BUCKETS.update(dict.fromkeys(models.TEXT_BUCKETS, 64))
