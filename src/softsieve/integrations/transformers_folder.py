"""A folder that transformers loads: the model's own where it is one, else with the code that transformers lacks."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers import utils

from softsieve._files import replacing_folder
from softsieve.errors import InputError
from softsieve.integrations import mean_pooled
from softsieve.integrations.hub import CODE, check_target, copy_model
from softsieve.tasks.hf import PretrainedBody, no_bar
from softsieve.tasks.task import Task
from softsieve.training.run import load_model


def export_transformers(folder: Path, out: Path) -> str:
    """Write a folder that ``from_pretrained`` loads, with the same logits; how it does is returned.

    Where the model is a classifier of transformers, that is a copy of it. The mean of an encoder's states is none: the
    folder then has the code of one, and ``from_pretrained`` and ``pipeline`` want ``trust_remote_code=True``.

    Raises:
        InputError: for a folder without a model, and a model that is neither, with the reason.
    """
    task, model = load_model(folder, index=False)
    reason = None if task.objective is None else task.reason_against_transformers(task.objective)
    unit = "Token" if task.kind == "tokens" else "Sequence"
    call = f"AutoModelFor{unit}Classification.from_pretrained"
    if reason is None:
        copy_model(folder, out)
        return f'{call}("{out}")'
    body, head = getattr(model, "body", None), getattr(model, "head", None)
    if not isinstance(body, PretrainedBody) or body.per_word or not isinstance(head, nn.Linear):
        raise InputError(f"{folder}: transformers has no class for this model: {reason}")
    check_target(out)
    with replacing_folder(out) as part:
        _write_mean_pooled(part, task, body, head)
    return f'{call}("{out}", trust_remote_code=True)'


def _write_mean_pooled(folder: Path, task: Task, body: PretrainedBody, head: nn.Linear) -> None:
    """As `save_pretrained` would, with the code beside it."""
    encoder: Any = task.encoder
    config = mean_pooled.MeanPooledConfig(encoder=encoder.config.to_dict())
    encoder.describe(config, task.labels, multilabel=task.multilabel)
    config.architectures = [mean_pooled.MeanPooledClassifier.__name__]
    config.pad_token_id = encoder.config.pad_token_id
    module = Path(CODE).stem
    config.auto_map = {
        "AutoConfig": f"{module}.{mean_pooled.MeanPooledConfig.__name__}",
        "AutoModelForSequenceClassification": f"{module}.{mean_pooled.MeanPooledClassifier.__name__}",
    }
    made = mean_pooled.MeanPooledClassifier(copy.deepcopy(config))
    made.encoder.load_state_dict(body.encoder.state_dict())
    made.classifier.load_state_dict(head.state_dict())
    with no_bar(utils.logging):
        made.save_pretrained(str(folder))
    config.save_pretrained(str(folder))
    encoder.tokenizer_as_trained().save_pretrained(str(folder))
    shutil.copy(mean_pooled.__file__, folder / CODE)
