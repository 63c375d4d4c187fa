"""Optional packages: which extra brings a module, and errors of our own for what is missing or fails to load."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from softsieve.errors import InputError, first_line


class Extra(NamedTuple):
    """An extra: what it is for, and its packages with the module that each is imported as."""

    gives: str
    packages: dict[str, str]


def _extra(gives: str, packages: str) -> Extra:
    modules = {"faiss-cpu": "faiss", "pillow": "PIL", "scikit-learn": "sklearn"}
    return Extra(gives, {name: modules.get(name, name) for name in packages.split()})


EXTRAS = {
    "train": _extra(
        "softsieve train, predict, compare and generate; Classifier; the integration with Hugging Face",
        "accelerate datasets matplotlib pillow pyarrow scikit-learn scipy seqeval soundfile tensorboard transformers",
    ),
    "lightning": _extra("callbacks for Lightning", "lightning"),
    "rivals": _extra("sparsemax and entmax-1.5, indexes of faiss to compare with", "entmax faiss-cpu"),
    "quantised": _extra("quantised output layers: GGUF files, torchao", "gguf torchao"),
    "export": _extra("models as ONNX files", "onnx onnxruntime onnxscript"),
    "serve": _extra("softsieve serve: a trained model behind HTTP", "fastapi uvicorn"),
    "report": _extra("reports to look at in a browser", "jinja2 plotly"),
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


def missing(module: str | None, extra: str | None = None) -> str:
    """How to get a module that is not there: by the extra that brings it or, if none does, by ``extra``.

    Example:
        >>> missing("entmax")
        "the package entmax: pip install 'softsieve[rivals]'"
    """
    extra = extra_of(module) or extra
    return f"the package {module}: {install(extra) if extra else f'pip install {module}'}"


def package(name: str, what: str) -> Any:
    """The module of an optional package.

    Raises:
        InputError: when it is not installed; says that ``what`` needs it, and which extra brings it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"{what} needs {missing(error.name, extra_of(name))}") from None


def loaded(load: Callable[[], Any], complaint: str) -> Any:
    """What a library loads.

    Raises:
        InputError: when it fails: the complaint, with the library's own in brackets.
    """
    try:
        return load()
    except Exception as error:  # the library, its network stack and damaged files raise anything
        raise InputError(f"{complaint} ({first_line(error)})") from None
