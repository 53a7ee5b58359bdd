"""``multiworld tenants``: tenants, their keys and limits, what they use. Shell."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import JSON, of_service, service_of
from multiworld.serve.control.client import Service

F = TypeVar("F", bound=Callable[..., Any])

NAME = click.argument("name")
LIMITS = ("rpm_limit", "max_parallel_requests", "bytes_per_s")


def _part(name: str) -> str:
    """Return a name as a part of an address."""
    return quote(name, safe="")


def _create(service: Service, name: str, said: dict[str, Any], *, as_json: bool) -> int:
    """Make a tenant, and show its key, once."""
    found = service.ask("POST", "/tenants", json={"name": name, **said})
    return _show_key(service, found, as_json=as_json)


def _rotate(service: Service, name: str, grace_s: float, *, as_json: bool) -> int:
    """Give a tenant a new key, and show it, once."""
    found = service.ask(
        "POST", f"/tenants/{_part(name)}/rotate", json={"grace_s": grace_s}
    )
    return _show_key(service, found, as_json=as_json)


def _show_key(service: Service, found: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(found["key"])
        text = f"the key of {found['name']}; it is kept nowhere, so keep it now"
        click.echo(text, err=True)
    status = service.ask("GET", "/status")
    if status["authentication"] == "none":
        text = (
            "this service also answers without a key; write `authentication: keys` "
            "under `gateway:` in its spec to change that"
        )
        click.echo(text, err=True)
    return 0


def _change(service: Service, name: str, said: dict[str, Any], *, as_json: bool) -> int:
    """Change what a tenant may do."""
    found = service.ask("PATCH", f"/tenants/{_part(name)}", json=said)
    return _show([found], as_json=as_json)


def _revoke(service: Service, name: str, key: str | None, *, as_json: bool) -> int:
    """Take a key from a tenant, or all of them."""
    found = service.ask("POST", f"/tenants/{_part(name)}/revoke", json={"key": key})
    return _show([found], as_json=as_json)


def _delete(service: Service, name: str, *, as_json: bool) -> int:
    """Remove a tenant."""
    found = service.ask("DELETE", f"/tenants/{_part(name)}")
    click.echo(json.dumps(found) if as_json else f"{name} is removed")
    return 0


def _listed(service: Service, *, as_json: bool) -> int:
    """Show all tenants."""
    return _show(service.ask("GET", "/tenants"), as_json=as_json)


def _show(tenants: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps(tenants, indent=2))
        return 0
    table = Table(title=f"{len(tenants)} tenants", box=SIMPLE)
    for title in ("tenant", "models", "limits", "weight", "priority", "keys"):
        table.add_column(title)
    for tenant in tenants:
        limits = [f"{n} {tenant[n]:g}" for n in LIMITS if tenant[n] is not None]
        marks = [m for m in ("operator", "suspended") if tenant[f"is_{m}"]]
        table.add_row(
            " ".join([tenant["name"], *(f"({mark})" for mark in marks)]),
            escape(", ".join(tenant["models"])),
            "\n".join(limits) or "none",
            f"{tenant['weight']:g}",
            str(tenant["priority"]),
            "\n".join(map(_key, tenant["keys"])) or "none",
        )
    Console().print(table)
    return 0


def _key(key: dict[str, Any]) -> str:
    end = key["expires_at"]
    if end is None:
        return str(key["id"])
    left_s = end - time.time()
    return f"{key['id']} ({'expired' if left_s <= 0 else f'{left_s:.0f} s left'})"


def _usage(
    service: Service,
    tenant: str | None,
    since: float,
    *,
    by_minute: bool,
    as_csv: bool,
    as_json: bool,
) -> int:
    """Show what was used."""
    params: dict[str, Any] = {"since": since, "by_minute": by_minute}
    if tenant is not None:
        params["tenant"] = tenant
    rows = service.ask("GET", "/usage", params=params)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif as_csv:
        click.echo(_csv(rows), nl=False)
    else:
        Console().print(_usage_table(rows, by_minute=by_minute))
    return 0


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def _usage_table(rows: Sequence[dict[str, Any]], *, by_minute: bool) -> Table:
    table = Table(title="usage", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("minute", "tenant", "model") if by_minute else ("tenant", "model"):
        table.add_column(title)
    for title in ("sent", "answered", "failed", "refused", "rows", "MB", "mean ms"):
        table.add_column(title, justify="right")
    for row in rows:
        mean_s = row["seconds"] / row["answered"] if row["answered"] else 0.0
        table.add_row(
            *([_when(row["first_minute"])] if by_minute else []),
            escape(row["tenant"] or "(no key)"),
            escape(row["model"] or "-"),
            *(str(row[n]) for n in ("requests", "answered", "failed", "refused")),
            str(row["rows"]),
            f"{(row['bytes_in'] + row['bytes_out']) / 1e6:.2f}",
            f"{mean_s * 1000:.1f}",
        )
    return table


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


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
    service = service_of(app, state)
    sys.exit(_create(service, name, _said(options), as_json=as_json))


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
    service = service_of(app, state)
    sys.exit(_change(service, name, said, as_json=as_json))


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
    service = service_of(app, state)
    sys.exit(_rotate(service, name, grace_s, as_json=as_json))


@tenants.command()
@NAME
@click.option("--key", help="The id of the key (see list); by default all of them.")
@of_service
@JSON
def revoke(
    name: str, key: str | None, app: str | None, state: Path | None, as_json: bool
) -> None:
    """Take a key from the tenant NAME, at once."""
    service = service_of(app, state)
    sys.exit(_revoke(service, name, key, as_json=as_json))


@tenants.command()
@NAME
@of_service
@JSON
def delete(name: str, app: str | None, state: Path | None, as_json: bool) -> None:
    """Remove the tenant NAME; what it has used stays known."""
    service = service_of(app, state)
    sys.exit(_delete(service, name, as_json=as_json))


@tenants.command("list")
@of_service
@JSON
def list_(app: str | None, state: Path | None, as_json: bool) -> None:
    """Show all tenants."""
    service = service_of(app, state)
    sys.exit(_listed(service, as_json=as_json))


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
    service = service_of(app, state)
    since = 0.0 if hours is None else time.time() - 3600 * hours
    sys.exit(
        _usage(
            service, tenant, since, by_minute=by_minute, as_csv=as_csv, as_json=as_json
        )
    )
