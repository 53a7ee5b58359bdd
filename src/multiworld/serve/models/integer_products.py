"""Products in int8 that are compiled on this machine, from ``integer_products.c``.

One call from Python takes the place of a dozen of torch's, and reads weights as fast as
memory gives them. The results have the same bits. The first process that needs them
calls the C compiler, which takes a second; its file is kept in the cache folder. Where
there is no compiler, no x86, or not torch's own threads (GNU OpenMP), torch computes.
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
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from multiworld.serve.models.caches import cache_folder

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("integer_products.c")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILE_S = 60.0

BLOCK = 32  # outputs of a block
INPUTS = 4  # that one instruction adds; 64 fill a row of a tile
TILE = 64
TILE_ROWS = 16  # that tiles are read for, of two rows of integers each

SWITCH = "MULTIWORLD_COMPILE"
"""Environment variable: ``0`` leaves all products to torch."""


class Instructions(IntEnum):
    """What the compiled code has instructions for, as in the C code."""

    NONE = 0
    AVX2 = 1
    VNNI = 2
    AMX = 3


class Packed(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("linears", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
    )


class Compiled:
    """Packed weights of linears that are given the same rows, for the compiled code.

    Raises NotImplementedError if it cannot be had here.
    """

    def __init__(self, integers: Tensor, scale: Tensor, outputs: Sequence[int]) -> None:
        self._multiply = library().multiworld_multiply
        self._instructions = best()
        if self._instructions is Instructions.NONE:
            raise NotImplementedError("the processor lacks the instructions")
        self._outputs, self._given = tuple(outputs), integers.shape[1]
        multiple = TILE if self._given >= TILE else INPUTS
        inputs = -(-self._given // multiple) * multiple
        weights = [
            _blocks(part, inputs) for part in integers.split_with_sizes(self._outputs)
        ]
        scales = [_filled(part) for part in scale.split_with_sizes(self._outputs)]
        # ``_packed`` has their addresses.
        self._weights, self._scale = torch.cat(weights), torch.cat(scales)
        self._counts = torch.tensor(self._outputs, dtype=torch.int32)
        addresses = (
            each.data_ptr() for each in (self._weights, self._scale, self._counts)
        )
        self._packed = Packed(*addresses, len(self._outputs), inputs)
        self._address = ctypes.addressof(self._packed)
        self._inputs, self._total = inputs, sum(self._outputs)

    def products(self, rows: Tensor) -> list[Tensor]:
        """Return each linear's results, [rows, outputs]; ``rows`` is float32."""
        count, rows = len(rows), rows.contiguous()
        found = torch.empty(count * self._total)
        scratch = torch.empty(self._scratch(count), dtype=torch.uint8)
        self._multiply(
            self._address,
            rows.data_ptr(),
            count,
            self._given,
            found.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
            self._instructions,
        )
        results, end = [], 0
        for width in self._outputs:
            begin, end = end, end + count * width
            results.append(found[begin:end].view(count, width))
        return results

    def _scratch(self, count: int) -> int:
        """Return bytes: of each row its integers, a factor and two sums."""
        filled = -(-count // TILE_ROWS) * TILE_ROWS
        return filled * 2 * self._inputs + count * 3 * 4


def _blocks(integers: Tensor, inputs: int) -> Tensor:
    """Return weights, [outputs, inputs], in the layout that the C code reads."""
    outputs, given = integers.shape
    blocks = -(-outputs // BLOCK)
    filled = integers.new_zeros(blocks * BLOCK, inputs)
    filled[:outputs, :given] = integers
    raised = filled.view(torch.uint8).bitwise_xor_(128)  # plus 128
    return raised.view(blocks, BLOCK, -1, INPUTS).transpose(1, 2).flatten()


def _filled(scale: Tensor) -> Tensor:
    filled = torch.zeros(-(-len(scale) // BLOCK) * BLOCK)
    filled[: len(scale)] = scale
    return filled


def best() -> Instructions:
    """Return the best instructions to use: torch may have been told to use fewer."""
    found = Instructions(library().multiworld_best())
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return found
    return min(found, Instructions.AVX2 if capability == "AVX2" else Instructions.NONE)


def library() -> ctypes.CDLL:
    """Return the compiled code; raises NotImplementedError if it cannot be had."""
    found = outcome()
    if isinstance(found, str):
        raise NotImplementedError(found)
    return found


@functools.cache
def outcome() -> ctypes.CDLL | str:
    """Return the compiled code, or why it cannot be had."""
    try:
        return _loaded()
    except NotImplementedError as error:
        logger.info("torch computes products in int8: %s", error)
        return str(error)


def _loaded() -> ctypes.CDLL:
    if os.environ.get(SWITCH) == "0":
        raise NotImplementedError(f"{SWITCH} is 0")
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise NotImplementedError("they are compiled for x86-64 and Linux alone")
    # The compiled code takes its threads from torch's OpenMP: those of two pools would
    # keep each other from the cores.
    ctypes.CDLL(_openmp(), ctypes.RTLD_GLOBAL)
    errors = []
    for compiler in _compilers():
        try:
            return _typed(_of_cache(compiler) or _compiled(compiler))
        except subprocess.CalledProcessError as error:
            errors.append(f"{compiler}: {error.stderr.strip()[-200:]}")
        except (OSError, subprocess.SubprocessError) as error:
            errors.append(f"{compiler}: {error}")
    raise NotImplementedError("; ".join(errors) or "there is no C compiler")


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    multiply = found.multiworld_multiply
    multiply.argtypes = pointer, pointer, count, count, pointer, pointer, number, number
    multiply.restype = None
    return found


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


def _kept(compiler: str) -> Path:
    """Return the file in the cache, which may not exist yet."""
    made_from = "\0".join((compiler, *FLAGS)).encode() + SOURCE.read_bytes()
    name = f"integer-products-{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    return cache_folder() / "compiled" / name


def _of_cache(compiler: str) -> ctypes.CDLL | None:
    kept = _kept(compiler)
    try:
        found = kept.stat()
        is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o022
        return ctypes.CDLL(str(kept)) if is_own else None
    except OSError:
        return None


def _compiled(compiler: str) -> ctypes.CDLL:
    kept = _kept(compiler)
    folder: Path | None = kept.parent
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = None
    if folder and not os.access(folder, os.W_OK):
        folder = None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unlinked, made = Path(scratch) / "products.o", Path(scratch) / kept.name
        command, source = shlex.split(compiler), str(SOURCE)
        # Functions of OpenMP stay undefined: they are those of torch's.
        compile_it = *FLAGS, "-fopenmp", "-fPIC", "-c", source, "-o", str(unlinked)
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
