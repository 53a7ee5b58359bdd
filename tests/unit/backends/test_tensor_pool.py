"""Memory of large messages, which is reused only when nothing refers to it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

from multiworld.backends.arrivals import Description, allocate
from multiworld.backends.tensor_pool import STEP_BYTES, TensorPool

MIB = 1024 * 1024


def test_forked_child_shares_nothing_with_its_parent() -> None:
    tensor = TensorPool().empty(MIB, torch.uint8)
    tensor.fill_(1)
    pid = os.fork()
    if pid == 0:
        tensor.fill_(2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert bool((tensor == 1).all())


KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "a slice": lambda tensor: tensor[5:7],
    "an array": lambda tensor: tensor.numpy(),
    "a view": lambda tensor: tensor.view(4, -1),
    "its storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_memory_is_used_again_when_the_last_share_is_gone(keeper: str) -> None:
    recycler = TensorPool()
    tensor = recycler.empty(MIB, torch.float32)
    where = tensor.data_ptr()
    kept = KEEPERS[keeper](tensor)
    del tensor
    assert recycler.idle_bytes == 0
    assert recycler.empty(MIB, torch.float32).data_ptr() != where
    del kept
    assert recycler.idle_bytes == 2 * 4 * MIB
    both = [recycler.empty(MIB, torch.float32) for _ in range(2)]
    assert where in {tensor.data_ptr() for tensor in both}


def test_storage_is_exactly_as_long() -> None:
    """Otherwise, a saved tensor would contain earlier content of the block."""
    recycler = TensorPool()
    recycler.empty(2 * MIB, torch.uint8).fill_(7)
    tensor = recycler.empty(MIB + 1, torch.uint8)
    assert tensor.untyped_storage().nbytes() == MIB + 1
    assert int(tensor[0]) == 7  # it is the same memory


def test_little_is_kept() -> None:
    """The pool frees the oldest block first, and returns none that is far too large."""
    recycler = TensorPool(kept_bytes=3 * MIB)
    tensors = [recycler.empty(MIB, torch.uint8) for _ in range(5)]
    tensors.clear()
    assert recycler.idle_bytes == 3 * MIB
    recycler.empty(MIB // 2, torch.uint8)
    assert recycler.idle_bytes <= 3 * MIB
    before = recycler.idle_bytes
    large = recycler.empty(MIB // 2 + 1, torch.uint8)
    assert recycler.idle_bytes == before - MIB
    small = recycler.empty(MIB // 4, torch.uint8)
    assert recycler.idle_bytes == before - MIB
    del large, small


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex128]
)
def test_large_messages_of_every_size_of_element(dtype: torch.dtype) -> None:
    from multiworld.backends.dtypes import CODES

    shape = (3, 5, MIB // 8 + 1)
    count = 3 * 5 * (MIB // 8 + 1)
    found = Description(1, CODES[dtype], shape, count * dtype.itemsize, 0, 0)
    tensor = allocate(found)
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
    tensor.copy_(torch.ones(shape).to(dtype))
    assert torch.equal(tensor.clone(), torch.ones(shape).to(dtype))


def test_threads_never_share_a_block() -> None:
    recycler = TensorPool()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            tensor = recycler.empty(MIB, torch.uint8)
            tensor[::4096] = number
            if not bool((tensor[::4096] == number).all()):
                wrong.append(number)
            del tensor

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    gc.collect()
    assert not wrong
    assert recycler.idle_bytes <= 4 * MIB + STEP_BYTES
