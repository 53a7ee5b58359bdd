"""C code that is compiled on this machine when a process first needs it.

Compilation takes a second; its result is kept in the cache folder. The code runs in the
threads of torch's OpenMP, because a second pool of threads would compete for the cores.
The code needs Linux on x86-64, a C compiler and GNU OpenMP; elsewhere, torch computes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multiworld.serve.engine.models.caches import cache_folder

logger = logging.getLogger(__name__)

# The compiler must round every operation on floats. It may ignore errno and
# floating-point exceptions.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILE_S = 20.0

SWITCH = "MULTIWORLD_COMPILE"
"""Environment variable: ``0`` leaves everything to torch."""

TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_long,
    "f": ctypes.c_float,
}

BLOCK = 32  # number of outputs in a block of weights


class Library:
    """A compiled file; ``types``: argument types of each function, as letters."""

    def __init__(self, source: Path, **types: str) -> None:
        self._source, self._types = source, types
        self._typed: ctypes.CDLL | None = None

    def __call__(self) -> ctypes.CDLL:
        """Return the code; raises NotImplementedError if it is not available."""
        found = load(self._source)
        if found is not self._typed:
            for name, types in self._types.items():
                function = getattr(found, f"multiworld_{name}")
                function.argtypes = [TYPES[letter] for letter in types]
                function.restype = None
            self._typed = found
        return found

    def best(self) -> int:
        """Return the best instructions that the processor and torch allow."""
        found = int(self().multiworld_best())
        capability = torch.backends.cpu.get_cpu_capability()
        if capability.startswith("AVX512"):
            return found
        # In all files, 1 stands for AVX2, and 0 for no instructions.
        return min(found, int(capability == "AVX2"))


def in_blocks(weight: Tensor, inputs: int, group: int) -> Tensor:
    """Return weights, [outputs, inputs], in the layout that the C code reads."""
    # ``inputs``: their number with padding; ``group``: the number of inputs that one
    # instruction multiplies and adds.
    outputs, given = weight.shape
    blocks = -(-outputs // BLOCK)
    filled = weight.new_zeros(blocks * BLOCK, inputs)
    filled[:outputs, :given] = weight
    return filled.view(blocks, BLOCK, -1, group).transpose(1, 2).flatten()


def load(source: Path) -> ctypes.CDLL:
    """Return a compiled file; raises NotImplementedError if it is not available."""
    found = outcome(source)
    if isinstance(found, str):
        raise NotImplementedError(found)
    return found


@functools.cache
def outcome(source: Path) -> ctypes.CDLL | str:
    """Return a compiled file, or why it is not available."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    try:
        return _loaded(source)
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning(
            "%s is not compiled; using torch, which is slower: %s", source.name, error
        )
        return str(error)


def _loaded(source: Path) -> ctypes.CDLL:
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise NotImplementedError("compiled code needs Linux on x86-64")
    ctypes.CDLL(_openmp(), ctypes.RTLD_GLOBAL)
    errors = []
    for compiler in _compilers():
        try:
            return _of_cache(source, compiler) or _compiled(source, compiler)
        except TimeoutError as error:
            raise NotImplementedError(str(error)) from None
        except (OSError, ValueError) as error:
            errors.append(f"{compiler}: {error}")
    raise NotImplementedError("; ".join(errors) or "there is no C compiler")


def _openmp() -> str:
    """Return the path of torch's OpenMP, which this process has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    # A mapped file's path is the sixth column, and may contain spaces.
    columns = (line.split(maxsplit=5) for line in maps.splitlines())
    mapped = {row[5] for row in columns if len(row) > 5}
    paths = sorted(path for path in mapped if Path(path).name.startswith("libgomp"))
    own: list[str] = [
        path for path in paths if path.startswith(str(Path(torch.__file__).parent))
    ]
    if len(own or paths) != 1:
        raise NotImplementedError(
            "cannot identify the GNU OpenMP library that torch has loaded"
        )
    return (own or paths)[0]


def _compilers() -> list[str]:
    """Return the commands of C compilers to try: only ``CC`` if that is set."""
    given = os.environ.get("CC", "").strip()
    if given:
        return [given]
    found = {name: shutil.which(name) for name in ("cc", "gcc")}
    # ``cc`` and ``gcc`` are often the same program; try it only once.
    programs = {os.path.realpath(path): name for name, path in found.items() if path}
    return sorted(programs.values())


def _file(source: Path, compiler: str) -> str:
    """Return the name of a compiled file in the cache."""
    made_from = "\0".join((compiler, *FLAGS)).encode() + source.read_bytes()
    return f"{source.stem}-{hashlib.sha256(made_from).hexdigest()[:16]}.so"


def _folder() -> Path | None:
    """Return the folder of compiled files, unless others can write to it."""
    try:
        folder = cache_folder() / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # for instance, the user has no home directory
        return None
    return folder if _is_own(folder) and os.access(folder, os.W_OK) else None


def _is_own(path: Path) -> bool:
    found = path.lstat()
    is_link = stat.S_ISLNK(found.st_mode)
    return found.st_uid == os.geteuid() and not is_link and not found.st_mode & 0o022


def _of_cache(source: Path, compiler: str) -> ctypes.CDLL | None:
    folder = _folder()
    try:
        kept = folder / _file(source, compiler) if folder else None
        return ctypes.CDLL(str(kept)) if kept and _is_own(kept) else None
    except OSError:
        return None


def _compiled(source: Path, compiler: str) -> ctypes.CDLL:
    folder = _folder()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unlinked, made = Path(scratch) / "unlinked.o", Path(scratch) / "made.so"
        # Compile and link in two steps, so that OpenMP's functions stay undefined:
        # torch's OpenMP provides them.
        compile_it = *FLAGS, "-fopenmp", "-fPIC", "-c", str(source), "-o", str(unlinked)
        _run(compiler, *compile_it)
        _run(compiler, "-shared", str(unlinked), "-o", str(made))
        made.chmod(0o700)
        found = ctypes.CDLL(str(made))
        if folder:
            with made.open("rb") as written:
                # A file that is only partly on the disk after a power loss would crash
                # processes.
                os.fsync(written)
            made.replace(folder / _file(source, compiler))
        return found


def _run(compiler: str, *arguments: str) -> None:
    """Run a compiler; raises OSError if it fails, or takes too long."""
    with subprocess.Popen(
        [*shlex.split(compiler), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A session of its own, so that the compiler's children can be killed with it.
        start_new_session=True,
    ) as running:
        try:
            _, errors = running.communicate(timeout=COMPILE_S)
        except BaseException as error:
            os.killpg(running.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                what = f"{compiler} took more than {COMPILE_S:g} s"
                raise TimeoutError(what) from None
            raise
    if running.returncode:
        text = errors.decode(errors="replace").strip()[-200:]
        raise OSError(text or f"exit code {running.returncode}")
