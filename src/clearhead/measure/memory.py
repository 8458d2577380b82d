"""How much memory can be had now, and a refusal in words of what would take more."""

from __future__ import annotations

import os
from pathlib import Path

from clearhead.core.errors import ArgumentError
from clearhead.measure.plans import quantity

# Of the memory that is free, what one measurement may take: others want some too
SHARE = 0.5


def free_memory(
    system: Path = Path("/proc/meminfo"), root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes of memory that can be had now: what the machine has free, and what the process's cgroup still allows."""
    return min([_of_the_machine(system), *_of_the_cgroup(root, own), *_of_the_process()])


def require_room(arguments: str, needed: float, what: str, free: int | None = None) -> None:
    """Refuse what needs more than its share of the free memory, before anything is allocated.

    >>> require_room("heads", 2**60, "q, k and v", free=2**30)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    clearhead.core.errors.ArgumentError: heads: q, k and v would take about 1 EiB, expected at most 512 MiB: ...
    """
    most = SHARE * (free_memory() if free is None else free)
    if needed > most:
        sizes = f"about {quantity(needed, 1024, 'B')}, expected at most {quantity(most, 1024, 'B')}"
        raise ArgumentError(arguments, f"{what} would take {sizes}: half of the memory that is free")


def _of_the_machine(system: Path) -> int:
    try:
        for line in system.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 2**32


def _of_the_cgroup(root: Path, own: Path) -> list[int]:
    """What each cgroup that the process is in leaves, in either version: a container sees the whole machine's free."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if not names:
            mount, limit, used = root, "memory.max", "memory.current"
        elif "memory" in names.split(","):
            mount, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        place = mount / path.lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(mount):
                try:
                    left = int((folder / limit).read_text()) - int((folder / used).read_text()) + _reclaimable(folder)
                except (OSError, ValueError):  # "max", or a folder that a container does not show
                    continue
                found.append(max(left, 0))
    return found


def _reclaimable(folder: Path) -> int:
    """Bytes of files in memory that nobody uses, which count as used and are given up for the asking."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _of_the_process() -> list[int]:
    """What `ulimit -v` leaves, where it is set."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return []
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return []
    return [max(limit - used, 0)]
