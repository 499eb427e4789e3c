"""Bytes: how many this process may still use, and how people say a number of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

MEMORY_IF_UNKNOWN = 4 * 2**30


def available_memory() -> int:
    """The bytes this process may still use, as far as the system tells."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
        available = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        try:
            available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):  # Windows, macOS
            available = MEMORY_IF_UNKNOWN
    try:  # a container's own limit (cgroup v2)
        group = Path("/sys/fs/cgroup")
        most, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        return max(0, min(available, int(most) - int(used)))
    except (OSError, ValueError):
        return available


def give_back() -> None:
    """Give the memory that was freed back to the system: glibc keeps what lies between blocks that are in use."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def amount(size: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
