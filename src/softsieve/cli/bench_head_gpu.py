"""`softsieve bench head --device cuda`: the cascade on a GPU against the exact product."""

from __future__ import annotations

from pathlib import Path

from softsieve.cli.errors import one_line

SHAPES = [(128256, 4096), (151936, 1536), (262144, 640)]  # of Llama 3 8B, Qwen 2.5 1.5B and Gemma 3 270M


@one_line()
def run(
    shapes: list[tuple[int, int]],
    files: list[Path],
    rank: int,
    batches: list[int],
    calibration: int,
    test_queries: int,
    eps: float,
    delta: float,
    k: int,
    repeats: int,
    out: Path | None,
) -> None:
    """Measure heads of these shapes or in these files, print a table and write the record."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from softsieve.bench import heads_gpu as suite
    from softsieve.bench.record import write_record
    from softsieve.bench.synthetic_heads import make_head
    from softsieve.errors import InputError
    from softsieve.integrations.head_file import read_head

    if not torch.cuda.is_available():
        raise InputError("--device: expected a CUDA device here, found none")
    console = Console(soft_wrap=True, highlight=False)
    results = []
    chosen = {"batches": batches, "k": k, "eps": eps, "delta": delta, "repeats": repeats}
    for n, d in [] if files else shapes or SHAPES:
        with console.status(f"{n} x {d}, made up, rank {rank}"):
            made = make_head(n, d, rank=rank, calibration=calibration, test=test_queries, device="cuda")
            results += suite.measure(f"made up, rank {rank}", *made, **chosen)  # type: ignore[arg-type]
            del made
            torch.cuda.empty_cache()
    for path in files:
        layer, notes = read_head(path)
        for name, corpus in layer.corpora.items():
            label = f"{notes.get('model', path.name)}, {name}"
            with console.status(label):
                parts = (layer.weight, corpus.calibration[:calibration], corpus.test[:test_queries])
                weight, before, after = (part.cuda() for part in parts)
                results += suite.measure(label, weight, before, after, beta=layer.beta, **chosen)  # type: ignore[arg-type]
    table = Table(title=f"top {k}, eps {eps}, delta {delta}, CUDA graphs, cold caches, median of {repeats}")
    names = (
        "head",
        "weight",
        "batch",
        "method",
        "us (p20-p80)",
        "product",
        "whole",
        "success",
        "exact",
        "bytes",
        "codes",
    )
    for column in (*names, "auto"):
        table.add_column(column, justify="left" if column in ("head", "method", "auto") else "right")
    for r in results:
        ours = r.method == suite.OURS
        table.add_row(
            r.head,
            f"{r.n} x {r.d}",
            str(r.batch),
            r.method,
            f"{r.us:.1f} ({r.us_p20:.1f}-{r.us_p80:.1f})",
            f"{r.over_product:.2f}x",
            f"{r.over_whole:.2f}x",
            f"{r.success:.2%}" if ours else "",
            f"{r.exact:.2%}" if ours else "",
            f"{r.bytes_ratio:.1f}x" if ours else "",
            f"{r.preview}{f', {r.tier}' if r.tier else ''}" if ours else "",
            r.auto if ours else "",
            end_section=ours,
        )
    console.print(table)
    console.print(
        f"product, whole: times faster than {suite.PRODUCT} and {suite.WHOLE}; bytes: of the weight for each one read; "
        "exact: share of queries that read everything; auto: what method='auto' takes when called without a graph"
    )
    if out is not None:
        settings = {**chosen, "rank": rank, "calibration": calibration, "test_queries": test_queries}
        write_record(out, "head-gpu", settings, [r._asdict() for r in results])
        console.print(f"written to {out}")
