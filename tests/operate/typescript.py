"""TypeScript's compiler, from npm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = "typescript@5.6.3"
HANG_S = 240.0

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")


def install(folder: Path, *packages: str) -> Path:
    """Install the compiler and other packages; return the compiler."""
    command = ["npm", "install", "--silent", "--no-save", COMPILER, *packages]
    done = subprocess.run(command, cwd=folder, timeout=HANG_S, check=False)
    if done.returncode:
        pytest.skip("npm cannot fetch the packages")
    return folder / "node_modules" / ".bin" / "tsc"


def errors_of(compiler: Path, folder: Path, *arguments: str) -> str:
    """Return what the compiler prints, run in a folder."""
    done = subprocess.run(
        [str(compiler), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return done.stdout
