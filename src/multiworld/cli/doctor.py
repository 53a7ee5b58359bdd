"""``multiworld doctor``: checks the installation, and proposes remedies."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table

Status = Literal["ok", "warn", "fail"]
STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}

LOOPBACK_S = 15.0

NEXT_PYTHON = (3, 14)  # first Python release that the tests have not run with


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    status: Status
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run all checks; stop after the first ones if torch is missing."""
    findings = [_python(), _platform(), _package(), _torch()]
    if findings[-1].status == "fail":
        return findings
    findings += [_torch_names(), *_backends(), _devices()]
    findings += [_bfloat16(), _compiled()]
    findings += [_helper(), *_addresses()]
    findings.append(_loopback("direct"))
    import torch.distributed as dist

    if dist.is_gloo_available():
        findings.append(_loopback("gloo"))
    return findings


def report(findings: list[Finding]) -> None:
    table = Table(show_lines=False)
    for column in ("", "what", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = f"[{STYLES[finding.status]}]{finding.status}[/]"
        table.add_row(mark, finding.subject, finding.found)
    console = Console()
    console.print(table)
    for finding in findings:
        if finding.remedy:
            style = STYLES[finding.status]
            console.print(f"[{style}]{finding.subject}[/]: {finding.remedy}")


def _python() -> Finding:
    found = platform.python_version()
    if sys.version_info >= NEXT_PYTHON:
        tested = f"3.11 to 3.{NEXT_PYTHON[1] - 1}"
        return Finding("Python", "warn", found, f"tested with Python {tested}")
    return Finding("Python", "ok", found)


def _platform() -> Finding:
    found = f"{platform.system()} {platform.release()}"
    if platform.system() != "Linux":
        return Finding("system", "fail", found, "multiworld needs Linux")
    return Finding("system", "ok", found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package() -> Finding:
    ours = _version("multiworld-elastic")
    old = _version("multiworld")
    if old is not None:
        return Finding(
            "multiworld",
            "warn",
            f"multiworld-elastic {ours} beside multiworld {old}",
            "the old prototype has the same import name: pip uninstall multiworld, "
            "then reinstall multiworld-elastic",
        )
    if ours is None:
        return Finding("multiworld", "warn", "not installed as a package")
    return Finding("multiworld", "ok", f"multiworld-elastic {ours}")


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "fail", str(error), "pip install torch")
    from multiworld.backends.torch_names import WORKS, is_tested

    found = torch.__version__
    if not is_tested(found):
        return Finding("torch", "warn", found, f"tested with torch {WORKS}")
    return Finding("torch", "ok", found)


def _torch_names() -> Finding:
    """Look up the private names of torch that this installation may need."""
    import torch.distributed as dist

    from multiworld.backends.torch_names import WORKS, Use, missing

    uses: list[Use] = ["c10d", "tracing"]
    uses += ["gloo"] if dist.is_gloo_available() else []
    uses += ["nccl"] if dist.is_nccl_available() else []
    gone = [name for use in uses for name in missing(use)]
    if gone:
        remedy = f"pip install 'torch{WORKS}', or use backend='direct' only"
        return Finding("torch's names", "fail", f"missing: {', '.join(gone)}", remedy)
    return Finding("torch's names", "ok", f"all found, for {', '.join(uses)}")


def _backends() -> list[Finding]:
    import torch.distributed as dist

    findings = [Finding("backend direct", "ok", "built in")]
    if dist.is_gloo_available():
        findings.append(Finding("backend gloo", "ok", "available"))
    else:
        remedy = "install a torch build with Gloo, or use backend='direct'"
        findings.append(Finding("backend gloo", "warn", "missing", remedy))
    if dist.is_nccl_available():
        findings.append(Finding("backend nccl", "ok", "available"))
    else:
        remedy = "for GPUs, install a CUDA build of torch"
        findings.append(Finding("backend nccl", "warn", "missing", remedy))
    return findings


def _devices() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("devices", "ok", "CPU only")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("devices", "ok", ", ".join(names))


def _bfloat16() -> Finding:
    try:
        from multiworld.serve.controller.dtypes import SLOW
        from multiworld.serve.engine.compute.matmul_speed import bfloat16_cost
    except ImportError:
        return Finding("bfloat16", "ok", "not measured: serving is not installed")
    cost = bfloat16_cost()
    found = f"{round(cost, 2):g} times the time of float32"
    if cost <= SLOW:
        return Finding("bfloat16", "ok", found)
    remedy = (
        "bfloat16 models are served in float32 here; `dtype:` in the spec overrides "
        "this"
    )
    return Finding("bfloat16", "warn", found, remedy)


def _compiled() -> Finding:
    """Check which compiled code for generating text on CPUs this machine has."""
    try:
        from multiworld.serve.engine.compute.layer_code import can_run
        from multiworld.serve.engine.models.integer_products import best
    except ImportError:
        return Finding("compiled code", "ok", "not tried: serving is not installed")
    try:
        products = best()
    except NotImplementedError as error:
        remedy = "install gcc: with a C compiler, CPUs generate text faster"
        return Finding("compiled code", "warn", f"none: {error}", remedy)
    found = f"int8 matmuls for {products.name}" if products else "no int8 matmuls"
    layers = "decoder layers" if can_run() else "no decoder layers"
    return Finding("compiled code", "ok", f"{found}, {layers}")


def _helper() -> Finding:
    # /proc may hide other users' processes; heartbeat helpers need only this user's.
    if not Path(f"/proc/{os.getpid()}/stat").exists():
        return Finding(
            "heartbeat",
            "warn",
            "/proc does not show processes",
            "a stopped process is then distinguished from a busy one by silence alone",
        )
    return Finding("heartbeat", "ok", "helper process, /proc readable")


def _addresses() -> list[Finding]:
    from multiworld.net.tcp import own_address

    name = socket.gethostname()
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "give addresses, not names, to the other hosts"
        return [Finding("host name", "warn", f"{name}: {error}", remedy)]
    found = sorted({str(entry[4][0]) for entry in entries})
    findings = []
    outside = own_address()
    if outside.startswith("127."):
        remedy = "worlds across hosts need a network interface"
        findings.append(Finding("address", "warn", "loopback only", remedy))
    else:
        findings.append(Finding("address", "ok", outside))
    if all(address.startswith("127.") for address in found):
        remedy = (
            "harmless here: multiworld binds to the address by which the store is "
            "reached; plain torch.distributed would bind to loopback"
        )
        findings.append(
            Finding("host name", "warn", f"{name} is {', '.join(found)}", remedy)
        )
    else:
        findings.append(Finding("host name", "ok", f"{name} is {', '.join(found)}"))
    return findings


def _loopback(backend: str) -> Finding:
    subject = f"loopback world ({backend})"
    try:
        asyncio.run(_try_world(backend))
    except Exception as error:
        remedy = (
            "see the error; the cause may be a firewall on loopback, or a fault of "
            "/proc or of Unix sockets"
        )
        return Finding(subject, "fail", f"{type(error).__name__}: {error}", remedy)
    return Finding(subject, "ok", "two members joined, sent and received")


async def _try_world(backend: str) -> None:
    import torch

    from multiworld import WorldConfig, WorldManager
    from multiworld.rendezvous.store_server import StoreServer

    config = WorldConfig(join_s=LOOPBACK_S)
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    try:
        async with (
            asyncio.timeout(2 * LOOPBACK_S),
            WorldManager(config=config) as one,
            WorldManager(config=config) as two,
        ):
            left, right = await asyncio.gather(
                one.join("doctor", rank=0, size=2, store=store, backend=backend),
                two.join("doctor", rank=1, size=2, store=store, backend=backend),
            )
            sent = torch.arange(1000)
            await left.send(sent, dst=1)
            if not torch.equal(await right.recv(src=0), sent):
                raise RuntimeError("the received tensor differs from the sent tensor")
            await asyncio.gather(left.barrier(), right.barrier())
    finally:
        await server.close()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> None:
    """Check this installation and this machine; exit with 1 if a check fails."""
    findings = examine()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        report(findings)
    sys.exit(1 if any(finding.status == "fail" for finding in findings) else 0)
