"""Registration of a world's group with ``torch.distributed``: for ``group=``,
functional collectives, DeviceMesh and DTensor."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from multiworld.backends import torch_names

# First made-up global rank: above every rank of a default group, and within 32 bits. No
# made-up rank is used twice, because DeviceMesh compares meshes by global ranks alone
# and would otherwise send on another world's group. For itself, this process uses its
# rank in the default group, by which a mesh finds this process's position.
FIRST_ID = 1 << 20

_ids = itertools.count(FIRST_ID)
_names = itertools.count(1)
_lock = threading.Lock()
_meshes: dict[str, list[weakref.ref[Any]]] = {}


def _ensure_default_group() -> None:
    """Make a private default group of size 1 if there is none; torch needs one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def register(
    backend: Any,
    store: Store,
    rank: int,
    size: int,
    *,
    world: str,
    device: torch.device,
    name: str,
) -> ProcessGroup:
    """Return a group around the native ``backend`` that torch's functions accept."""
    with _lock:
        _ensure_default_group()
        group_name = f"multiworld:{next(_names)}:{world}"
        ids = [next(_ids) for _ in range(size)]
        ids[rank] = dist.get_rank()
        group = torch_names.register_group(
            backend, name, store, rank, name=group_name, device=device, ids=ids
        )
        _meshes[group_name] = []
        return group


def unregister(group: ProcessGroup) -> None:
    """Remove a group from ``torch.distributed``; safe to repeat."""
    with _lock:
        for reference in _meshes.pop(group.group_name, []):
            mesh = reference()
            if mesh is not None:
                torch_names.empty_mesh(mesh)
        torch_names.forget_group(group)


def mesh_of(group: ProcessGroup, device: torch.device, dim_name: str) -> DeviceMesh:
    """Return a mesh over a group, which it keeps alive until ``unregister``."""
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(dim_name,))
    with _lock:
        _meshes[group.group_name].append(weakref.ref(mesh))
    return mesh
