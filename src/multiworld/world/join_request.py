"""Arguments of a join: their defaults and their checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from multiworld.config import WorldConfig, is_int, is_unicode
from multiworld.errors import ConfigError
from multiworld.rendezvous.store_address import StoreAddresses, parse_store
from multiworld.rendezvous.store_messages import MAX_NAME, MAX_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Arguments of a join; kept for ``reform`` and ``grow``."""

    name: str
    rank: int
    size: int
    where: StoreAddresses
    backend: str
    config: WorldConfig
    device: torch.device

    def terms(self) -> str:
        """Return the options that all members must agree on, in words."""
        terms = f"backend {self.backend}, host_p2p {self.config.host_p2p}"
        # Members must list the stores in the same order: otherwise two stores could
        # assign the same epoch.
        several = len(self.where.stores) > 1
        return f"{terms}, stores {self.where}" if several else terms


def request_of(
    name: str,
    rank: int | None,
    size: int | None,
    store: str | None,
    backend: str,
    config: WorldConfig,
    device: torch.device | str,
) -> JoinRequest:
    """Return the checked arguments of a join, with defaults from the environment."""
    request = JoinRequest(
        name=name,
        rank=_number("rank", rank, "RANK"),
        size=_number("size", size, "WORLD_SIZE"),
        where=parse_store(default_store(os.environ) if store is None else store),
        backend=backend,
        config=config,
        device=_device_of(device),
    )
    _check(request)
    return request


def default_store(environment: Mapping[str, str]) -> str:
    """Return the address of the store that the environment names."""
    if store := environment.get("MULTIWORLD_STORE"):
        return store
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            "store",
            None,
            "give store=, or set MULTIWORLD_STORE (or MASTER_ADDR and MASTER_PORT) in "
            "the environment",
        )
    # Under torchrun, torchrun's own store listens on that port, so use the next one.
    is_taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{int(port) + is_taken}"


def _number(field: str, value: int | None, variable: str) -> int:
    if value is not None:
        return value
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise ConfigError(
            field, text or None, f"give {field}=, or set {variable} in the environment"
        )
    return int(text)


def _device_of(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        if found.type == "cuda" and found.index is None and torch.cuda.is_available():
            # A communicator belongs to one GPU, so use this thread's current GPU, as
            # torch does.
            return torch.device("cuda", torch.cuda.current_device())
        return found
    except (RuntimeError, TypeError) as error:
        rule = "give a torch device, such as 'cpu'"
        raise ConfigError("device", device, rule) from error


def _check(request: JoinRequest) -> None:
    name, rank, size = request.name, request.rank, request.size
    if not isinstance(name, str) or not name:
        raise ConfigError("name", name, "give a non-empty str")
    if len(name) > MAX_NAME:
        rule = f"give at most {MAX_NAME} characters"
        raise ConfigError("name", f"{name[:20]}...", rule)
    if not is_unicode(name):
        raise ConfigError("name", name, "give Unicode text, without lone surrogates")
    if not is_int(size) or not 1 <= size <= MAX_SIZE:
        raise ConfigError("size", size, f"give an int from 1 to {MAX_SIZE}")
    if not is_int(rank) or not 0 <= rank < size:
        rule = f"give an int from 0 to {size - 1}: the world has size {size}"
        raise ConfigError("rank", rank, rule)
    if not isinstance(request.config, WorldConfig):
        rule = "give a multiworld.WorldConfig, such as WorldConfig(join_s=30)"
        raise ConfigError("config", request.config, rule)
    backend, device = request.backend, request.device
    if (backend == "memory") != request.where.is_local:
        raise ConfigError(
            "store",
            str(request.where),
            "backend 'memory' needs memory://NAME, all others tcp://HOST:PORT",
        )
    if backend in ("direct", "memory", "gloo") and device.type != "cpu":
        raise ConfigError(
            "device", str(device), f"backend {backend!r} carries tensors on 'cpu' only"
        )
    if backend not in ("direct", "memory"):
        from multiworld.backends.c10d.backend import check_backend

        check_backend(backend, device)
