"""Memory mappings that keep no file descriptor open, unlike Python's ``mmap``."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_MAP_FIXED = 0x10  # Linux's value; Python's mmap does not export it
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, unmap = _libc.mmap, _libc.munmap  # ``unmap`` takes an address and a size
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
unmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, size: int, *, is_populated: bool = False) -> int:
    """Return the address at which a descriptor's memory is mapped."""
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_populated else 0)
    address: int | None = _mmap(None, size, _ACCESS, flags, fd, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def map_private(address: int, size: int) -> bool:
    """Replace a mapping by new private memory in place; return whether it worked."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    found: int | None = _mmap(address, size, _ACCESS, flags, -1, 0)
    return found == address


def view_at(address: int, size: int) -> memoryview:
    """Return a view of mapped memory, valid while it is mapped."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def shared_view(fd: int, size: int) -> memoryview:
    """Map a descriptor's memory; it is unmapped when its last view is gone."""
    address = map_shared(fd, size)
    view = view_at(address, size)
    weakref.finalize(view.obj, unmap, address, size).atexit = False
    return view
