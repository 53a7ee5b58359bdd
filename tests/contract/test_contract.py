"""The contract of the backends, run on every one of them."""

from __future__ import annotations

import asyncio
import warnings

import pytest
import uvloop

from multiworld import Security, Tls, WorldConfig
from multiworld.rendezvous.membership import Address
from multiworld.testing import Arena, no_leaks
from tests.contract.backends import CHECKS, Check

SECRET = b"a secret long enough to be one"

VARIANTS = {
    "memory": ("memory", WorldConfig(join_s=20)),
    "memory-rendezvous": ("memory", WorldConfig(join_s=20, eager_bytes=0)),
    "direct": ("direct", WorldConfig(join_s=20)),
    "direct-checksums": ("direct", WorldConfig(join_s=20, payload_checksum=True)),
    "direct-sockets": ("direct", WorldConfig(join_s=20, shared_memory_bytes=0)),
    "direct-tcp": ("direct", WorldConfig(join_s=20)),
    "direct-secret": ("direct", WorldConfig(join_s=20)),
    "direct-tls": ("direct", WorldConfig(join_s=20)),
    "direct-tls-tcp": ("direct", WorldConfig(join_s=20)),
    "gloo": ("gloo", WorldConfig(join_s=20)),
    "gloo-own-p2p": ("gloo", WorldConfig(join_s=20, host_p2p="backend")),
}


HEAVY = ("direct-tls", "direct-checksums", "direct-secret")
"""Variants that run with the heavy tests only: others cover them well enough."""


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[pytest.mark.heavy] if name in HEAVY else [])
        for name in VARIANTS
    ],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract_on_every_backend(
    check: Check, variant: str, monkeypatch: pytest.MonkeyPatch, tls: Tls
) -> None:
    backend, config = VARIANTS[variant]
    if variant.endswith("-tcp"):  # connect as two hosts would
        monkeypatch.setattr(Address, "is_on", lambda self, host: False)
    security = Security(
        secret=SECRET if "secret" in variant else b"",
        tls=tls if "tls" in variant else None,
    )
    async with (
        no_leaks(allow=("asyncio_",)),
        Arena(backend, config, security) as arena,
    ):
        await check(arena)


@pytest.mark.parametrize("backend", ["memory", "direct", "gloo"])
def test_contract_under_uvloop(backend: str) -> None:
    """uvloop does not call the reader of a connection that was reset."""

    async def all_checks() -> None:
        for check in CHECKS:
            if check.__name__ == "closing_fails_our_own_sends":
                continue
            async with Arena(backend) as arena:
                await check(arena)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # uvloop's own
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(all_checks())
