"""Compiles the kernels of the cascade for a GPU that need not be there; a script, because tests interpret them."""

from __future__ import annotations

import inspect
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from softsieve.kernels import cascade_answers_triton as answers
from softsieve.kernels import cascade_stages_triton as stages
from softsieve.kernels import exact_triton as exact

POINTERS = {
    "*bf16": ("x", "weight", "projection"),
    "*i64": ("probes", "whole", "totals"),
    "*i32": ("count", "counts", "done", "arrivals", "rows", "unusual", "states", "best"),
    "*i8": ("records", "probe_records", "probe_codes", "digits"),
    "*u8": ("spreads", "probe_spreads", "tier_spreads"),
}
FLOATS = {"scale", "beta", "step", "tier_step", "correction", "width", "floor", "low", "high", "doubt", "tolerance"}
FLOATS |= {"interval", "least", "most", "bend", "least_signal", "toward_low", "toward_high", "survivors", "flattest"}
FLOATS |= {"below"}
WHOLE = {
    "size",
    "extended",
    "longest",
    "length",
    "many",
    "stride",
    "code_stride",
    "x_stride",
    "weight_stride",
    "n",
    "blocks",
    "parts",
}
WHOLE |= {"batch", "tier", "item", "read", "entries", "code_bytes"}


def kind(name: str) -> str:
    for found, names in POINTERS.items():
        if name in names:
            return found
    return "fp32" if name in FLOATS else "i32" if name in WHOLE else "*fp32"


def compiled(kernel: Any, **constants: Any) -> None:
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(kernel.__name__, constants)  # noqa: T201


def main() -> None:
    for tier in (False, True):
        few = {"K": 8, "PARTS": 128, "CAPACITY": 1024, "EARLY": True}
        rows = {"BIASED": tier, "ROWS": 1, "SIZE": 4096}
        compiled(
            stages.measure_errors,
            **rows,
            CODED=False,
            BASED=tier,
            TIER=tier,
            WIDTH=128 if tier else 64,
            PACKED=64 if tier else 0,
            LONGEST=128 if tier else 64,
            PROBES=64,
            EARLY=True,
        )
        compiled(answers.read_finalists, **few, **rows, DENSE=tier, QUERIES=8 if tier else 1)
        asked = {"K": 8 if tier else 1, "ALL": not tier, "ROWS": 128, "EARLY": True}
        queries = {"QUERIES": 64 if tier else 16, "SIZE": 64}
        last = {"LAST": tier, "BLOCKS": 2048}
        compiled(exact.multiply_rows, **asked, **queries, **last, BIASED=tier, DENSE=tier, LIMITED=tier)
        compiled(exact.sum_up, **asked, BLOCKS=2048)
        choice = {"K": 8 if tier else 1, "GROUPED": tier, "DENSE": tier, "UPPER": not tier}
        compiled(stages.select_survivors, **choice, BLOCKS=256, GROUPS=1024, CHOICE=2048, CAPACITY=1024, EARLY=True)
        compiled(
            stages.preview_rows, WIDTH=256 if tier else 24, PACKED=128 if tier else 0, SOME=128 if tier else 32,
            LANES=16, QUERIES=8 if tier else 1, GROUPED=tier, BASED=tier, WORDS=tier, EARLY=True,
        )  # fmt: skip
        compiled(stages.read_refined, **few, **rows, DENSE=tier, UPPER=not tier)
    compiled(answers.estimate_log_z, **few)
    compiled(stages.refine_survivors, BASED=True, SOME=64, ROWS=16, CAPACITY=1024, EARLY=True)


if __name__ == "__main__":
    main()
