"""Memory of large arrays that every step uses: on huge pages, so that addresses are looked up less often."""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import DTypeLike

_LINE, _HUGE_PAGE = 64, 2 << 20


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray:
    """Returns zeros that start at a line of the cache; from 2 MiB on, at a huge page where the system has them.

    Raises:
        MemoryError: there is not that much memory.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size < _HUGE_PAGE:
        memory, alignment = np.zeros(size + _LINE, np.uint8), _LINE
    else:
        memory, alignment = np.frombuffer(_pages(size + _HUGE_PAGE), np.uint8), _HUGE_PAGE
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


def _pages(size: int) -> mmap.mmap:
    """Maps memory of its own: what is never touched, as in front of an aligned start, takes none."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"there is no memory for {size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
