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
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
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
    whole = Classifier(str(tiny_bert), epochs=1, pooling="model").fit(TEXTS, LABELS)
    assert whole.task_.reason_against_transformers(whole._objective) is None
    assert classifier.task_.reason_against_transformers(classifier._objective) is not None
    whole.save(tmp_path / "whole")
    assert "model: bert" in (tmp_path / "whole" / "README.md").read_text()


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
    assert np.array_equal(Classifier(epochs=25).fit(TEXTS, flags.tolist()).predict(TEXTS), flags)
    assert other.score(TEXTS, flags.tolist()) == 1
    other.save(tmp_path / "model")
    loaded = Classifier.load(tmp_path / "model")
    assert np.array_equal(loaded.predict(TEXTS), flags)
    assert loaded.score(TEXTS[:2], [[1, 1], [1, 0]]) == 1
    assert classifier.score(TEXTS, flags) == 1  # in the order of classes_


def test_columns_of_flags_keep_their_order(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    words = {"tech": "chip", "food": "bread", "sport": "goal"}
    sets = [("tech",), ("food", "sport"), ("sport",), ("tech", "food"), ()]
    texts = [f"{' '.join(words[one] for one in sets[i % 5])} and {i}" for i in range(100)]
    flags = pandas.DataFrame({name: [int(name in sets[i % 5]) for i in range(100)] for name in words})
    held_out = texts[:20], flags.to_numpy()[:20]  # in the same order
    classifier = Classifier(epochs=15).fit(texts, flags, validation=held_out)
    assert classifier.metrics_["micro_f1"] == 1
    classifier.save(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "task.json").read_text())["columns"] == [2, 0, 1]
    for one in (classifier, Classifier.load(tmp_path / "model")):
        assert one.classes_.tolist() == ["tech", "food", "sport"]
        assert np.array_equal(one.predict(texts), flags)
        assert np.array_equal(one.predict_proba(texts) > 0.5, flags)
        for answers in (flags, flags.to_numpy(), flags[["sport", "tech", "food"]]):
            assert one.score(texts, answers) == 1
    with pytest.raises(InputError, match="y: expected 3 columns, one a label, found 2"):
        classifier.score(texts, flags.to_numpy()[:, 1:])
    task = tmp_path / "model" / "task.json"
    content = json.loads(task.read_text())
    damaged: list[Any] = [[2, 0], [2, 0, 0], [2, 0, True], [1, 2, 3], "x", {}]
    for wrong in damaged:
        task.write_text(json.dumps({**content, "columns": wrong}))
        with pytest.raises(InputError, match="columns: expected the numbers from 0 to 2 in any order"):
            Classifier.load(tmp_path / "model")
    del content["columns"]  # as earlier versions wrote it
    task.write_text(json.dumps(content))
    assert Classifier.load(tmp_path / "model").predict(texts[:1]) == [["tech"]]


@pytest.mark.parametrize("make", [list, np.array])
def test_booleans_come_back_as_booleans(tmp_path: Path, make: Any) -> None:
    answers = make([label == "pos" for label in LABELS])
    classifier = Classifier(epochs=4).fit(TEXTS, answers)
    classifier.save(tmp_path / "model")
    for one in (classifier, Classifier.load(tmp_path / "model")):
        assert one.classes_.tolist() == [False, True]
        assert one.classes_.dtype == one.predict(TEXTS).dtype == np.bool_
        assert np.array_equal(one.predict(TEXTS), answers)
        assert np.array_equal(one.predict_proba(TEXTS)[:, 1] > 0.5, answers)
        assert one.score(TEXTS, answers) == 1
    task = tmp_path / "model" / "task.json"
    task.write_text(task.read_text().replace('"True"', '"Yes"'))
    with pytest.raises(InputError, match="bool_labels: expected true with the labels False and True"):
        Classifier.load(tmp_path / "model")


def test_frames_with_columns_of_any_name() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"X": TEXTS, "y": LABELS})
    classifier = Classifier(epochs=4).fit(frame, "y")
    assert classifier.predict(frame).tolist() == classifier.predict(frame[["X"]]).tolist() == LABELS
    assert classifier.score(frame) == classifier.score(frame, "y") == classifier.score(frame, frame["y"]) == 1


def test_classes_are_weighted(reviews: Path, tmp_path: Path) -> None:
    texts, labels = TEXTS[:50] + TEXTS[50::2], LABELS[:50] + LABELS[50::2]
    weights = {"pos": 1, "neg": 30}
    asked: list[Any] = [None, "balanced", weights]
    found = [Classifier(epochs=1, class_weights=one).fit(texts, labels) for one in asked]
    means = [one.predict_proba(texts)[:, 0].mean() for one in found]
    assert means[0] < means[1] < means[2]
    by_number = Classifier(epochs=1, class_weights={1: 1, 0: 30}).fit(texts, [int(label == "pos") for label in labels])
    by_truth = Classifier(epochs=1, class_weights={True: 1, False: 30}).fit(texts, [label == "pos" for label in labels])
    for one in (by_number, by_truth):
        assert equal_weights(one.model_.state_dict(), found[2].model_.state_dict())
    assert clone(found[2]).class_weights == weights
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(weights))
    run("train", "--data", reviews, "--out", tmp_path / "run", "--quiet", "--epochs", 1, "--class_weights", path)
    mine = Classifier(epochs=1, class_weights=weights).fit(TEXTS, LABELS)
    assert equal_weights(load_model(tmp_path / "run")[1].state_dict(), mine.model_.state_dict())


# The card


def test_the_card_tells_of_data_model_and_settings(reviews: Path, tmp_path: Path) -> None:
    classifier = fitted(seed=7)
    classifier.save(tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "on data in memory (list) (rows: 72 train, 8 validation); model: built-in, " in card
    assert "| epochs | 4 |" in card
    assert "| seed | 7 |" in card
    Classifier.load(tmp_path / "mine").save(tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == card
    run("train", "--data", reviews, "--test-data", reviews, "--output_dir", tmp_path / "run", "--quiet", "--epochs", 1)
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        Classifier.load(folder).save(tmp_path / "again")
        for name in ("README.md", "metrics.json", "task.json"):
            written = (tmp_path / "again" / name).read_text()
            assert written == (tmp_path / "run" / "model" / name).read_text()
    again = Classifier.load(tmp_path / "again").fit(TEXTS, LABELS)
    again.save(tmp_path / "again")
    assert "data in memory (list)" in (tmp_path / "again" / "README.md").read_text()
    (tmp_path / "mine" / "README.md").unlink()
    Classifier.load(tmp_path / "mine").save(tmp_path / "bare")
    assert "data that were not named" in (tmp_path / "bare" / "README.md").read_text()


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


def test_labels_that_training_has_not_seen_count_as_wrong() -> None:
    classifier = fitted()
    note = r"score: 2 of 4 rows have labels that training has not seen and count as wrong: 'so so' \(X\[1\]\)"
    with pytest.warns(UserWarning, match=note) as said:
        assert classifier.score(TEXTS[:4], ["pos", "so so", "pos", "so so"]) == 0.5
    assert len(said) == 1
    labels = [["here", "pos"] if i % 2 == 0 else ["here"] for i in range(80)]
    several = Classifier(epochs=25).fit(TEXTS, labels)
    with pytest.warns(UserWarning, match="score: 1 of 2 rows"):
        assert several.score(TEXTS[:2], [["here", "pos"], ["here", "new"]]) == pytest.approx(6 / 7)
    with pytest.warns(UserWarning, match="score: 1 of 40 rows"):  # a class of one row is not in one of the folds
        assert (cross_val_score(Classifier(epochs=6), TEXTS, ["rare", *LABELS[1:]], cv=KFold(2)) > 0.9).any()


# What is refused


def test_a_label_of_its_own_in_every_row() -> None:
    pandas = pytest.importorskip("pandas")
    found = (
        r"y: expected classes that several rows have, found a label of its own in every one of 80 rows \(.*\); give "
    )
    with pytest.raises(InputError, match=found + "as y the class of each row"):
        Classifier().fit(TEXTS, [f"row {i}" for i in range(80)])
    with pytest.raises(InputError, match=found + "label_column"):
        Classifier().fit(pandas.DataFrame({"text": TEXTS, "label": [f"row {i}" for i in range(80)]}))


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
        ({"pooling": "max"}, ValueError, "pooling: expected one of 'mean', 'model', found 'max'"),
        ({"pooling": "mean"}, InputError, "pooling: expected with texts and a Hugging Face encoder, found with text"),
        ({"class_weights": "even"}, TypeError, "class_weights: expected 'balanced' or weights by label, found 'even'"),
        ({"class_weights": {"so so": 2}}, InputError, "class_weights: expected labels of the data, found 'so so'"),
        ({"class_weights": {None: 2}}, TypeError, "class_weights: expected labels as str, found None"),
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
