"""Collation of several requests' rows into a batch, and the split of its outputs."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import Tensor

from multiworld.errors import InvalidRequestError, ModelFailedError, ServeError
from multiworld.serve.replica.batches.batch_queue import Work
from multiworld.serve.replica.batches.executor import Executor
from multiworld.serve.spec.stage import Stage, StageContext, Tensors
from multiworld.serve.wire.collation import (
    collate,
    group_of,
    lengths_of,
    rows_of,
    split,
)

RAGGED = {"ids": -1, "out": 0.0}


def ids(*lengths: int) -> list[Tensors]:
    return [{"ids": torch.arange(n).reshape(1, n) + 1} for n in lengths]


def test_ragged_rows_are_padded_to_the_longest_and_cut_again() -> None:
    requests = ids(2, 4, 3)
    batch = collate(requests, RAGGED, ())
    assert batch["ids"].tolist() == [[1, 2, -1, -1], [1, 2, 3, 4], [1, 2, 3, -1]]
    lengths = [lengths_of(r, RAGGED) for r in requests]
    outputs = {"out": batch["ids"] * 2, "sum": batch["ids"].sum(1)}
    shares = split(outputs, [1, 1, 1], lengths, RAGGED, "s")
    assert [s["out"].tolist() for s in shares] == [
        [[2, 4]],
        [[2, 4, 6, 8]],
        [[2, 4, 6]],
    ]
    assert [s["sum"].shape for s in shares] == [(1,), (1,), (1,)]


def test_few_bytes_are_not_padded_to_many() -> None:
    """A tensor without elements may have any length."""
    request = {"x": torch.ones(1, 1), "z": torch.empty(1, 10**9, 0)}
    assert collate([request], {"x": 0.0, "z": 0.0}, ())["x"].shape == (1, 1)
    assert collate([{"x": torch.ones(1, 0)}], {"x": 0.0}, ())["x"].shape == (1, 0)
    long = {"x": torch.ones(1, 4000)}
    short = [{"x": torch.ones(1, 1)}] * 31
    assert collate([long, *short], {"x": 0.0}, ())["x"].shape == (32, 4000)


def test_buckets_are_lengths_to_pad_to() -> None:
    """Rows that are longer than every bucket keep their length."""
    assert collate(ids(3, 5), RAGGED, (4, 8))["ids"].shape == (2, 8)
    assert collate(ids(9), RAGGED, (4, 8))["ids"].shape == (1, 9)


def test_groups_differ_in_names_dtypes_and_fixed_dimensions() -> None:
    a, b = ids(2, 7)
    assert group_of(a, RAGGED) == group_of(b, RAGGED)
    assert group_of(a, {}) != group_of(b, {})
    wider = {"ids": torch.zeros(1, 2, 3, dtype=torch.int64)}
    assert group_of(a, RAGGED) != group_of(wider, RAGGED)
    assert group_of(a, RAGGED) != group_of({"ids": a["ids"].float()}, RAGGED)


@pytest.mark.parametrize(
    "tensors",
    [{}, {"a": torch.tensor(1)}, {"a": torch.zeros(2), "b": torch.zeros(3)}],
)
def test_rows_must_agree(tensors: Tensors) -> None:
    with pytest.raises(InvalidRequestError, match="number of rows"):
        rows_of(tensors)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (None, "returned a NoneType"),
        ({}, "returned a dict"),
        ({"y": [1, 2]}, "a list for 'y'"),
        ({"y": torch.zeros(3)}, "with 2 rows"),
        ({"y": torch.tensor(1.0)}, "with 2 rows"),
        ({"y": torch.zeros(2, device="meta")}, "output 'y' is on meta"),
        ({"y": torch.ones(2).to_sparse()}, "torch.sparse_coo; send a dense tensor"),
    ],
)
def test_outputs_that_are_no_rows_are_the_models_fault(
    outputs: Tensors, words: str
) -> None:
    with pytest.raises(ModelFailedError, match=words):
        split(outputs, [1, 1], [{}, {}], {}, "s")


def work(number: int, value: float) -> Work:
    content = {"x": torch.tensor([[value]])}
    return Work(("r", number, 1), "g", 1, 1e9, 0.0, content=content)


async def run(function: object, values: list[float]) -> list[Tensors | ServeError]:
    runner = Executor(Stage(load=lambda context: function), "s", 1)  # type: ignore[arg-type,return-value]
    await runner.load(StageContext())
    try:
        return await runner.run([work(n, v) for n, v in enumerate(values)])
    finally:
        runner.close()


async def test_bad_row_fails_its_row_only() -> None:
    def stage(tensors: Tensors) -> Tensors:
        if (tensors["x"] < 0).any():
            raise ValueError("a negative one")
        return {"y": tensors["x"].sqrt()}

    good, bad, also_good = await run(stage, [4.0, -1.0, 9.0])
    assert isinstance(good, dict)
    assert isinstance(also_good, dict)
    assert (good["y"].item(), also_good["y"].item()) == (2.0, 3.0)
    assert isinstance(bad, ModelFailedError)
    assert "ValueError: a negative one" in str(bad)


async def test_input_that_the_model_refuses_is_a_client_error() -> None:
    def stage(tensors: Tensors) -> Tensors:
        raise InvalidRequestError("too long")

    (refused,) = await run(stage, [1.0])
    assert isinstance(refused, InvalidRequestError)
    assert refused.status == 400


async def test_models_run_off_the_loop_without_gradients() -> None:
    """The event loop also runs the process's worlds."""
    grads: list[bool] = []

    def stage(tensors: Tensors) -> Tensors:
        loop.call_soon_threadsafe(has_begun.set)
        assert gate.wait(20), "the loop stands still while the model computes"
        grads.append(torch.is_grad_enabled())
        return tensors

    loop = asyncio.get_running_loop()
    has_begun, gate = asyncio.Event(), threading.Event()
    running = asyncio.ensure_future(run(stage, [1.0]))
    await has_begun.wait()
    gate.set()
    (result,) = await running
    assert grads == [False]
    assert isinstance(result["x"], Tensor)  # type: ignore[index]


def test_ragged_inputs_are_padded_each_to_its_own_length() -> None:
    ragged = {"question": 0.0, "document": 0.0}
    one = {"question": torch.ones(1, 2), "document": torch.ones(1, 6)}
    other = {"question": torch.ones(1, 3), "document": torch.ones(1, 4)}
    batch = collate([one, other], ragged, ())
    assert {n: t.shape[1] for n, t in batch.items()} == {"question": 3, "document": 6}
    lengths = [lengths_of(r, ragged) for r in (one, other)]
    shares = split(batch, [1, 1], lengths, ragged, "s")
    assert [t.shape[1] for t in shares[0].values()] == [2, 6]
    assert [t.shape[1] for t in shares[1].values()] == [3, 4]


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()]
)
async def test_whatever_a_model_raises_fails_its_request(error: BaseException) -> None:
    """Otherwise it would end one replica after the other."""

    def stage(tensors: Tensors) -> Tensors:
        if (tensors["x"] < 0).any():
            raise error
        return tensors

    good, bad = await run(stage, [4.0, -1.0])
    assert isinstance(good, dict)
    assert isinstance(bad, ModelFailedError)
    assert type(error).__name__ in str(bad)


class NamelessError(Exception):
    """Error whose text cannot be shown."""

    def __str__(self) -> str:
        raise IndexError


async def test_error_that_cannot_be_shown_is_one_all_the_same() -> None:
    def stage(tensors: Tensors) -> Tensors:
        raise NamelessError

    (bad,) = await run(stage, [1.0])
    assert isinstance(bad, ModelFailedError)
    assert "raised NamelessError: (its text cannot be shown)" in str(bad)


async def test_few_of_many_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Clients may cause any number, of any length."""

    def stage(tensors: Tensors) -> Tensors:
        raise ValueError("x" * 10**6)

    await run(stage, [1.0] * 50)
    (record,) = caplog.records
    assert len(record.getMessage()) < 10_000


async def test_bad_row_is_found_by_halving() -> None:
    calls: list[int] = []

    def stage(tensors: Tensors) -> Tensors:
        calls.append(len(tensors["x"]))
        if (tensors["x"] < 0).any():
            raise ValueError("a negative one")
        return tensors

    values = [1.0] * 32
    values[11] = -1.0
    found = await run(stage, values)
    assert [n for n, f in enumerate(found) if isinstance(f, ServeError)] == [11]
    assert len(calls) <= 11


async def test_outputs_are_not_those_of_the_next_batch() -> None:
    """A stage may reuse its memory."""
    kept = torch.zeros(1, 1)

    def stage(tensors: Tensors) -> Tensors:
        return {"y": kept.copy_(tensors["x"])}

    runner = Executor(Stage(load=lambda context: stage), "s", 1)
    await runner.load(StageContext())
    try:
        (first,) = await runner.run([work(1, 1.0)])
        await runner.run([work(2, 2.0)])
    finally:
        runner.close()
    assert isinstance(first, dict)
    assert first["y"].item() == 1.0


async def test_batch_that_fails_on_the_loop_is_repeated_as_it_came() -> None:
    """The stage may have changed it in place."""

    def stage(tensors: Tensors) -> Tensors:
        tensors["x"].mul_(2)
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("only in its own thread")
        return {"y": tensors["x"]}

    runner = Executor(Stage(load=lambda context: stage), "s", 1)
    await runner.load(StageContext())
    batch = [work(1, 3.0)]
    try:
        assert runner.run_here(batch) is None
        (found,) = await runner.run(batch)
    finally:
        runner.close()
    assert isinstance(found, dict)
    assert found["y"].item() == 6.0


def test_ragged_output_without_a_ragged_input_is_whole() -> None:
    """There is nothing to cut it back to."""
    outputs = {"wave": torch.ones(1, 5)}
    (share,) = split(outputs, [1], [lengths_of({}, {"wave": 0.0})], {"wave": 0.0}, "s")
    assert share["wave"].shape == (1, 5)
