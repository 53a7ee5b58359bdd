"""``multiworld tenants`` and ``multiworld audit``: who may use a service, who did."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multiworld.serve.control.client import Service

LIMITS = ("rpm_limit", "max_parallel_requests", "bytes_per_s")


def _part(name: str) -> str:
    """Return a name as a part of an address."""
    return quote(name, safe="")


def create(service: Service, name: str, said: dict[str, Any], *, as_json: bool) -> int:
    """Make a tenant, and show its key, once."""
    found = service.ask("POST", "/tenants", json={"name": name, **said})
    return _show_key(service, found, as_json=as_json)


def rotate(service: Service, name: str, grace_s: float, *, as_json: bool) -> int:
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


def change(service: Service, name: str, said: dict[str, Any], *, as_json: bool) -> int:
    """Change what a tenant may do."""
    found = service.ask("PATCH", f"/tenants/{_part(name)}", json=said)
    return _show([found], as_json=as_json)


def revoke(service: Service, name: str, key: str | None, *, as_json: bool) -> int:
    """Take a key from a tenant, or all of them."""
    found = service.ask("POST", f"/tenants/{_part(name)}/revoke", json={"key": key})
    return _show([found], as_json=as_json)


def delete(service: Service, name: str, *, as_json: bool) -> int:
    """Remove a tenant."""
    found = service.ask("DELETE", f"/tenants/{_part(name)}")
    click.echo(json.dumps(found) if as_json else f"{name} is removed")
    return 0


def listed(service: Service, *, as_json: bool) -> int:
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


def usage(
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


def audit(service: Service, last: int, *, as_json: bool) -> int:
    """Show the last administrative acts."""
    found = service.ask("GET", "/audit", params={"last": last})
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return 0
    table = Table(title="administrative acts", box=SIMPLE)
    for title in ("when", "who", "act", "what", "outcome"):
        table.add_column(title)
    for entry in found:
        what = ", ".join(f"{k}={v}" for k, v in entry["what"].items())
        texts = entry["who"], entry["act"], what, entry["outcome"]
        table.add_row(_when(entry["at"]), *map(escape, texts))
    Console().print(table)
    return 0
