"""Memory that is freed and taken again every step, kept by the process in between."""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
_LARGEST = 1 << 30


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to blocks of 1 GiB; whether its allocator could be told.

    By default glibc gives large blocks back to the system at once and takes them again page by page: up to 1 ms a
    MiB on a virtual machine, for memory that a training step needs anew for every large product.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
