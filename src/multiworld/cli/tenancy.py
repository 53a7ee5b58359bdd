"""The commands about tenants; each imports what it needs when it is called."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from multiworld.cli.serving import JSON, need, of_service, service_of

F = TypeVar("F", bound=Callable[..., Any])
NAME = click.argument("name")
MODULE = "multiworld.cli.tenants"


def _settings(command: F) -> F:
    """Add the options that say what a tenant may do."""
    options = (
        click.option(
            "--model",
            "models",
            multiple=True,
            help="A model that it may use (* and ? stand for any characters); may be "
            "repeated. By default all.",
        ),
        click.option(
            "--rpm-limit",
            type=click.IntRange(0),
            help="Most requests in any minute; 0: no limit.",
        ),
        click.option(
            "--max-parallel-requests",
            type=click.IntRange(0),
            help="Most requests under way at a time; 0: no limit.",
        ),
        click.option(
            "--bytes-per-s",
            type=click.FloatRange(0),
            help="Bytes of requests and answers, in the long run; 0: no limit.",
        ),
        click.option(
            "--weight",
            type=click.FloatRange(1e-6, 1e6),
            help="Of its share where the service is saturated; 1 by default.",
        ),
        click.option(
            "--priority",
            type=click.IntRange(-100, 100),
            help="Requests of a higher one come first, always; 0 by default.",
        ),
        click.option(
            "--operator/--no-operator",
            "is_operator",
            default=None,
            help="Whether it may read /metrics, of all tenants.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _said(options: dict[str, Any]) -> dict[str, Any]:
    """Return what was given; a limit of 0 is none."""
    found = {}
    for name, value in options.items():
        if value is None or value == ():
            continue
        is_limit = name in ("rpm_limit", "max_parallel_requests", "bytes_per_s")
        found[name] = None if is_limit and value == 0 else value
    return found


@click.group()
def tenants() -> None:
    """Make tenants, their keys and limits, and see what they use, while it runs."""


@tenants.command()
@NAME
@_settings
@of_service
@JSON
def create(
    name: str, app: str | None, state: Path | None, as_json: bool, **options: Any
) -> None:
    """Make the tenant NAME, and print its API key: once, it is kept nowhere."""
    module, service = need(MODULE), service_of(app, state)
    sys.exit(module.create(service, name, _said(options), as_json=as_json))


@tenants.command("set")
@NAME
@_settings
@click.option(
    "--suspend/--resume",
    "is_suspended",
    default=None,
    help="Refuse its keys for now, or take them again.",
)
@of_service
@JSON
def change(
    name: str, app: str | None, state: Path | None, as_json: bool, **options: Any
) -> None:
    """Change what the tenant NAME may do; what is not given stays as it is."""
    said = _said(options)
    if not said:
        raise click.UsageError("give an option that says what to change")
    module, service = need(MODULE), service_of(app, state)
    sys.exit(module.change(service, name, said, as_json=as_json))


@tenants.command()
@NAME
@click.option(
    "--grace-s",
    type=click.FloatRange(0, 31_536_000),
    default=0.0,
    show_default=True,
    help="For so long the old keys are taken, too.",
)
@of_service
@JSON
def rotate(
    name: str, grace_s: float, app: str | None, state: Path | None, as_json: bool
) -> None:
    """Print a new key of the tenant NAME; the others end."""
    module, service = need(MODULE), service_of(app, state)
    sys.exit(module.rotate(service, name, grace_s, as_json=as_json))


@tenants.command()
@NAME
@click.option("--key", help="The id of the key (see list); by default all of them.")
@of_service
@JSON
def revoke(
    name: str, key: str | None, app: str | None, state: Path | None, as_json: bool
) -> None:
    """Take a key from the tenant NAME, at once."""
    module, service = need(MODULE), service_of(app, state)
    sys.exit(module.revoke(service, name, key, as_json=as_json))


@tenants.command()
@NAME
@of_service
@JSON
def delete(name: str, app: str | None, state: Path | None, as_json: bool) -> None:
    """Remove the tenant NAME; what it has used stays known."""
    module, service = need(MODULE), service_of(app, state)
    sys.exit(module.delete(service, name, as_json=as_json))


@tenants.command("list")
@of_service
@JSON
def list_(app: str | None, state: Path | None, as_json: bool) -> None:
    """Show all tenants."""
    module, service = need(MODULE), service_of(app, state)
    sys.exit(module.listed(service, as_json=as_json))


@tenants.command()
@click.option("--tenant", help="Of this one; by default of all.")
@click.option(
    "--hours",
    type=click.FloatRange(0),
    help="Of the last so many; by default all that is known.",
)
@click.option("--by-minute", is_flag=True, help="A row for every minute.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@of_service
@JSON
def usage(
    tenant: str | None,
    hours: float | None,
    by_minute: bool,
    as_csv: bool,
    app: str | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Show what was used, by tenant and model; --csv and --json export it."""
    module, service = need(MODULE), service_of(app, state)
    since = 0.0 if hours is None else time.time() - 3600 * hours
    sys.exit(
        module.usage(
            service, tenant, since, by_minute=by_minute, as_csv=as_csv, as_json=as_json
        )
    )


@click.command()
@click.option("-n", "--last", type=click.IntRange(1), default=20, show_default=True)
@of_service
@JSON
def audit(last: int, app: str | None, state: Path | None, as_json: bool) -> None:
    """Show the last administrative acts: who did what, and what came of it."""
    module, service = need(MODULE), service_of(app, state)
    sys.exit(module.audit(service, last, as_json=as_json))


COMMANDS = (tenants, audit)
