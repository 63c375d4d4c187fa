"""What a model of transformers must know of its labels, so that pipelines name and score them as trained."""

from __future__ import annotations

from typing import Any


def name_labels(model: Any, data: Any) -> None:
    """Give a model the label names of a `datasets.Dataset`, if it has as many and none of its own.

    Example:
        >>> from types import SimpleNamespace as Some
        >>> config = Some(num_labels=2, id2label={0: "LABEL_0", 1: "LABEL_1"}, label2id={})
        >>> name_labels(Some(config=config), Some(features={"label": Some(names=["neg", "pos"])}))
        >>> config.id2label, config.label2id
        ({0: 'neg', 1: 'pos'}, {'neg': 0, 'pos': 1})
    """
    config: Any = getattr(model, "config", None)
    features: Any = getattr(data, "features", None)
    known = getattr(config, "id2label", None)
    if known is None or not hasattr(features, "get"):
        return
    for column in ("labels", "label"):
        feature = features.get(column)
        names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
        unnamed = all(name == f"LABEL_{number}" for number, name in known.items())
        if names and len(names) == config.num_labels and unnamed:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: number for number, name in enumerate(names)}
            return


def mark_multilabel(model: Any) -> None:
    """Have pipelines score each label of a model by itself, unless it says otherwise."""
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "problem_type", "") is None:
        config.problem_type = "multi_label_classification"
