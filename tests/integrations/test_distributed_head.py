"""Heads whose rows are spread over processes answer as the whole would, on every rank the same, and never wait."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from softsieve import AdaptiveSoftmax
from softsieve.data.synthetic_heads import make_head
from softsieve.errors import InputError
from softsieve.heads import LogPartition, TopK
from softsieve.integrations.distributed import ShardedAdaptiveSoftmax, merged, packed
from softsieve.reference.heads import above, logits, topk_softmax
from tests.heads.instances import peaked, right

LIMIT = 60.0  # seconds, for all that a group of processes does
EPS, DELTA = 0.3, 0.1
Found = dict[str, Any]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What `in_three` returns in each of three processes."""
    folder = tmp_path_factory.mktemp("processes")
    context = spawn(worker, (str(folder),), nprocs=3, join=False)  # type: ignore[no-untyped-call]
    end = time.monotonic() + LIMIT
    try:
        while not context.join(max(0.0, end - time.monotonic())):
            assert time.monotonic() < end, f"a process hangs: not done after {LIMIT} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in range(3)]


@pytest.fixture(scope="module")
def pair(processes: list[Found]) -> list[Found]:
    """What `in_pairs` returns in each of two of them."""
    return [processes[0], processes[2]]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name need not lead anywhere
    timeout = timedelta(seconds=LIMIT / 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=timeout)
    torch.save(in_three(rank, Path(folder)), f"{folder}/found{rank}.pt")
    gc.collect()  # what still holds the group would keep its threads alive past the interpreter, which aborts them
    dist.destroy_process_group()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shard(values: Tensor, rank: int, sizes: Sequence[int]) -> Tensor:
    return values[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def said(call: Callable[[], object]) -> tuple[str, str]:
    """The error that a call ends with."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


# -- what processes do -------------------------------------------------------------------------------------------------

THREE = (1, 20, 9)  # rows of the shards
SMALL = (57, 3)
SIZE = 96
KS = (1, 5, 60)  # of which all but the first are more than a shard has
LARGE = (1900, 1100)
HEADS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "auto": {"method": "auto"},  # exact, as long as it is not calibrated
    "coordinates": {"method": "coordinates", "guarantee": "pac"},
    "rotated": {"method": "coordinates", "guarantee": "pac", "rotate": True},
    "noise": {"method": "coordinates", "guarantee": "pac", "noise": 2e3},
    "calibrated": {"method": "coordinates"},
    "dithered": {"method": "cascade", "guarantee": "pac"},
    "bfloat16": {"method": "exact"},
    "float64": {"method": "exact"},
}


def small(name: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """Weight, queries, bias and beta."""
    size = 4096 if HEADS[name].get("guarantee") == "pac" else SIZE  # enough for intervals to decide
    weight, x = peaked(sum(SMALL), size, 100, generator(1))
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(name, torch.float32)
    return weight.to(dtype), x.to(dtype), torch.randn(sum(SMALL), generator=generator(2)).to(dtype), 0.8


def large() -> tuple[Tensor, Tensor, Tensor]:
    """Weight, queries to calibrate with and others."""
    made = make_head(sum(LARGE), 64, rank=16, calibration=600, test=400, seed=3)
    return made.weight.float(), made.calibration, made.test


def mistakes() -> dict[str, tuple[Found, Found]]:
    """Arguments of both ranks that do not go together, or cannot be on one of them."""
    weight, bias = torch.ones(4, 3), torch.ones(4)
    return {
        "weight.shape[1]": ({"weight": weight}, {"weight": torch.ones(4, 2)}),
        "weight.dtype": ({"weight": weight}, {"weight": weight.double()}),
        "bias": ({"weight": weight, "bias": bias}, {"weight": weight}),
        "eps": ({"weight": weight, "eps": 0.2}, {"weight": weight, "eps": 0.3}),
        "delta": ({"weight": weight, "delta": 0.2}, {"weight": weight, "delta": 0.3}),
        "beta": ({"weight": weight}, {"weight": weight, "beta": 2.0}),
        "method": ({"weight": weight, "method": "exact"}, {"weight": weight}),
        "seed": ({"weight": weight}, {"weight": weight, "seed": 1}),
        "no rows": ({"weight": weight}, {"weight": weight[:0]}),
        "infinite": ({"weight": weight / 0}, {"weight": weight}),
        "delta above 1": ({"weight": weight, "delta": 1.2}, {"weight": weight, "delta": 1.2}),
    }


def in_three(rank: int, folder: Path) -> Found:
    """All three in the default group, then the first and the last in one of theirs."""
    weight, x = peaked(sum(THREE), 16, 10, generator(4))
    head = ShardedAdaptiveSoftmax(shard(weight, rank, THREE), method="exact", delta=DELTA)
    found: Found = {"three": (head.topk(x, 12), head.rows, head.head.delta)}
    outer, inner = dist.new_group([0, 2]), dist.new_group([1])
    if rank != 1:
        return found | in_pairs(dist.get_rank(outer), outer, folder)
    alone = ShardedAdaptiveSoftmax(weight, method="exact", group=inner)
    found["alone"] = alone.topk(x, 12), alone.rows
    return found | {"outside": said(lambda: ShardedAdaptiveSoftmax(weight, group=outer))}


def in_pairs(rank: int, group: Any, folder: Path) -> Found:
    """Answers of all kinds of heads, and errors."""
    found: Found = {}
    for name, options in HEADS.items():
        weight, x, bias, beta = small(name)
        own = shard(weight, rank, SMALL), shard(bias, rank, SMALL)
        head = ShardedAdaptiveSoftmax(*own, group=group, eps=EPS, delta=DELTA, beta=beta, **options)
        if name == "calibrated":
            found |= calibrated(head, x[:80], rank)
        g = generator(7)
        found[name] = [head.topk(x[80:], k, generator=g) for k in KS], head.log_partition(x[80:], generator=g)
    found["rows"] = head.rows
    found["shapes"] = head.topk(x[0], 2), head.topk(x[:6].view(3, 2, -1), 2)
    found["above"] = [(head.above(x[:6].view(3, 2, -1), threshold), threshold) for threshold in (-1e9, 0.0, 1.0, 1e9)]
    found["above others"] = said(lambda: head.above(x, float(rank)))
    found["above nothing"] = said(lambda: head.above(x, "0" if rank else 0.0))  # type: ignore[arg-type]
    found["others"] = said(lambda: head.topk(x[: 2 - rank], 2 + 5 * rank))  # messages of the same size
    found["short"] = said(lambda: head.topk(x[:, :5]))
    found["no tensor"] = said(lambda: head.topk([1.0]))  # type: ignore[arg-type]
    found["k"] = said(lambda: head.topk(x, 61))
    for name, arguments in mistakes().items():
        found[name] = said(lambda own=arguments[rank]: ShardedAdaptiveSoftmax(**own, group=group))  # type: ignore[misc]
    ties = ShardedAdaptiveSoftmax(torch.ones(SMALL[rank], 4), group=group, method="exact")
    found["ties"] = ties.topk(torch.ones(2, 4), 59)
    return found | cascade(rank, group, folder / "head") | overflow(rank, group) | collectives(group)


def calibrated(head: ShardedAdaptiveSoftmax, x: Tensor, rank: int) -> Found:
    return {
        "infinite queries": said(lambda: head.calibrate(x / (1 - rank), 0)),
        "fits": head.calibrate(x, [0, *KS], generator=generator()),
        "calibrated for": sorted(head.head.calibrations),
        "not calibrated": said(lambda: head.topk(x, 40)),
    }


def cascade(rank: int, group: Any, folder: Path) -> Found:
    """A cascade: fitted, asked, saved and loaded, and with a weight that changes on one rank."""
    weight, sample, test = large()
    own = shard(weight, rank, LARGE).clone()
    head = ShardedAdaptiveSoftmax(own, group=group, eps=EPS, delta=DELTA, method="cascade")
    found: Found = {"not built": said(lambda: head.topk(test[0]))}
    head.build(sample[:200])
    head.calibrate(sample[200:], [0, 8], generator=generator(rank))
    found["cascade"] = head.topk(test, 8), head.topk(test, 1), head.log_partition(test)
    found["deltas"] = head.delta, head.head.delta, head.head.calibrations[8].delta

    head.save(folder)
    again = ShardedAdaptiveSoftmax.load(folder, group=group)
    found["loaded"] = again.topk(test, 8), again.rows, again.delta
    if rank == 0:
        (folder / "rank-0-of-2.safetensors").unlink()
    found["missing"] = said(lambda: ShardedAdaptiveSoftmax.load(folder, group=group))

    if rank == 1:
        own[5] += 1
    found["changed"] = said(lambda: head.topk(test, 8))
    if rank == 1:
        own[5] -= 1
        head.head.update_rows([5])
    found["changed back"] = head.topk(test[:9], 8)
    return found


def overflow(rank: int, group: Any) -> Found:
    """Logits beyond float32 on the first rank, then others."""
    head = ShardedAdaptiveSoftmax(torch.full((4, 3), 1.0 if rank else 1e30), group=group, method="exact")
    x = torch.ones(2, 3)
    return {
        "overflow": said(lambda: head.topk(x * 1e10)),
        "overflow of log Z": said(lambda: head.log_partition(x * 1e10)),
        "after overflow": head.topk(x, 8),
    }


def collectives(group: Any) -> Found:
    """Those that a question takes, by name."""
    head, x = ShardedAdaptiveSoftmax(torch.ones(4, 3), group=group, method="exact"), torch.ones(2, 3)
    called: list[str] = []

    def counted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: Any, **more: Any) -> object:
            called.append(name)
            return call(*args, **more)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "barrier"):
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        head.topk(x, 3)
        of_topk = called[:]
        head.log_partition(x)
    return {"collectives": [of_topk, called[len(of_topk) :]]}


# -- what they find ----------------------------------------------------------------------------------------------------


def alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def inside(answer: TopK | LogPartition, log_z: Tensor) -> Tensor:
    low, high = answer.log_z_interval.double().unbind(-1)
    return (low - 1e-4 <= log_z) & (log_z <= high + 1e-4)


def fine_normaliser(answer: LogPartition, log_z: Tensor) -> Tensor:
    return inside(answer, log_z) & ((answer.log_z - log_z).expm1().abs() <= EPS + 1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_shards_answer_as_the_whole(pair: list[Found], name: str) -> None:
    weight, x, bias, beta = small(name)
    x = x[80:]
    answers, log_partition = pair[0][name]
    exact = HEADS[name]["method"] in ("exact", "auto")
    for k, answer, other in zip(KS, answers, pair[1][name][0], strict=True):
        alike(answer, other)
        wanted = topk_softmax(weight, x, k, bias, beta=beta)
        dtype = torch.float64 if name == "float64" else torch.float32
        assert {value.dtype for value in answer[1:5]} == {dtype}
        fine = right(answer, weight, x, EPS, bias, beta) & inside(answer, wanted.log_z)
        assert fine.double().mean() >= 1 - DELTA
        assert exact or k > 1 or (~answer.exact).double().mean() > 0.5
        if exact or k == 60:
            assert answer.exact.all()
            rounding = 1e-10 if dtype == torch.float64 else 1e-4
            for field in ("logits", "probs", "log_z"):
                value = getattr(answer, field).double()
                torch.testing.assert_close(value, getattr(wanted, field), rtol=rounding, atol=rounding / 10)
        if exact:
            assert (answer.coordinates == weight.numel()).all()
            assert (answer.bytes_read == weight.numel() * weight.element_size()).all()
    alike(log_partition, pair[1][name][1])
    assert fine_normaliser(log_partition, wanted.log_z).double().mean() >= 1 - DELTA


def test_rows_are_numbered_over_all_ranks(pair: list[Found]) -> None:
    assert [found["rows"] for found in pair] == [(0, 57), (57, 60)]


def test_any_shape_of_queries(pair: list[Found]) -> None:
    weight, x, bias, beta = small("float64")
    for answer, queries in zip(pair[0]["shapes"], (x[0], x[:6].view(3, 2, -1)), strict=True):
        wanted = topk_softmax(weight, queries, 2, bias, beta=beta)
        assert torch.equal(answer.indices, wanted.indices)
        assert answer.log_z.shape == answer.exact.shape == queries.shape[:-1]
        assert answer.log_z_interval.shape == (*queries.shape[:-1], 2)


def test_rows_above_a_threshold(pair: list[Found]) -> None:
    weight, x, bias, beta = small("float64")
    for answers in zip(pair[0]["above"], pair[1]["above"], strict=True):
        (answer, threshold), (other, _) = answers
        alike(answer, other)
        wanted = above(weight, x[:6], threshold, bias, beta=beta)
        assert answer.counts.shape == answer.exact.shape == (3, 2)
        assert [rows.tolist() for rows, _ in answer.per_query()] == [rows for rows, _ in wanted]
        assert answer.bytes_read.eq(weight.nbytes).all()
    for found in pair:
        assert found["above others"][0] == "ValueError"
        assert "x, threshold: expected the same on all ranks, found threshold 0 for" in found["above others"][1]
    assert pair[0]["above nothing"] == ("RuntimeError", "rank 1: TypeError: threshold: expected a number, found str")
    assert pair[1]["above nothing"][0] == "TypeError"


def test_tied_rows_are_different_ones(pair: list[Found]) -> None:
    alike(pair[0]["ties"], pair[1]["ties"])
    assert all(len(set(rows)) == 59 and {*rows} <= {*range(60)} for rows in pair[0]["ties"].indices.tolist())


def test_one_gather_a_question(pair: list[Found]) -> None:
    for found in pair:
        assert found["collectives"] == [["all_gather"], ["all_gather"]]


def test_a_cascade_is_right_as_often_as_promised(pair: list[Found]) -> None:
    weight, _, x = large()
    for k, answer, other in zip((8, 1), pair[0]["cascade"], pair[1]["cascade"], strict=False):
        alike(answer, other)
        fine = right(answer, weight, x, EPS) & inside(answer, logits(weight, x).logsumexp(-1))
        assert answer.indices.shape == (len(x), k)
        assert fine.double().mean() >= 1 - DELTA
        assert (~answer.exact).double().mean() > 0.5
        assert answer.bytes_read.double().mean() < 0.8 * weight.nbytes
    found, truth = pair[0]["cascade"][2], logits(weight, x).logsumexp(-1)
    alike(found, pair[1]["cascade"][2])
    assert fine_normaliser(found, truth).double().mean() >= 1 - DELTA


def test_delta_is_split(pair: list[Found]) -> None:
    for found in pair:
        assert found["deltas"] == (DELTA, DELTA / 2, DELTA / 2)


def test_a_small_shard_calibrates_for_what_it_has(pair: list[Found]) -> None:
    for found, ks in zip(pair, ([0, 1, 5, 57], [0, 1, 3]), strict=True):
        assert found["calibrated for"] == ks
        assert [(fit.queries, fit.delta) for fit in found["fits"]] == [(80, DELTA / 2)] * 4


def test_files(pair: list[Found]) -> None:
    for found, rows in zip(pair, ((0, 1900), (1900, 3000)), strict=True):
        answer, where, delta = found["loaded"]
        # A query that falls back takes the product, which may round otherwise for a weight elsewhere in memory.
        torch.testing.assert_close(tuple(answer), tuple(found["cascade"][0]), rtol=1e-5, atol=1e-5)
        assert (where, delta) == (rows, DELTA)


FAILURES = {  # which ranks fail, with what, and what the others say
    "not built": ((0, 1), "RuntimeError", "not calibrated for k = 1", ""),
    "not calibrated": ((0,), "RuntimeError", "not calibrated for k = 40", "an error on rank 0"),
    "infinite queries": (
        (1,),
        "ValueError",
        "queries: expected finite numbers",
        "rank 1: ValueError: queries: expected finite",
    ),
    "missing": ((0,), "InputError", "rank-0-of-2.safetensors: expected a file", "rank 0: InputError: "),
    "changed": ((1,), "WeightChanged", "rows 5 have changed", "an error on rank 1"),
    "overflow": ((0,), "ValueError", "x: expected logits", "an error on rank 0"),
    "overflow of log Z": ((0,), "ValueError", "x: expected logits", "an error on rank 0"),
    "others": ((0, 1), "ValueError", "found k = 2 for 2 queries, k = 7 for 1 queries", ""),
    "short": ((0, 1), "ValueError", f"x: expected shape (..., {SIZE})", ""),
    "no tensor": ((0, 1), "TypeError", "x: expected a torch.Tensor, found list", ""),
    "k": ((0, 1), "ValueError", "k: expected an int in [1, 60]", ""),
    "no rows": ((1,), "ValueError", "weight: expected a non-empty tensor", "rank 1: ValueError: weight: expected a n"),
    "infinite": ((0,), "ValueError", "weight: expected finite numbers", "rank 0: ValueError: weight: expected finite"),
    "delta above 1": ((0, 1), "ValueError", "delta: expected a number between 0 and 1", ""),
}


@pytest.mark.parametrize("name", FAILURES)
def test_errors_of_a_rank_are_raised_on_all(pair: list[Found], name: str) -> None:
    failing, kind, message, elsewhere = FAILURES[name]
    for rank, found in enumerate(pair):
        error, text = found[name]
        assert error == (kind if rank in failing else "RuntimeError"), text
        assert (message if rank in failing else elsewhere) in text


@pytest.mark.parametrize("name", [name for name in mistakes() if name not in FAILURES])
def test_what_differs_is_refused_on_all_ranks(pair: list[Found], name: str) -> None:
    assert pair[0][name] == pair[1][name]
    assert pair[0][name][0] == "ValueError"
    assert pair[0][name][1].startswith(f"{name}: expected the same on all ranks, found ")


def test_ranks_answer_after_an_error(pair: list[Found]) -> None:
    for found in pair:
        assert sorted(found["after overflow"].indices[0].tolist()) == [*range(8)]
        assert torch.equal(found["changed back"].indices, found["cascade"][0].indices[:9])


def test_three_ranks_and_groups_of_two_and_one(processes: list[Found]) -> None:
    weight, x = peaked(sum(THREE), 16, 10, generator(4))
    wanted = topk_softmax(weight, x, 12).indices
    for found, rows in zip(processes, ((0, 1), (1, 21), (21, 30)), strict=True):
        answer, where, delta = found["three"]
        assert torch.equal(answer.indices, wanted)
        assert (where, delta) == (rows, pytest.approx(DELTA / 3))
    answer, where = processes[1]["alone"]
    assert torch.equal(answer.indices, wanted)
    assert where == (0, 30)
    assert processes[1]["outside"] == ("ValueError", "group: expected one that this process is in, found another")


# -- one process -------------------------------------------------------------------------------------------------------


def test_without_a_group_it_is_a_local_head(tmp_path: Path) -> None:
    weight, x = peaked(300, 40, 120, generator(5))
    head = ShardedAdaptiveSoftmax(weight, method="coordinates", delta=DELTA)
    alone = AdaptiveSoftmax(weight, method="coordinates", delta=DELTA)
    assert (head.rows, head.delta, head.eps) == ((0, 300), DELTA, EPS)
    assert head.calibrate(x[:99], 3).queries == 99
    for one in (head, alone):
        one.calibrate(x[:99], [0, 3], generator=generator())
    alike(head.topk(x[99:], 3, generator=generator()), alone.topk(x[99:], 3, generator=generator()))
    alike(head.log_partition(x[99:], generator=generator()), alone.log_partition(x[99:], generator=generator()))
    head.save(tmp_path)
    again = ShardedAdaptiveSoftmax.load(tmp_path)
    alike(head.topk(x[99:], 3, generator=generator()), again.topk(x[99:], 3, generator=generator()))
    assert "rows 0 to 300 of 300" in repr(again)
    with pytest.raises(InputError, match="rank-0-of-1"):
        ShardedAdaptiveSoftmax.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"k: expected an int in \[0, 300\], found 301"):
        head.calibrate(x, [2, 301])


def test_a_shard_is_saved_without_its_weight(tmp_path: Path) -> None:
    weight, bias = torch.randn(50, 4), torch.randn(50)
    ShardedAdaptiveSoftmax(weight, bias, method="exact").save(tmp_path, weight=False)
    assert (tmp_path / "rank-0-of-1.safetensors").stat().st_size < weight.nbytes + 4000
    loaded = ShardedAdaptiveSoftmax.load(tmp_path, weight=weight, bias=bias)
    assert loaded.head.weight.data_ptr() == weight.data_ptr()
    assert loaded.topk(weight[7]).indices.item() == int((weight @ weight[7] + bias).argmax())
    with pytest.raises(InputError, match="has no weight"):
        ShardedAdaptiveSoftmax.load(tmp_path)
    with pytest.raises(InputError, match="found another"):
        ShardedAdaptiveSoftmax.load(tmp_path, weight=weight + 1, bias=bias)


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[int], int, tuple[int, ...], int]:
    """Sizes, k, shape of the queries and a seed."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    return sizes, draw(st.integers(0, sum(sizes))), tuple(shape), draw(st.integers(0, 999))


@given(shards())
def test_merging(case: tuple[list[int], int, tuple[int, ...], int]) -> None:
    """Shards with exact logits and sums of exponentials that are off by eps at most, many of them tied."""
    sizes, k, shape, seed = case
    g = generator(seed)
    whole = torch.randint(-2, 3, (*shape, sum(sizes)), generator=g).double() * 3
    parts, answers, first = [], [], 0
    for part in torch.split(whole, sizes, -1):
        top = part.topk(min(k, part.shape[-1]), -1)
        error = (torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1) * EPS
        truth = part.logsumexp(-1)
        log_z = truth - error.log1p() if k else truth + error.log1p()
        ends = torch.stack([truth - torch.rand(shape, generator=g), truth + torch.rand(shape, generator=g)], -1)
        entries, read = torch.randint(1 << 50, (2, *shape), generator=g).unbind(0)
        exact = torch.rand(shape, generator=g) < 0.7
        answer = TopK(top.indices, top.values, top.values, log_z, ends, entries, read, exact)
        parts.append(packed(answer, first, k))
        answers.append(answer)
        first += part.shape[-1]

    found = merged(torch.stack(parts), sizes, k, torch.float64)
    assert found.indices.shape == found.probs.shape == (*shape, k)
    assert torch.equal(found.logits, whole.topk(k, -1).values)
    assert torch.equal(whole.gather(-1, found.indices), found.logits)
    assert (found.indices.sort(-1).values.diff(dim=-1) > 0).all()
    total = whole.logsumexp(-1)
    p = (found.logits - total[..., None]).exp()
    assert ((found.probs - p).abs() <= (EPS + 1e-9) * p).all()
    if not k:
        assert ((found.log_z - total).expm1().abs() <= EPS + 1e-9).all()
    low, high = found.log_z_interval.unbind(-1)
    assert ((low <= total + 1e-9) & (total <= high + 1e-9)).all()
    for name in ("coordinates", "bytes_read"):
        assert torch.equal(getattr(found, name), torch.stack([getattr(one, name) for one in answers]).sum(0))
    assert torch.equal(found.exact, torch.stack([one.exact for one in answers]).all(0))
