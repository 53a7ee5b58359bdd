"""Lending a world's group to ``torch.distributed``.

``register`` makes functions with ``group=``, functional collectives, DeviceMesh and
DTensor accept the group; ``unregister`` takes that back. The recipe's two traps:

DeviceMesh compares meshes by their ranks alone, so the ids of two worlds' members must
differ or one world's traffic goes out on the other; ids are therefore never used
twice in a process. Only this process's own id is its rank in the default group, because
a mesh finds its own place by it.

Meshes keep groups alive; those made by ``mesh_of`` are emptied with their world.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

FIRST_ID = 1 << 20
"""Beyond any rank of a default group, and within DeviceMesh's 32 bits."""

_ids = itertools.count(FIRST_ID)
_names = itertools.count(1)
_lock = threading.Lock()
_meshes: dict[str, list[weakref.ref[Any]]] = {}


def _ensure_default_group() -> None:
    """torch's functions need a default group: a private one of size 1 will do."""
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
    """Return ``backend`` as a group that torch's functions accept."""
    kinds = ProcessGroup.BackendType
    kind = {"gloo": kinds.GLOO, "nccl": kinds.NCCL}.get(name, kinds.CUSTOM)
    with _lock:
        _ensure_default_group()
        group_name: Any = f"multiworld:{next(_names)}:{world}"
        group = ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device.type), kind, backend)
        group._set_group_name(group_name)
        group._set_group_desc(group_name)
        ids = [next(_ids) for _ in range(size)]
        ids[rank] = dist.get_rank()
        c10d._register_pg_in_world(
            group,
            name,
            store,
            group_name,
            f"{device.type}:{name}",
            rank_mapping={global_id: index for index, global_id in enumerate(ids)},
        )
        _meshes[group_name] = []
        return group


def unregister(group: ProcessGroup) -> None:
    """Take a group back; safe to repeat."""
    with _lock:
        for reference in _meshes.pop(group.group_name, []):
            mesh = reference()
            if mesh is not None:
                mesh._pg_registry.clear()
        if group not in c10d._world.pg_map:
            return
        tag = c10d._world.pg_to_tag.get(group)
        try:
            dist.destroy_process_group(group)
        finally:
            if tag is not None and not c10d._world.tags_to_pg.get(tag):
                c10d._world.tags_to_pg.pop(tag, None)


def mesh_of(group: ProcessGroup, device: torch.device, dim_name: str) -> DeviceMesh:
    """Return a mesh over a registered group, emptied when the group goes."""
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(dim_name,))
    with _lock:
        _meshes[group.group_name].append(weakref.ref(mesh))
    return mesh
