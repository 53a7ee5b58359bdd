"""C code that is compiled on this machine when a process first needs it.

This takes a second; the result is kept in the cache folder. The code takes its threads
from torch's OpenMP, as those of two pools would keep each other from the cores. Where
there is no compiler, no x86-64, or not GNU OpenMP, torch has to compute instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from multiworld.serve.models.caches import cache_folder

logger = logging.getLogger(__name__)

# Every operation on floats is rounded; their errors and exceptions are not looked at.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILE_S = 60.0

SWITCH = "MULTIWORLD_COMPILE"
"""Environment variable: ``0`` leaves everything to torch."""


def library(source: Path) -> ctypes.CDLL:
    """Return a compiled file; raises NotImplementedError if it cannot be had."""
    found = outcome(source)
    if isinstance(found, str):
        raise NotImplementedError(found)
    return found


@functools.cache
def outcome(source: Path) -> ctypes.CDLL | str:
    """Return a compiled file, or why it cannot be had."""
    try:
        return _loaded(source)
    except NotImplementedError as error:
        logger.info("%s is not used, but torch: %s", source.name, error)
        return str(error)


def _loaded(source: Path) -> ctypes.CDLL:
    if os.environ.get(SWITCH) == "0":
        raise NotImplementedError(f"{SWITCH} is 0")
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise NotImplementedError("it is for x86-64 and Linux alone")
    ctypes.CDLL(_openmp(), ctypes.RTLD_GLOBAL)
    errors = []
    for compiler in _compilers():
        try:
            return _of_cache(source, compiler) or _compiled(source, compiler)
        except subprocess.CalledProcessError as error:
            errors.append(f"{compiler}: {error.stderr.strip()[-200:] or error}")
        except (OSError, subprocess.SubprocessError) as error:
            errors.append(f"{compiler}: {error}")
    raise NotImplementedError("; ".join(errors) or "there is no C compiler")


def _openmp() -> str:
    """Return the path of torch's OpenMP, which this process has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = sorted(set(re.findall(r"(/\S*/libgomp\S*)$", maps, re.MULTILINE)))
    own: list[str] = [
        path for path in paths if path.startswith(str(Path(torch.__file__).parent))
    ]
    if len(own or paths) != 1:
        raise NotImplementedError("torch does not use GNU OpenMP here")
    return (own or paths)[0]


def _compilers() -> list[str]:
    """Return the commands of C compilers; ``CC`` says which one to use."""
    given = os.environ.get("CC")
    return [given] if given else [name for name in ("cc", "gcc") if shutil.which(name)]


def _kept(source: Path, compiler: str) -> Path:
    """Return the file in the cache, which may not exist yet."""
    made_from = "\0".join((compiler, *FLAGS)).encode() + source.read_bytes()
    name = f"{source.stem}-{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    return cache_folder() / "compiled" / name


def _of_cache(source: Path, compiler: str) -> ctypes.CDLL | None:
    kept = _kept(source, compiler)
    try:
        found = kept.stat()
        is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o022
        return ctypes.CDLL(str(kept)) if is_own else None
    except OSError:
        return None


def _compiled(source: Path, compiler: str) -> ctypes.CDLL:
    kept = _kept(source, compiler)
    folder: Path | None = kept.parent
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = None
    if folder and not os.access(folder, os.W_OK):
        folder = None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unlinked, made = Path(scratch) / "unlinked.o", Path(scratch) / kept.name
        command = shlex.split(compiler)
        # Functions of OpenMP stay undefined: they are those of torch's.
        compile_it = *FLAGS, "-fopenmp", "-fPIC", "-c", str(source), "-o", str(unlinked)
        for arguments in (compile_it, ("-shared", str(unlinked), "-o", str(made))):
            subprocess.run(
                [*command, *arguments],
                check=True,
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
            )
        made.chmod(0o700)
        found = ctypes.CDLL(str(made))
        if folder:
            made.replace(kept)
        return found
