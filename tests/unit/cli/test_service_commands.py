"""Commands for a running service that need no service."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from multiworld.cli.logs import logs
from multiworld.cli.main import cli
from multiworld.errors import ServeError
from multiworld.serve.control.answers import ShuttingDown
from multiworld.serve.control.client import Service
from multiworld.serve.fleet.record import Record, StateFolder
from multiworld.serve.spec.loader import parse_spec

LOGS = (
    *("shop-0-2", "shop-1-3", "shop-1-0-4", "shop-eu-0-5", "gateway-1"),
    *("launcher", "launcher-12ab34cd", "store"),
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("shop", ["shop-0-2", "shop-1-3"]),
        ("shop/1", ["shop-1-3"]),
        ("shop/1/3", ["shop-1-3"]),
        ("shop-1", ["shop-1-0-4"]),
        ("shop-1/0/4", ["shop-1-0-4"]),
        ("gateway", ["gateway-1"]),
        ("launcher", ["launcher-12ab34cd", "launcher"]),
        ("store", ["store"]),
    ],
)
def test_logs_of_models_with_similar_names_are_apart(
    tmp_path: Path, name: str, found: list[str]
) -> None:
    """A model may be named like another one and a number, or more words."""
    folder = StateFolder(tmp_path)
    folder.make()
    for stem in LOGS:
        (folder.logs / f"{stem}.log").write_text(f"of {stem}\n" * 3)
    done = CliRunner().invoke(logs, [name, "--state", str(tmp_path), "-n", "1"])
    shown = [line for line in done.output.splitlines() if line.startswith("of ")]
    assert shown == [f"of {stem}" for stem in found]


def test_refusal_of_a_shutdown_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is not a controller that hangs, and to be killed."""

    def refuse(*_: object, **__: object) -> None:
        error = ServeError("the audit log cannot be written")
        error.__dict__["status"] = 503
        raise error

    app = parse_spec("models: {m: {factory: a:b, stages: [{}]}}")
    StateFolder(tmp_path).make()
    StateFolder(tmp_path).save(Record(app=app, specs={}, active={}))
    monkeypatch.setattr(Service, "ask", refuse)
    done = CliRunner().invoke(cli, ["shutdown", "--state", str(tmp_path)])
    assert done.exit_code == 1
    assert isinstance(done.exception, ServeError | SystemExit | click.ClickException)
    assert "audit log cannot be written" in f"{done.output} {done.exception}"
    assert "kill it" not in done.output


def test_shutdown_ends_a_service_that_has_started_nothing_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for machines: it has no record, but a controller that answers."""
    monkeypatch.setenv("MULTIWORLD_STATE", str(tmp_path))
    folder = StateFolder(tmp_path / "shop")
    folder.make()
    lock = folder.lock()

    def answer(service: Service, *_: object, **__: object) -> ShuttingDown:
        assert service.folder.path == folder.path
        os.close(lock)  # as its exit does
        return ShuttingDown("shop")

    monkeypatch.setattr(Service, "ask", answer)
    done = CliRunner().invoke(cli, ["shutdown"])
    assert done.output == "shop has ended\n"
    assert done.exit_code == 0
    again = CliRunner().invoke(cli, ["shutdown", "--app", "shop"])
    assert "no service runs in" in str(again.output)
    assert again.exit_code == 1
