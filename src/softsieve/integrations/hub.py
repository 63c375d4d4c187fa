"""A trained model in the place that hubs share models from: a folder, a clone of a repository, or a hub itself."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from softsieve._files import check_writable, replacing_folder
from softsieve.errors import InputError
from softsieve.extras import loaded, package
from softsieve.tasks.task import FILE
from softsieve.training.run import MODEL, WEIGHTS, load_model

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CODE = "modeling_softsieve.py"  # of a folder for transformers, beside a model that is no class of it
_KEPT = (".git", ".gitattributes")  # of a clone


def model_folder(folder: Path) -> Path:
    """The folder of the model, of that or of the run that made it; an error if what is there cannot be loaded."""
    load_model(folder, index=False)
    return folder if (folder / WEIGHTS).exists() else folder / MODEL


def copy_model(folder: Path, target: Path) -> None:
    """Put a model into a folder, all or nothing: a new one, an empty one, a clone, or one with an earlier model.

    What a clone knows of its repository stays; other files of the earlier model go.

    Raises:
        InputError: for a folder without a model, or a target that holds something else.
    """
    source = model_folder(folder)
    if target.resolve() == source.resolve():
        raise InputError(f"{target}: expected another folder than that of the model")
    check_target(target)
    with replacing_folder(target) as part:
        shutil.copytree(source, part, dirs_exist_ok=True)
        for name in _KEPT:
            kept = target / name
            if kept.is_dir():
                shutil.copytree(kept, part / name, symlinks=True)
            elif kept.exists():
                shutil.copy2(kept, part / name)


def check_target(target: Path) -> None:
    """Refuse a place for a model that holds something else, or cannot be written to."""
    if target.exists() and not target.is_dir():
        raise InputError(f"{target}: expected a folder, found a file")
    there = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if not there <= {*_KEPT, "README.md"} and not there & {FILE, CODE}:
        raise InputError(f"{target}: expected an empty folder, a clone or an earlier model, found {min(there)!r} in it")
    check_writable(target)


def push_model(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload a model to the Hugging Face hub, to a repository that is made if it is not there.

    Args:
        folder: of the model, or of the run that made it.
        repository: ``owner/name``.
        private: whether a repository that is made is seen by its owner alone.

    Returns:
        The address of what was uploaded.

    Raises:
        InputError: for a folder without a model, a name that is none, or what the hub says.
    """
    if _REPOSITORY.fullmatch(repository) is None:
        raise InputError(f"target: expected a folder or owner/name on the hub, found {repository!r}")
    source = model_folder(folder)
    api = package("huggingface_hub", "pushing to the hub").HfApi()
    complaint = f"{repository}: cannot be pushed to"
    loaded(lambda: api.create_repo(repository, exist_ok=True, private=private), complaint)
    message = "A model trained by softsieve"
    done = loaded(
        lambda: api.upload_folder(repo_id=repository, folder_path=str(source), commit_message=message), complaint
    )
    return str(getattr(done, "commit_url", done))
