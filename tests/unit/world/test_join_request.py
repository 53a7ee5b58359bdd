"""Arguments of a join: defaults from the environment, and values that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld import ConfigError, WorldConfig
from multiworld.rendezvous.store_messages import MAX_NAME
from multiworld.world.join_request import (
    JoinRequest,
    default_store,
    request_of,
)

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MULTIWORLD_STORE",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def request(**changes: Any) -> JoinRequest:
    """Check the arguments of an ordinary join, with some changed."""
    ordinary: dict[str, Any] = {
        "name": "w",
        "rank": 0,
        "size": 2,
        "store": "memory://unit",
        "backend": "memory",
        "config": WorldConfig(),
        "device": "cpu",
    }
    return request_of(**{**ordinary, **changes})


MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**MASTER, "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("environment", "store"),
    [
        ({"MULTIWORLD_STORE": "tcp://h:1"}, "tcp://h:1"),
        ({"MULTIWORLD_STORE": "tcp://h:1", **TORCHRUN}, "tcp://h:1"),
        ({"MULTIWORLD_STORE": "", **MASTER}, "tcp://10.0.0.1:29500"),
        (MASTER, "tcp://10.0.0.1:29500"),
        (TORCHRUN, "tcp://10.0.0.1:29501"),
        (
            {**MASTER, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            "tcp://10.0.0.1:29500",
        ),
        ({"MASTER_ADDR": "::1", "MASTER_PORT": "5"}, "tcp://[::1]:5"),
        (
            {"MASTER_ADDR": "node-3.cluster", "MASTER_PORT": "5"},
            "tcp://node-3.cluster:5",
        ),
    ],
)
def test_store_comes_from_the_environment(
    environment: dict[str, str], store: str
) -> None:
    """Our own variable takes precedence; torchrun's store occupies the port itself."""
    assert default_store(environment) == store


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MULTIWORLD_STORE": ""},
        {"MASTER_ADDR": "h"},
        {"MASTER_PORT": "5"},
        {"MASTER_ADDR": "", "MASTER_PORT": "5"},
        {"MASTER_ADDR": "h", "MASTER_PORT": ""},
        {"MASTER_ADDR": "h", "MASTER_PORT": "http"},
        {"MASTER_ADDR": "h", "MASTER_PORT": "-1"},
        {"MASTER_ADDR": "h", "MASTER_PORT": "29500.0"},
        {"TORCHELASTIC_USE_AGENT_STORE": "True"},
    ],
)
def test_environment_that_names_no_store_is_refused(
    environment: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match="MULTIWORLD_STORE"):
        default_store(environment)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "65535"])
def test_port_out_of_range_is_refused(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's store has the port itself, and the highest port has no next one."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    if port == "0":
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(ConfigError):
        request(store=None, backend="direct")


@pytest.mark.parametrize(
    ("environment", "given", "found"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, {}, (1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, {"rank": 0}, (0, 4)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, {"size": 2}, (1, 2)),
        ({"RANK": "bad", "WORLD_SIZE": ""}, {"rank": 0, "size": 3}, (0, 3)),
        ({}, {"rank": 0, "size": 1}, (0, 1)),
    ],
)
def test_rank_and_size_come_from_the_environment(
    environment: dict[str, str],
    given: dict[str, int],
    found: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An argument takes precedence, even over a variable that is nonsense."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = request(**{"rank": None, "size": None, **given})
    assert (made.rank, made.size) == found


@pytest.mark.parametrize(
    ("environment", "field", "said"),
    [
        ({"WORLD_SIZE": "2"}, "rank", "set RANK"),
        ({"RANK": "0"}, "size", "set WORLD_SIZE"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "rank", "set RANK"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "rank", "first"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank", "-1"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "size", "two"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "size", "from 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank", "0 to 1"),
    ],
)
def test_missing_or_wrong_variable_is_named(
    environment: dict[str, str],
    field: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said) as refused:
        request(rank=None, size=None)
    assert field in str(refused.value)


@settings(deadline=None)
@given(st.text(st.characters(categories=["Nd", "No"]), min_size=1, max_size=3))
def test_digits_of_any_alphabet_are_numbers_or_refused(text: str) -> None:
    try:
        default_store({"MASTER_ADDR": "h", "MASTER_PORT": text})
    except ConfigError:
        return


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": None},
        {"name": "x" * (MAX_NAME + 1)},
        {"size": 0},
        {"size": 1 << 20},
        {"size": 2.0},
        {"size": "2"},
        {"rank": -1},
        {"rank": 2},
        {"rank": "0"},
        {"config": {"join_s": 3}},
        {"config": {}},
        {"device": None},
        {"device": 3.5},
        {"device": "no such device"},
        {"device": "cuda"},
        {"store": "memory://"},
        {"store": "http://h:1"},
        {"store": 5},
        {"store": "tcp://h:1"},
        {"backend": "direct"},
        {"backend": "gloo"},
        {"backend": "no_such_backend", "store": "tcp://h:1"},
        {"backend": "gloo", "store": "tcp://h:1", "device": "meta"},
    ],
    ids=str,
)
def test_wrong_argument_is_a_config_error(changes: dict[str, Any]) -> None:
    """It is found before anything is opened."""
    with pytest.raises(ConfigError):
        request(**changes)


def test_longest_name_and_largest_world_pass() -> None:
    made = request(name="x" * MAX_NAME, size=65_536, rank=65_535)
    assert (len(made.name), made.rank) == (MAX_NAME, 65_535)


def test_terms_are_what_members_must_agree_on() -> None:
    """The order of several stores counts; rank, size and a single store do not."""
    tcp = {"backend": "direct", "store": "tcp://a:1"}
    assert request(**tcp).terms() == request(**{**tcp, "store": "tcp://b:2"}).terms()
    assert request(rank=1).terms() == request(size=9).terms()
    both = request(**{**tcp, "store": "tcp://a:1,tcp://b:2"}).terms()
    assert both != request(**{**tcp, "store": "tcp://b:2,tcp://a:1"}).terms()
    assert request().terms() != request(**tcp).terms()
    own = WorldConfig(host_p2p="backend")
    assert request().terms() != request(config=own).terms()


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", True), ("size", True), ("name", "w\ud800"), ("name", "\udc80")],
)
def test_what_only_looks_like_a_value_is_refused(field: str, value: Any) -> None:
    """A bool is no rank, and a lone surrogate is no text that a message can carry."""
    with pytest.raises(ConfigError) as caught:
        request(**{field: value})
    assert caught.value.field == field
