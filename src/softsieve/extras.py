"""What can be installed besides: the extras of the package, what each gives, and which one brings a module."""

from __future__ import annotations

from typing import NamedTuple


class Extra(NamedTuple):
    """An extra: what it is for, and its packages with the module that each is imported as."""

    gives: str
    packages: dict[str, str]


EXTRAS = {
    "train": Extra(
        "softsieve train, predict, compare and generate; the integration with Hugging Face",
        {
            "accelerate": "accelerate",
            "datasets": "datasets",
            "matplotlib": "matplotlib",
            "pillow": "PIL",
            "pyarrow": "pyarrow",
            "scikit-learn": "sklearn",
            "scipy": "scipy",
            "seqeval": "seqeval",
            "soundfile": "soundfile",
            "tensorboard": "tensorboard",
            "transformers": "transformers",
        },
    ),
    "lightning": Extra("callbacks for Lightning", {"lightning": "lightning"}),
    "rivals": Extra(
        "sparsemax and entmax-1.5, indexes of faiss to compare with", {"entmax": "entmax", "faiss-cpu": "faiss"}
    ),
    "report": Extra("reports to look at in a browser", {"jinja2": "jinja2", "plotly": "plotly"}),
}


def install(extra: str) -> str:
    """The command that installs an extra.

    Example:
        >>> install("rivals")
        "pip install 'softsieve[rivals]'"
    """
    return f"pip install 'softsieve[{extra}]'"


def extra_of(module: str | None) -> str | None:
    """The extra that brings a module, if one does.

    Example:
        >>> extra_of("sklearn.metrics"), extra_of("torch")
        ('train', None)
    """
    top = (module or "").partition(".")[0]
    return next((name for name, extra in EXTRAS.items() if top in extra.packages.values()), None)


def missing(module: str | None) -> str:
    """How to get a module that is not there.

    Example:
        >>> missing("entmax")
        "the package entmax: pip install 'softsieve[rivals]'"
    """
    extra = extra_of(module)
    return f"the package {module}: {install(extra) if extra else f'pip install {module}'}"
