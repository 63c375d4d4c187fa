"""`softsieve.Classifier`: the model of the command, scikit-learn's tools around it, and what it refuses."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("sklearn")

from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer

from softsieve import Classifier
from softsieve.cli import app
from softsieve.errors import InputError
from softsieve.training.run import load_model
from tests.training.helpers import equal_weights

WORDS = ["good", "fine", "lovely", "great"], ["bad", "poor", "awful", "dull"]
TEXTS = [f"a {WORDS[i % 2][i // 2 % 4]} film number {i}" for i in range(80)]
LABELS = ["pos", "neg"] * 40
ROWS = [text.split() for text in TEXTS]


def fitted(**options: Any) -> Classifier:
    return Classifier(**{"epochs": 4, **options}).fit(TEXTS, LABELS)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"{x},{y}\n" for x, y in zip(TEXTS, LABELS, strict=True)))
    return path


# The same model


@pytest.mark.parametrize("options", [{}, {"epochs": 3, "skip": "solved", "seed": 7, "batch_size": 8, "delta": 0.3}])
def test_the_command_and_the_estimator_come_to_the_same_model(
    reviews: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    pandas = pytest.importorskip("pandas")
    names = {
        "epochs": "num_train_epochs",
        "seed": "seed",
        "batch_size": "per_device_train_batch_size",
        "delta": "delta",
    }
    asked = [part for name, value in options.items() if name in names for part in (f"--{names[name]}", value)]
    asked += ["--skip_solved"] if options.get("skip") == "solved" else []
    run("train", "--data", reviews, "--output_dir", tmp_path / "run", "--quiet", *asked)
    before = torch.get_rng_state()
    classifier = Classifier(**options).fit(pandas.read_csv(reviews))
    assert torch.equal(before, torch.get_rng_state())  # the caller's numbers stay the caller's
    _, model = load_model(tmp_path / "run")
    assert equal_weights(model.state_dict(), classifier.model_.state_dict())
    classifier.save(tmp_path / "mine")
    for name in ("task.json", "metrics.json", "model.safetensors"):
        assert (tmp_path / "mine" / name).read_bytes() == (tmp_path / "run" / "model" / name).read_bytes()


def test_folders_go_both_ways(reviews: Path, tmp_path: Path) -> None:
    classifier = fitted()
    classifier.save(tmp_path / "mine")
    run("predict", tmp_path / "mine", "--data", reviews, "--out", tmp_path / "answers.jsonl")
    said = [json.loads(line)["prediction"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert said == classifier.predict(TEXTS).tolist() == LABELS
    run("train", "--data", reviews, "--output_dir", tmp_path / "run", "--quiet", "--num_train_epochs", 4)
    for folder in (tmp_path / "mine", tmp_path / "run", str(tmp_path / "run" / "model")):
        loaded = Classifier.load(folder)
        assert np.array_equal(loaded.predict_proba(TEXTS), classifier.predict_proba(TEXTS))
        assert (loaded.metrics_, loaded.classes_.tolist()) == (classifier.metrics_, ["neg", "pos"])
    loaded.save(tmp_path / "again")
    again = Classifier.load(tmp_path / "again")
    assert equal_weights(again.model_.state_dict(), classifier.model_.state_dict())


def test_an_encoder_is_trained_and_saved(tmp_path: Path, tiny_bert: Path) -> None:
    classifier = Classifier(str(tiny_bert), epochs=30, learning_rate=1e-2, validation_share=0.2).fit(TEXTS, LABELS)
    classifier.save(tmp_path / "mine")
    assert Classifier.load(tmp_path / "mine").score(TEXTS, LABELS) == classifier.score(TEXTS, LABELS) > 0.9


@pytest.fixture
def tiny_bert(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    folder.mkdir()
    words = sorted({word for text in TEXTS for word in text.split()})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(words) + 5, **sizes)
    transformers.BertModel(config).save_pretrained(str(folder))
    return folder


# Labels and kinds


def test_whole_numbers_come_back_as_whole_numbers_in_their_order(tmp_path: Path) -> None:
    numbers = np.array([10, 9, -1, 9] * 20)  # as strings, -1, 10, 9
    texts = [f"{word} and {row}" for row, word in enumerate(["ten", "nine", "minus", "nine"] * 20)]
    classifier = Classifier(epochs=6).fit(texts, numbers)
    classifier.save(tmp_path / "model")
    for one in (classifier, Classifier.load(tmp_path / "model")):
        assert one.classes_.tolist() == [-1, 9, 10]
        assert one.classes_.dtype == one.predict(texts).dtype == np.int64
        assert one.predict(texts).tolist() == numbers.tolist()
        assert np.array_equal(one.classes_[one.predict_proba(texts).argmax(1)], numbers)
        assert one.score(texts, numbers) == 1
    task = tmp_path / "model" / "task.json"
    task.write_text(task.read_text().replace('"9"', '"nine"'))
    with pytest.raises(InputError, match="whole_labels: expected true with labels that are whole numbers"):
        Classifier.load(tmp_path / "model")


def test_any_number_of_labels(tmp_path: Path) -> None:
    labels = [["here", "pos"] if i % 2 == 0 else ["here"] if i % 4 == 1 else [] for i in range(80)]
    classifier = Classifier(epochs=25).fit(TEXTS, labels)
    assert classifier.task_.kind == "multilabel"
    assert classifier.classes_.tolist() == ["here", "pos"]
    assert classifier.predict(TEXTS) == labels
    assert classifier.score(TEXTS, labels) == 1
    chosen = classifier.predict_proba(TEXTS) > 0.5
    assert [[str(one) for one in classifier.classes_[row]] for row in chosen] == [sorted(row) for row in labels]
    flags = np.array([[len(row) > 0, len(row) > 1] for row in labels]).astype(int)
    other = Classifier(epochs=25).fit(TEXTS, flags)
    assert np.array_equal(other.predict(TEXTS), flags)
    assert other.score(TEXTS, flags) == 1
    other.save(tmp_path / "model")
    assert Classifier.load(tmp_path / "model").predict(TEXTS[:1]) == [[0, 1]]


def test_a_tag_a_word() -> None:
    tags = [["B-X" if word in ("good", "film") else "O" for word in row] for row in ROWS]
    classifier = Classifier(epochs=10, max_length=4).fit(ROWS, tags)
    assert classifier.task_.kind == "tokens"
    assert classifier.predict(ROWS) == tags  # the fifth word is not read, and an O
    found = classifier.predict_proba(ROWS[:2])
    assert [one.shape for one in found] == [(5, 2), (5, 2)]
    assert classifier.classes_[found[0].argmax(1)].tolist() == tags[0]
    assert np.allclose(found[0].sum(1), 1, rtol=1e-5, atol=0)
    assert classifier.score(ROWS, tags) == 1


def test_images_and_sounds() -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("scipy")
    noise = np.random.default_rng(0).integers(0, 30, (40, 12, 12), dtype=np.uint8)
    pixels, labels = noise + (np.arange(40) % 2 * 150).astype(np.uint8)[:, None, None], np.arange(40) % 2
    classifier = Classifier(epochs=4).fit(pixels, labels)
    assert classifier.task_.kind == "image"
    assert classifier.score(pixels, labels) == 1
    assert classifier.predict([image.fromarray(one) for one in pixels]).tolist() == labels.tolist()
    sounds = [(np.sin(np.arange(4000) * (0.1 + 0.5 * (i % 2))), 16000) for i in range(40)]
    classifier = Classifier(epochs=8).fit(sounds, labels)
    assert classifier.task_.kind == "audio"
    assert classifier.score([{"array": samples, "sampling_rate": rate} for samples, rate in sounds], labels) == 1


def test_data_sets_of_hugging_face_and_validation_rows() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = {"text": TEXTS, "label": [int(label == "pos") for label in LABELS]}
    data = datasets.Dataset.from_dict(rows, features=features)
    classifier = Classifier(epochs=4).fit(data)
    assert classifier.predict(data).tolist() == LABELS
    parts = datasets.DatasetDict({"train": data, "dev": data.select(range(7))})
    both = Classifier(epochs=4).fit(parts)
    pair = Classifier(epochs=4).fit(TEXTS, LABELS, validation=(TEXTS[:7], LABELS[:7]))
    assert both.metrics_ == pair.metrics_
    assert equal_weights(both.model_.state_dict(), pair.model_.state_dict())
    assert not equal_weights(both.model_.state_dict(), classifier.model_.state_dict())  # it held rows out
    assert Classifier(epochs=1, validation_share=0).fit(TEXTS, LABELS).metrics_ == {}


# scikit-learn


def test_scikit_learn_takes_it_for_a_classifier() -> None:
    classifier = Classifier("bert", epochs=3, skip="solved")
    assert is_classifier(classifier)
    assert clone(classifier).get_params() == classifier.get_params()
    assert classifier.set_params(epochs=5).epochs == 5
    assert repr(classifier) == "Classifier(epochs=5, model='bert', skip='solved')"
    trained = fitted()
    assert trained.fit(TEXTS, LABELS) is trained
    copy = pickle.loads(pickle.dumps(trained))
    assert np.array_equal(copy.predict_proba(TEXTS), trained.predict_proba(TEXTS))
    assert not hasattr(clone(trained), "classes_")


def test_folds_pipelines_and_searches() -> None:
    scores = cross_val_score(Classifier(epochs=6), TEXTS, LABELS, cv=2)
    assert (scores > 0.9).all()
    steps = [("upper", FunctionTransformer(lambda texts: [text.upper() for text in texts])), ("net", Classifier())]
    search = GridSearchCV(Pipeline(steps), {"net__epochs": [1, 6]}, cv=2, error_score="raise").fit(TEXTS, LABELS)
    assert search.best_params_ == {"net__epochs": 6}
    assert search.predict(TEXTS[:2]).tolist() == LABELS[:2]


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": 3}, TypeError, "model: expected a string, found int"),
        ({"kind": "video"}, ValueError, "kind: expected one of 'text', .* found 'video'"),
        ({"kind": "audio"}, InputError, "no such file"),
        ({"loss": "bce"}, ValueError, "loss: expected one of .* found 'bce'"),
        ({"epochs": 0}, ValueError, "epochs: expected an int in"),
        ({"validation_share": 1}, ValueError, "validation_share: expected a number in"),
        ({"validation_share": 0, "patience": 1}, ValueError, "patience: expected 0 without validation rows, found 1"),
        ({"max_length": 0}, ValueError, "max_length: expected an int in"),
        ({"device": "cuda:99"}, InputError, "device: expected one of cpu.* found 'cuda:99'"),
        ({"model": "/nowhere/at all"}, InputError, "/nowhere/at all"),
    ],
)
def test_parameters_that_cannot_be(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Classifier(**options).fit(TEXTS, LABELS)


@pytest.mark.parametrize(
    ("validation", "error", "words"),
    [
        ("reviews.csv", TypeError, "validation: X: expected a list, an array, a Series or a table, found str"),
        ((TEXTS,), TypeError, r"validation: expected a table or a pair \(X, y\), found a tuple of 1"),
        ((TEXTS, LABELS[:3]), InputError, "validation: y: expected 80 labels, one a row, found 3"),
        (TEXTS, InputError, "validation: y: expected a label for each of 80 rows, found none"),
    ],
)
def test_validation_rows_that_cannot_be(validation: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Classifier(epochs=1).fit(TEXTS, LABELS, validation=validation)


def test_use_before_training(tmp_path: Path) -> None:
    for call in (Classifier().predict, Classifier().predict_proba, Classifier().score):
        with pytest.raises(NotFittedError, match="expected one that was fitted or loaded, found neither"):
            call(TEXTS)
    with pytest.raises(NotFittedError):
        Classifier().save(tmp_path / "model")
    with pytest.raises(InputError, match="expected a folder with a trained model, found none"):
        Classifier.load(str(tmp_path / "nothing"))


def test_what_it_is_asked_later(tmp_path: Path) -> None:
    classifier = fitted()
    with pytest.raises(InputError, match=r"X\[1\]: the model does not know the label 'so so'"):
        classifier.score(TEXTS[:2], ["pos", "so so"])
    with pytest.raises(InputError, match="y: expected 2 labels, one a row, found 1"):
        classifier.score(TEXTS[:2], ["pos"])
    with pytest.raises(InputError, match="y: expected a label for each of 2 rows, found none"):
        classifier.score(TEXTS[:2])
    with pytest.raises(InputError, match="X: no rows"):
        classifier.predict([])
    with pytest.raises(InputError, match="expected text, found 3"):
        classifier.predict(["good", 3])
    with pytest.raises(TypeError, match="X: expected a list, an array, a Series or a table, found str"):
        classifier.predict("good")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "kept.txt").write_text("dear diary")
    with pytest.raises(InputError, match="notes: expected a new folder or one with a model, found something else"):
        classifier.save(tmp_path / "notes")
    assert (tmp_path / "notes" / "kept.txt").read_text() == "dear diary"
    classifier.save(tmp_path / "model")
    classifier.save(tmp_path / "model")
