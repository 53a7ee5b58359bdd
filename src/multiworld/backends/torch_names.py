"""Private names of torch that multiworld uses; no other module uses them. torch may
rename them in any release, so ``check`` looks them up before they are used."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed import ProcessGroup, Store

from multiworld.errors import TorchVersionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# First and last minor release of torch that have all of ``NAMES``.
OLDEST, NEWEST = (2, 11), (2, 15)
# The same range, as the version specifier of ``pyproject.toml``.
WORKS = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
# Features that need private names of torch. ``c10d`` stands for every world on a torch
# backend.
Use = Literal["c10d", "gloo", "nccl", "tracing"]

_C10D = "torch._C._distributed_c10d"
_PYTHON = "torch.distributed.distributed_c10d"
_GROUP = "torch.distributed.ProcessGroup"

# The private names that each feature needs. A name may end in an attribute that its
# class only annotates.
NAMES: dict[Use, tuple[str, ...]] = {
    "c10d": (
        f"{_C10D}.AllgatherOptions",
        f"{_GROUP}._set_default_backend",
        f"{_GROUP}._register_backend",
        f"{_GROUP}._set_group_name",
        f"{_GROUP}._set_group_desc",
        f"{_PYTHON}._register_process_group",
        f"{_PYTHON}._unregister_process_group",
        f"{_PYTHON}._world.pg_map",
        f"{_PYTHON}._world.pg_names",
        f"{_PYTHON}._world.pg_backend_config",
        f"{_PYTHON}._world.pg_group_ranks",
        f"{_PYTHON}._world.pg_coalesce_state",
        f"{_PYTHON}._world.pg_to_tag",
        f"{_PYTHON}._world.tags_to_pg",
        "torch.distributed.Backend._plugins",
        "torch.distributed.device_mesh.DeviceMesh._pg_registry",
    ),
    "gloo": (
        f"{_C10D}.ProcessGroupGloo._Options._devices",
        f"{_C10D}.ProcessGroupGloo._Options._threads",
        f"{_C10D}.ProcessGroupGloo._Options._timeout",
        f"{_C10D}.ProcessGroupGloo._set_default_timeout",
        f"{_C10D}.ProcessGroupGloo.create_device",
    ),
    "nccl": (
        f"{_C10D}.ProcessGroupNCCL.Options._timeout",
        f"{_C10D}.ProcessGroupNCCL.Options.config",
        f"{_C10D}.ProcessGroupNCCL.eager_connect_single_device",
        f"{_C10D}.ProcessGroupNCCL.abort",
        f"{_C10D}.ProcessGroupNCCL.shutdown",
    ),
    "tracing": (
        "torch._dynamo.mark_dynamic",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
    ),
}


def is_tested(version: str) -> bool:
    parts = version.split(".")[:2]
    minor = tuple(int(part) for part in parts if part.isdigit())
    return OLDEST <= minor <= NEWEST


@functools.cache
def missing(use: Use) -> tuple[str, ...]:
    """Return the names needed for ``use`` that this torch lacks."""
    return tuple(name for name in NAMES[use] if not _has(name))


def check(use: Use) -> None:
    """Check that this torch has every name needed for ``use``."""
    if names := missing(use):
        raise TorchVersionError(
            f"torch {torch.__version__} lacks {', '.join(names)}, which multiworld "
            f"needs for {use}; install a torch that has it: pip install 'torch{WORKS}'",
            missing=names,
            installed=str(torch.__version__),
            works=WORKS,
        )


def _has(name: str) -> bool:
    try:
        _resolve(name)
    except (ImportError, AttributeError):
        return False
    return True


def _resolve(name: str) -> Any:
    """Return the object of a dotted name: modules first, then attributes."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], start=2):
        if isinstance(found, type) and part in inspect.get_annotations(found):
            return None  # only instances have this attribute
        if not hasattr(found, part) and hasattr(found, "__path__"):
            found = importlib.import_module(".".join(parts[:end]))
        else:
            found = getattr(found, part)
    return found


# Registration of a group with torch.distributed.


def register_group(
    native: Any,
    backend: str,
    store: Store,
    rank: int,
    *,
    name: str,
    device: torch.device,
    ids: Sequence[int],  # global ranks of the members, by rank
) -> ProcessGroup:
    """Return a group around a native group, registered with ``torch.distributed``."""
    from torch.distributed import distributed_c10d

    kinds = ProcessGroup.BackendType
    kind = {"gloo": kinds.GLOO, "nccl": kinds.NCCL}.get(backend, kinds.CUSTOM)
    group_name: Any = name
    group = ProcessGroup(store, rank, len(ids))
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, native)
    group._set_group_name(group_name)
    group._set_group_desc(group_name)
    # The following does what torch's ``_register_pg_in_world`` does, which 2.11 lacks.
    world = distributed_c10d._world
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = group_name
    world.pg_backend_config[group] = f"{device.type}:{backend}"
    distributed_c10d._register_process_group(group_name, group)
    world.pg_group_ranks[group] = {each: index for index, each in enumerate(ids)}
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    return group


def forget_group(group: ProcessGroup) -> None:
    """Undo ``register_group``; safe to repeat.

    This does not call ``destroy_process_group``, which waits for the work of an NCCL
    group; that work may wait for a lost member. The owner frees the group in a thread.
    """
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    if group not in world.pg_map:
        return
    tables: tuple[Any, ...] = (
        world.pg_map,
        world.pg_names,
        world.pg_backend_config,
        world.pg_group_ranks,
        world.pg_coalesce_state,
    )
    for table in tables:
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for name in (tag or "", ""):  # a group of torch's own also has the empty tag
        groups = world.tags_to_pg.get(name, [])
        if group in groups:
            groups.remove(group)
        if name and not groups:
            world.tags_to_pg.pop(name, None)
    distributed_c10d._unregister_process_group(group.group_name)


def empty_mesh(mesh: DeviceMesh) -> None:
    """Drop the groups that a mesh keeps alive."""
    mesh._pg_registry.clear()


# Native groups.


def plugins() -> Mapping[str, Any]:
    """Return the backends registered with torch, by their names in capitals."""
    from torch.distributed import Backend

    return Backend._plugins


def all_gather_options() -> Any:
    return _resolve(f"{_C10D}.AllgatherOptions")()


def new_gloo(
    store: Store, rank: int, size: int, *, host: str, connect_s: float, timeout_s: float
) -> Any:
    """Return a Gloo group bound to ``host``, on a device of its own; blocks."""
    gloo = _resolve(f"{_C10D}.ProcessGroupGloo")
    options = gloo._Options()
    try:
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._threads = 1
        options._timeout = timedelta(seconds=connect_s)
        group = gloo(store, rank, size, options)
        group._set_default_timeout(timedelta(seconds=timeout_s))
    finally:
        # A stored traceback would keep the device alive: a thread and four descriptors.
        del options
    return group


def nccl_class() -> Any:
    return _resolve(f"{_C10D}.ProcessGroupNCCL")


def nccl_options(timeout_s: float) -> Any:
    """Return options of a non-blocking NCCL group."""
    options = nccl_class().Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    return options


# Tracing of models.


def fake_mode() -> Any:
    """Return a new mode in which new tensors are fake: they use no memory."""
    return _resolve("torch._subclasses.fake_tensor.FakeTensorMode")()


def mode_of(tensor: torch.Tensor) -> Any:
    """Return the mode that a fake tensor was made in; None for a real tensor."""
    kind = _resolve("torch._subclasses.fake_tensor.FakeTensor")
    return tensor.fake_mode if isinstance(tensor, kind) else None


def mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Let a dimension have any size in a traced graph."""
    _resolve("torch._dynamo.mark_dynamic")(tensor, dimension)
