"""Names that the doctests of docstrings and README find without importing them."""

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    import torch

    torch.set_printoptions(profile="default")
    doctest_namespace["torch"] = torch
