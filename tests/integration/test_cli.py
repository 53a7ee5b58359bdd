"""The commands of the CLI, run as a user runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from multiworld.cli import doctor
from multiworld.cli.main import COMMANDS, GROUPS, cli
from tests.tiers import some

BIN = Path(sys.executable).parent


def run(*args: str, limit_s: float = 50) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / args[0], *args[1:]],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def test_help_answers_without_torch() -> None:
    """Importing torch takes seconds."""
    done = run("multiworld", "--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
    code = (
        "import sys, multiworld, multiworld.cli.main as m; "
        "m.cli(['--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.heavy
@pytest.mark.parametrize(
    "backend", ["direct", pytest.param("gloo", marks=pytest.mark.heavy)]
)
def test_worlds_demo_keeps_its_guarantees(backend: str) -> None:
    done = run(
        "multiworld",
        "demo",
        "worlds",
        "--json",
        "--phase-s",
        "1",
        "--backend",
        backend,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["failures"] == []
    assert outcome["wrong"] == 0
    assert sorted(outcome["broken"]) == ["blue", "green"]
    assert outcome["lost_rank"] == 1
    assert set(outcome["round_trips"]) == {"red", "blue", "green"}


def test_doctor_reports_everything(capsys: pytest.CaptureFixture[str]) -> None:
    done = run("multiworld", "doctor", "--json")
    findings = {f["subject"]: f for f in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    for subject in ("Python", "torch", "devices", "backend gloo", "backend nccl"):
        assert subject in findings
    assert findings["loopback world (direct)"]["status"] == "ok"
    assert findings["loopback world (gloo)"]["status"] == "ok"
    assert all(f["remedy"] for f in findings.values() if f["status"] == "fail")
    doctor.report([doctor.Finding(**finding) for finding in findings.values()])
    assert "loopback world (direct)" in capsys.readouterr().out


@pytest.mark.parametrize("given", some(["/some/patch/file", ""], 1))
def test_post_setup_needs_no_patch(given: str) -> None:
    done = run("m8d-post-setup", *given.split())
    assert done.returncode == 0
    assert "no patch is needed" in done.stdout


def test_log_level_is_honoured_by_the_command() -> None:
    """The library itself never configures logging."""
    code = (
        "import logging, multiworld.world.manager; "
        "assert not logging.getLogger().handlers; "
        "assert logging.getLogger('multiworld').level == logging.NOTSET"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = (
        "import logging, os; os.environ['M8D_LOG_LEVEL'] = 'DEBUG'; "
        "import multiworld.cli.main as m; "
        "m.cli(['doctor', '--help'], standalone_mode=False); "
        "assert logging.getLogger().level == logging.DEBUG"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "number", some([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], 2)
)
def test_command_ends_on_interrupt(number: signal.Signals) -> None:
    """Ctrl-C, ``timeout`` and a closed terminal send these; the workers end as well."""
    process = subprocess.Popen(
        [BIN / "multiworld", "demo", "worlds"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "is ready" in line:
                break
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode != 0
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        listed = subprocess.run(
            ["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True
        ).stdout
        if not any(
            "multiworld.demo.worlds.worker" in row and row.split()[0] == "1"
            for row in listed.splitlines()
        ):
            return
    raise AssertionError("a worker outlived the demo")


def test_help_is_grouped_and_an_unknown_command_is_guessed() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).output
    for title in GROUPS:
        assert f"\n{title}:\n" in shown
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    wrong = CliRunner().invoke(cli, ["stauts"])
    assert wrong.exit_code == 2
    assert "Did you mean status" in wrong.output
