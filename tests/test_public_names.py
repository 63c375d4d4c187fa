"""Every public name is documented with an example that runs, and importing the package stays light."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

MODULES = ["softsieve", "softsieve.losses", "softsieve.layers", "softsieve.training", "softsieve.reference", "as_sm"]
EXTRAS = {"accelerate", "entmax", "lightning", "rich", "safetensors", "sklearn", "transformers", "triton", "typer"}
NAMES = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]
NAMES.append(("softsieve", "Classifier"))  # needs an extra, which `from softsieve import *` must not


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_names_have_a_docstring_with_an_example(module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    assert inspect.getdoc(thing), f"{module}.{name} has no docstring"
    examples = doctest.DocTestFinder(recurse=False).find(thing, name)[0].examples
    assert examples, f"{module}.{name} has no example"
    assert any(example.want for example in examples), f"the example of {module}.{name} shows no result"


def test_the_fixed_names_are_there() -> None:
    import softsieve

    assert set(softsieve.__all__) >= {
        "ASCrossEntropyLoss",
        "ASMultiLabelLoss",
        "ASSpeed",
        "ASStats",
        "Above",
        "AdaptiveSoftmax",
        "DeltaSchedule",
        "HeadAdamW",
        "HeadSGD",
        "LinearASMultiLabelLoss",
        "SieveLinear",
        "SolvedSampler",
        "as_cross_entropy",
        "as_keep_mask",
        "as_multilabel_loss",
        "linear_as_multilabel_loss",
    }
    assert softsieve.__all__ == sorted(softsieve.__all__)
    assert softsieve.__version__


def test_importing_brings_in_no_extra_and_no_command_line() -> None:
    code = "import sys, softsieve, as_sm; print(EXTRAS & set(sys.modules))"
    code = f"EXTRAS = {EXTRAS}; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_estimator_is_imported_when_it_is_asked_for_and_says_what_it_lacks() -> None:
    code = """
import sys, softsieve
assert "Classifier" in dir(softsieve)
try:
    softsieve.classifier
except AttributeError as error:
    print(error)
sys.modules["sklearn"] = None
try:
    from softsieve import Classifier
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "module 'softsieve' has no attribute 'classifier'",
        "softsieve.Classifier needs the package sklearn.base: pip install 'softsieve[train]'",
    ]
