"""Requests in preparation, as operators see them."""

from __future__ import annotations

import contextlib

from multiworld.serve.gateway.http.preparations import Preparations
from multiworld.serve.wire.control_messages import ModelLoad, TenantLoad


def test_requests_count_until_they_are_prepared() -> None:
    now = 10.0
    known = Preparations(lambda: now)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(known.preparing("a", "m"))
        now = 12.0
        for tenant, model in (("a", "m"), ("b", "n")):
            stack.enter_context(known.preparing(tenant, model))
        first.is_compiling = True
        now = 15.0
        assert len(known) == 3
        assert known.of_tenants() == {
            "a": TenantLoad(2, 2, 1, 0),
            "b": TenantLoad(1, 1, 0, 0),
        }
        assert known.of_models() == {"m": ModelLoad(2, 0, 1), "n": ModelLoad(1, 0, 0)}
        assert known.oldest_s() == {"m": 5.0, "n": 3.0}
    assert not len(known)
    assert not any((known.of_tenants(), known.of_models(), known.oldest_s()))
