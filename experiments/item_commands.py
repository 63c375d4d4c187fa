"""The command of the next-item recommender."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.command_parts import results_option, say
from softsieve.cli.head_bench import Threads, set_threads
from softsieve.cli.progress import watched
from softsieve.comparisons.output import beside, write_results, write_table


def next_item(
    data: Annotated[Path, typer.Option(help='lines "USER ITEM", a user\'s together and in order; may be .gz or .xz')],
    loss: Annotated[
        list[str], typer.Option(help="logits: cross-entropy that holds them; a delta: without them, 1 is the same loss")
    ] = ["logits", "1", "0.1"],  # noqa: B006
    grid: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="deltas of which validation chooses one more loss; several")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each loss")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="of each run; test is at the best by validation")] = 3,
    lr: Annotated[
        list[float], typer.Option(help="of AdamW; of several, validation chooses with the first loss and one seed")
    ] = [3e-3],  # noqa: B006
    batch: Annotated[int, typer.Option(min=1, help="users in a step")] = 128,
    size: Annotated[int, typer.Option(min=1, help="of states and of the embedding of an item")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="of the transformer")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="of its attention")] = 2,
    length: Annotated[int, typer.Option(min=1, help="items that it reads, the most recent")] = 50,
    dropout: Annotated[float, typer.Option(help="of the transformer")] = 0.2,
    weight_decay: Annotated[float, typer.Option(help="of AdamW")] = 0.01,
    exclude_seen: Annotated[bool, typer.Option(help="do not rank what the user took before")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    precision: Annotated[str, typer.Option(help="no or bf16, by autocast")] = "no",
    serve: Annotated[
        bool, typer.Option(help="ask the model of the first seed through AdaptiveSoftmax, on the CPU")
    ] = True,
    threads: Threads = None,
    side_by_side: Annotated[int, typer.Option(min=1, help="runs at a time, each a process; 1 for times of record")] = 1,
    out: Annotated[Path, results_option("next-item")] = Path("next-item"),
) -> None:
    """A recommender of the next item, trained with all logits and without them, judged over all items, and served.

    HR@10 and NDCG@10 rank the right item among all; none is left out unless --exclude-seen is given. Each run is
    written to OUT.runs when it is done; started again, the command makes only what is missing. All runs are in
    OUT.json, what serving takes in OUT.serving.csv.
    """
    with watched(out) as progress:
        from experiments import next_item as suite
        from softsieve._records import write_record
        from softsieve.errors import InputError

        set_threads(threads)
        if not loss or not lr:
            raise InputError(f"{'lr' if loss else 'loss'}: expected at least one, found none")
        shared: dict[str, Any] = {
            "epochs": epochs,
            "batch": batch,
            "size": size,
            "layers": layers,
            "heads": heads,
            "length": length,
            "dropout": dropout,
            "weight_decay": weight_decay,
            "exclude_seen": exclude_seen,
            "device": device,
            "precision": precision,
        }

        def plan(name: str, seed: int, rate: float) -> suite.Job:
            served = serve and seed == 0
            return suite.Job(str(data), name, seed=seed, learning_rate=rate, serve=served, **shared)

        def made(jobs: list[suite.Job]) -> list[suite.Run]:
            return suite.make(jobs, out, side_by_side=side_by_side, progress=progress)

        rates = made([plan(loss[0], 0, rate) for rate in dict.fromkeys(lr)])
        rate = suite.choose(rates)["learning_rate"]
        trials = made([plan(f"{delta:g}", 0, rate) for delta in dict.fromkeys(grid)]) if grid else []
        chosen = [suite.choose(trials)["loss"]] if trials else []
        jobs = [plan(name, seed, rate) for seed in range(seeds) for name in dict.fromkeys([*loss, *chosen])]
        runs = made(jobs)
        rows, served = suite.summarise(runs), suite.serving_rows(runs)
        tried = [{name: run[name] for name in ("loss", "learning_rate", "validation")} for run in (*rates, *trials)]
        counts = {name: runs[0][name] for name in ("users", "asked", "items", "parameters")}
        about = {
            "data": data.name,
            **counts,
            **shared,
            "learning_rate": rate,
            "seeds": seeds,
            "side_by_side": side_by_side,
        }
        write_results(out, "next-item", {**about, "tried": tried}, rows, suite.draw(runs))
        write_record(beside(out, ".json"), "next-item", {**about, "tried": tried, "summary": rows}, runs)
        if served:
            write_table(beside(out, ".serving.csv"), {"experiment": "next-item, serving", **about}, served)
    say(out, [suite.shown(row) for row in rows], more=[".json", *([".serving.csv"] if served else [])])
