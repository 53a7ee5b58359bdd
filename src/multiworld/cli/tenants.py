"""``multiworld tenants``: manages tenants, keys and limits; shows usage."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import click
import msgspec
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import (
    FiniteRange,
    local_time,
    new_table,
    of_service,
    print_json,
    print_table,
)
from multiworld.serve.controller.answers import (
    KeyShown,
    StatusAnswer,
    TenantRemoved,
    TenantShown,
    TenantWithKey,
    plain,
)
from multiworld.serve.controller.client import Service
from multiworld.serve.tenants.records import UsageSum

F = TypeVar("F", bound=Callable[..., Any])

Settings = dict[str, object]  # settings of a tenant that were given as options

NAME = click.argument("name")
COUNT = click.IntRange(0, 2**53)
# Settings for which 0 means no limit: the type and the help of their options.
LIMITS = {
    "rpm_limit": (COUNT, "Maximum requests in any minute"),
    "max_parallel_requests": (COUNT, "Maximum requests in flight at once"),
    "bytes_per_s": (
        FiniteRange(0),
        "Maximum mean bytes per second of requests and answers",
    ),
    "tpm_limit": (COUNT, "Maximum mean tokens per minute of prompts and completions"),
    "tokens_per_day": (COUNT, "Budget of tokens for each day (UTC)"),
    "tokens_per_month": (COUNT, "Budget of tokens for each month (UTC)"),
}

VALID = click.option(
    "--valid-s",
    type=FiniteRange(0, 3_153_600_000, min_open=True),
    help="Seconds after which the new key expires; by default never.",
)


def _path(name: str) -> str:
    return f"/tenants/{quote(name, safe='', errors='replace')}"


def _show_key(service: Service, found: TenantWithKey, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo(found.key)
        text = f"the key of {found.name}; it is not stored and not shown again: save it"
        click.echo(text, err=True)
    status = service.ask("GET", "/status", StatusAnswer)
    if status.authentication == "none":
        text = (
            "this service also answers requests without a key; to refuse them, write "
            "`authentication: keys` under `gateway:` in its spec"
        )
        click.echo(text, err=True)


def _show(tenants: Sequence[TenantShown], *, as_json: bool) -> None:
    if as_json:
        print_json(tenants)
        return
    count = len(tenants)
    title = f"{count} tenant" if count == 1 else f"{count} tenants"
    table = new_table(title, "tenant", "models")
    for title in ("limits", "weight", "priority", "keys"):
        table.add_column(title)
    for tenant in tenants:
        marks = ["(operator)"] * tenant.is_operator
        words = f": {tenant.suspension}" if tenant.suspension else ""
        marks += [f"(suspended{words})"] * tenant.is_suspended
        table.add_row(
            escape("\n".join([tenant.name, *marks])),
            escape("\n".join(tenant.models)),
            "\n".join(_limits(tenant)) or "none",
            f"{tenant.weight:g}",
            str(tenant.priority),
            "\n".join(map(_key, tenant.keys)) or "none",
        )
    print_table(table)


def _limits(tenant: TenantShown) -> list[str]:
    named = ((name, getattr(tenant, name)) for name in LIMITS)
    return [f"{name} {value:,.10g}" for name, value in named if value is not None]


def _key(key: KeyShown) -> str:
    end = key.expires_at
    if end is None:
        return key.id
    left_s = end - time.time()
    return f"{key.id} ({'expired' if left_s <= 0 else f'{left_s:.0f} s left'})"


def _csv(rows: Sequence[UsageSum]) -> str:
    out = io.StringIO()
    if rows:
        writer = csv.writer(out)
        writer.writerow(UsageSum.__struct_fields__)
        writer.writerows(map(msgspec.structs.astuple, rows))
    return out.getvalue()


def _usage_table(rows: Sequence[UsageSum], *, by_minute: bool) -> Table:
    names = ("minute", "tenant", "model") if by_minute else ("tenant", "model")
    table = new_table("usage", *names)
    titles = (
        "sent",
        "answered",
        "failed",
        "refused",
        "rows",
        "tokens (prompt + output)",
        "MB",
        "mean ms",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        mean_s = row.seconds / row.answered if row.answered else 0.0
        table.add_row(
            *([local_time(row.first_minute)] if by_minute else []),
            escape(row.tenant or "(no key)"),
            escape(row.model or "-"),
            *map(str, (row.requests, row.answered, row.failed, row.refused, row.rows)),
            f"{row.prompt_tokens:,} + {row.generated_tokens:,}",
            f"{(row.bytes_in + row.bytes_out) / 1e6:.2f}",
            f"{mean_s * 1000:.1f}",
        )
    return table


def _settings(command: F) -> F:
    """Add the options for the settings of a tenant."""
    options = (
        click.option(
            "--model",
            "models",
            multiple=True,
            help="Model that the tenant may use (* and ? are wildcards); may be "
            "repeated. By default all.",
        ),
        *(
            click.option(
                f"--{name.replace('_', '-')}", type=kind, help=f"{text}; 0: no limit."
            )
            for name, (kind, text) in LIMITS.items()
        ),
        click.option(
            "--weight",
            type=FiniteRange(1e-6, 1e6),
            help="Share of a saturated service, relative to others; 1 by default.",
        ),
        click.option(
            "--priority",
            type=click.IntRange(-100, 100),
            help="Higher priorities are always served first; 0 by default.",
        ),
        click.option(
            "--operator/--no-operator",
            "is_operator",
            default=None,
            help="Allow the tenant to read /metrics, which cover all tenants.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _said(options: Settings) -> Settings:
    """Return the given options; a limit of 0 becomes None."""
    found: Settings = {}
    for name, value in options.items():
        if value is None or value == ():
            continue
        found[name] = None if name in LIMITS and value == 0 else value
    return found


@click.group()
def tenants() -> None:
    """Manage tenants, their keys and limits; show their usage.

    Changes take effect at once in the running service.
    """


@tenants.command()
@NAME
@_settings
@VALID
@of_service
def create(
    service: Service, name: str, valid_s: float | None, as_json: bool, **options: object
) -> None:
    """Create the tenant NAME, and print its API key.

    The key is not stored and not shown again.
    """
    said = {"name": name, "valid_s": valid_s, **_said(options)}
    found = service.ask("POST", "/tenants", TenantWithKey, json=said)
    _show_key(service, found, as_json=as_json)


@tenants.command("set")
@NAME
@_settings
@click.option(
    "--suspend/--resume",
    "is_suspended",
    default=None,
    help="Refuse the keys of the tenant for now, or accept them again.",
)
@click.option(
    "--because",
    "suspension",
    metavar="TEXT",
    help="With --suspend: the reason, which clients of the tenant see.",
)
@of_service
def change(service: Service, name: str, as_json: bool, **options: object) -> None:
    """Change settings of the tenant NAME.

    Omitted settings stay unchanged.
    """
    said = _said(options)
    if "suspension" in said and not said.get("is_suspended"):
        raise click.UsageError(
            "--because says why a tenant is suspended; add --suspend"
        )
    if "is_suspended" in said:  # drop the reason of an earlier suspension
        said.setdefault("suspension", "")
    if not said:
        raise click.UsageError(
            "give at least one setting to change, such as --weight 2"
        )
    found = service.ask("PATCH", _path(name), TenantShown, json=said)
    _show([found], as_json=as_json)


@tenants.command()
@NAME
@click.option(
    "--grace-s",
    type=FiniteRange(0, 31_536_000),
    default=0.0,
    help="Seconds for which the old keys stay valid.",
)
@VALID
@of_service
def rotate(
    service: Service, name: str, grace_s: float, valid_s: float | None, as_json: bool
) -> None:
    """Give the tenant NAME a new key, and print that key.

    The other keys expire at once, or after --grace-s.
    """
    said = {"grace_s": grace_s, "valid_s": valid_s}
    found = service.ask("POST", f"{_path(name)}/rotate", TenantWithKey, json=said)
    _show_key(service, found, as_json=as_json)


@tenants.command()
@NAME
@click.option("--key", help="Id of the key (see list); by default all keys.")
@of_service
def revoke(service: Service, name: str, key: str | None, as_json: bool) -> None:
    """Revoke one key of the tenant NAME, or all.

    The keys become invalid at once.
    """
    said = {"key": key}
    found = service.ask("POST", f"{_path(name)}/revoke", TenantShown, json=said)
    _show([found], as_json=as_json)


@tenants.command()
@NAME
@of_service
def delete(service: Service, name: str, as_json: bool) -> None:
    """Remove the tenant NAME; its usage is kept."""
    found = service.ask("DELETE", _path(name), TenantRemoved)
    click.echo(json.dumps(plain(found)) if as_json else f"removed tenant {name}")


@tenants.command("list")
@of_service
def list_(service: Service, as_json: bool) -> None:
    """Show all tenants with their limits and keys."""
    _show(service.ask("GET", "/tenants", list[TenantShown]), as_json=as_json)


@tenants.command()
@click.option("--tenant", help="Tenant whose usage to show; by default all.")
@click.option(
    "--hours",
    type=FiniteRange(0),
    help="Show this many hours up to now; by default everything recorded.",
)
@click.option("--by-minute", is_flag=True, help="Show a row for every minute.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@of_service
def usage(
    service: Service,
    tenant: str | None,
    hours: float | None,
    by_minute: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Show usage by tenant and model.

    --csv and --json export the usage.
    """
    since = 0.0 if hours is None else time.time() - 3600 * hours
    params: dict[str, str | float | bool] = {"since": since, "by_minute": by_minute}
    if tenant is not None:
        params["tenant"] = tenant
    rows = service.ask("GET", "/usage", list[UsageSum], params=params)
    if as_json:
        print_json(rows)
    elif as_csv:
        click.echo(_csv(rows), nl=False)
    else:
        print_table(_usage_table(rows, by_minute=by_minute))
