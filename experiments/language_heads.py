"""What AdaptiveSoftmax reads of the output layer of a language model, and how often it is right: the paper's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.head_methods import spread
from softsieve.comparisons.heads import exact_logits
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError, listed
from softsieve.heads import AdaptiveSoftmax
from softsieve.reference.answers import is_right

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softsieve.integrations.hidden_states import Head

DELTAS = (0.1, 0.05, 0.01)
PAPER = "gain up to 30x for Mistral-7B on WikiText, another model than this"
_AT_A_TIME = 10  # queries between two moves of the bar


def run(
    head: Head,
    *,
    corpora: Sequence[str] = (),
    deltas: Sequence[float] = DELTAS,
    eps: float = 0.3,
    k: int = 1,
    calibration: int = 1000,
    test_queries: int = 200,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> list[dict[str, Any]]:
    """For every corpus a row "calibrated" for each delta, and a row "pac", which fits nothing, for the first of them.

    Args:
        head: a layer with its hidden states.
        corpora: which of its texts; all of them if empty.
        deltas, eps, k: as of `AdaptiveSoftmax`.
        calibration, test_queries: hidden states of each text, at most, spread evenly over its two parts.

    Raises:
        InputError: when the head has no such corpus, or none at all.
    """
    for name in corpora:
        if name not in head.corpora:
            raise InputError(f"corpus: expected one of {listed(head.corpora)}, found {name!r}")
    names = list(corpora or head.corpora)
    if not names:
        raise InputError("queries: expected tensors NAME.calibration and NAME.test, found none")
    weight, bias = head.weight.float(), None if head.bias is None else head.bias.float()
    plan = [("calibrated", delta) for delta in deltas] + [("pac", deltas[0])]
    rows = []
    for name in names:
        calibrating = spread(head.corpora[name].calibration.float(), calibration)
        queries = spread(head.corpora[name].test.float(), test_queries)
        exact = exact_logits(weight, bias, queries, beta=head.beta)
        for guarantee, delta in plan:
            progress(f"{name}, {guarantee}, {delta:.0%}", 0)
            generator = torch.Generator().manual_seed(seed)
            sieve = AdaptiveSoftmax(
                weight, bias, eps=eps, delta=delta, beta=head.beta, method="coordinates", guarantee=guarantee
            )
            if guarantee == "calibrated":
                sieve.calibrate(calibrating, k, generator=generator)
            right, coordinates, full = [], [], []
            for x, logits in zip(torch.split(queries, _AT_A_TIME), torch.split(exact, _AT_A_TIME), strict=True):
                found = sieve.topk(x, k, generator=generator)
                right.append(is_right(found.indices, found.probs, logits, eps=eps))
                coordinates.append(found.coordinates)
                full.append(found.exact)
                progress(f"{name}, {guarantee}, {delta:.0%}", len(x) / (len(queries) * len(plan) * len(names)))
            used = len(calibrating) if guarantee == "calibrated" else 0
            what = {"corpus": name, "guarantee": guarantee, "delta": delta, "k": k, "calibration": used}
            rows.append({**what, **_summary(weight.numel(), *map(torch.cat, (right, coordinates, full)))})
    return rows


def _summary(size: int, right: Tensor, coordinates: Tensor, full: Tensor) -> dict[str, Any]:
    success = float(right.double().mean())
    return {
        "queries": len(right),
        "gain": size / float(coordinates.double().mean()),
        "success": success,
        "success_error": (success * (1 - success) / len(right)) ** 0.5,
        "exact": float(full.double().mean()),
    }


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Gain, and failures beside those that delta allows; a group of bars a corpus."""
    names = list(dict.fromkeys(row["corpus"] for row in rows))
    kinds = list(dict.fromkeys((row["guarantee"], row["delta"]) for row in rows))
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        found = [row for row in rows if (row["guarantee"], row["delta"]) == kind]
        place = [names.index(row["corpus"]) + (number - (len(kinds) - 1) / 2) * width for row in found]
        style = {"width": 0.9 * width, "color": f"C{number}", "label": f"{kind[0]}, delta {kind[1]:.0%}"}
        left.bar(place, [row["gain"] for row in found], **style)
        failures = [100 * (1 - row["success"]) for row in found]
        right.bar(place, failures, yerr=[100 * row["success_error"] for row in found], **style)
        for at in place:
            right.plot([at - width / 2, at + width / 2], [100 * kind[1]] * 2, color="black", lw=1)
    left.axhline(1, color="grey", lw=0.5)
    left.set(ylabel="coordinates of the weight / coordinates read", title="gain")
    right.set(ylabel="wrong answers, %", title="wrong answers; lines: what delta allows")
    for panel in (left, right):
        panel.set_xticks(range(len(names)), names)
    left.legend(fontsize="small")
    figure.suptitle(f"paper: {PAPER}", fontsize="small")
    return figure
