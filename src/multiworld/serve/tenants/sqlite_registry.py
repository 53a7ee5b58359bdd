"""A ``TenantRegistry`` in SQLite."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multiworld.errors import ServeError
from multiworld.serve.tenants.directory import Tenant, tenant_from_json
from multiworld.serve.tenants.records import AuditEntry, UsageSum
from multiworld.serve.tenants.usage_rows import FIELDS, MAX_UNCONFIRMED, UsageRow

logger = logging.getLogger("multiworld.serve")

FORMAT = 2  # SQLite's ``user_version``, which is 0 in a new file

SCHEMA = f"""
CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL, who TEXT NOT NULL, act TEXT NOT NULL,
    what TEXT NOT NULL, outcome TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS usage (
    minute INTEGER NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
    {", ".join(f"{name} REAL NOT NULL DEFAULT 0" for name in FIELDS)},
    PRIMARY KEY (minute, tenant, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS told (
    meter TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (meter, number)
) WITHOUT ROWID;
"""

BUSY_S = 5.0  # maximum seconds to wait for a thread or a program that uses the file

# Batch numbers to remember per gateway; a gateway resends fewer batches than this.
KEPT = 4 * MAX_UNCONFIRMED

PUT = "INSERT OR REPLACE INTO tenants VALUES (?, ?)"

ADD = (
    f"INSERT INTO usage VALUES ({', '.join('?' * (3 + len(FIELDS)))}) "
    "ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in FIELDS)
)


class TenantDatabase:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(
                path, check_same_thread=False, isolation_level=None
            )
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_S)}")
            # Write nothing if the format is current, because the disk may be full.
            if self._check_format() != FORMAT:
                self._db.executescript(SCHEMA)
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
        except sqlite3.Error as error:
            raise _unusable(path, error) from error

    def _check_format(self) -> int:
        """Return the format of the file; raise ServeError if it is unknown."""
        found: int
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            self._db.close()
            raise ServeError(
                f"{self._path} has format {found}, and this release reads format "
                f"{FORMAT}; use the release that wrote it"
            )
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=BUSY_S):
            raise ServeError(f"{self._path} is busy; does another program hold it?")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._locked():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:  # SQLite may have ended it by itself
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise ServeError(f"{self._path}: {error}") from error

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            with self._locked():
                return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise _unusable(self._path, error) from error

    def close(self) -> None:
        with self._locked():
            self._db.close()

    # Tenants.

    def tenants(self) -> dict[str, Tenant]:
        rows = self._read("SELECT name, data FROM tenants ORDER BY name")
        found: dict[str, Tenant] = {}
        for name, data in rows:
            try:
                tenant = tenant_from_json(json.loads(data))
            except (ValueError, TypeError) as error:
                logger.error(
                    "%s: tenant %r cannot be read and is skipped, so its keys are "
                    "refused; delete it and create it anew: %s",
                    self._path,
                    name,
                    error,
                )
            else:
                found[tenant.name] = tenant
        return found

    def save(self, tenant: Tenant) -> None:
        data = json.dumps(tenant.to_json())
        with self._transaction() as db:
            db.execute(PUT, (tenant.name, data))

    def delete(self, name: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM tenants WHERE name = ?", (name,))

    # Usage.

    def add_usage(self, meter: str, number: int, rows: Sequence[UsageRow]) -> bool:
        with self._transaction() as db:
            known = db.execute(
                "SELECT 1 FROM told WHERE meter = ? AND number = ?", (meter, number)
            ).fetchone()
            if known is not None:
                return False
            db.executemany(ADD, rows)
            db.execute("INSERT INTO told VALUES (?, ?)", (meter, number))
            db.execute(
                "DELETE FROM told WHERE meter = ? AND number < ?",
                (meter, number - KEPT),
            )
        return True

    def tokens_since(self, minute: int) -> dict[str, int]:
        query = (
            "SELECT tenant, CAST(sum(prompt_tokens + generated_tokens) AS INTEGER) "
            "FROM usage WHERE minute >= ? GROUP BY tenant"
        )
        return dict(self._read(query, (minute,)))

    def forget_meters(self) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM told")

    def usage(
        self, tenant: str | None, since: float, *, by_minute: bool
    ) -> list[UsageSum]:
        minute = "minute" if by_minute else "min(minute)"
        last = "minute" if by_minute else "max(minute)"
        group = "minute, tenant, model" if by_minute else "tenant, model"
        sums = ", ".join(_sum(name) for name in FIELDS)
        query = (
            f"SELECT {minute}, {last}, tenant, model, {sums} FROM usage "
            "WHERE minute >= ?"
            + (" AND tenant = ?" if tenant is not None else "")
            + f" GROUP BY {group} ORDER BY 3, 4, 1"
        )
        values = (since,) if tenant is None else (since, tenant)
        return [UsageSum(*row) for row in self._read(query, values)]

    # Audit.

    def audit(self, who: str, act: str, what: dict[str, Any]) -> int:
        text = json.dumps(what, default=str, ensure_ascii=False)
        # JSON may have surrogates that no encoding accepts.
        text = text.encode(errors="replace").decode()
        entry = time.time(), who, act, text, "begun"
        with self._transaction() as db:
            done = db.execute(
                "INSERT INTO audit (at, who, act, what, outcome) "
                "VALUES (?, ?, ?, ?, ?)",
                entry,
            )
            return done.lastrowid or 0

    def audit_outcome(self, number: int, outcome: str) -> None:
        with self._transaction() as db:
            db.execute(
                "UPDATE audit SET outcome = ? WHERE number = ?", (outcome, number)
            )

    def audited(self, last: int) -> list[AuditEntry]:
        query = (
            "SELECT number, at, who, act, what, outcome FROM audit "
            "ORDER BY number DESC LIMIT ?"
        )
        rows = self._read(query, (last,))
        return [
            AuditEntry(number, at, who, act, json.loads(what), outcome)
            for number, at, who, act, what, outcome in reversed(rows)
        ]


# SQLite errors about the disk, not about the file's content.
OF_DISK = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
}


def _unusable(path: Path, error: sqlite3.Error) -> ServeError:
    what = "repair it, or move it away to start with an empty one"
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in OF_DISK:
        what = "check the disk (is it full?) and start again; keep this file"
    return ServeError(
        f"{path} cannot be used ({error}); it holds tenants, usage and the audit log: "
        f"{what}"
    )


def _sum(name: str) -> str:
    """Return the SQL for the sum of a total; counts become integers again."""
    return f"sum({name})" if name == "seconds" else f"CAST(sum({name}) AS INTEGER)"
