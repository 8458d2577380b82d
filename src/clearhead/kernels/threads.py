"""How many threads the compiled kernel uses: what was asked for, or what this process may have."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from clearhead.core.errors import ArgumentError

MOST = 4096

_threads: int | None = None


def set_threads(count: int | None) -> None:
    """How many threads the compiled kernel uses; None for what CLEARHEAD_THREADS says, or what the process may have.

    That is the least of its cores, its cgroup's CPU quota, OMP_NUM_THREADS and, for tensors, `torch.get_num_threads()`.
    The result is the same, bit by bit, whatever the number.

    >>> set_threads(1)
    >>> threads()
    1
    >>> set_threads(None)
    """
    global _threads
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST):
        raise ArgumentError("count", f"is {count!r}, expected a whole number from 1 to {MOST}, or None for all cores")
    _threads = count
    native = sys.modules.get("clearhead._native")
    if native is not None:
        native.tell_crew(0, 0, 0, 0, False)  # to be asked again
    with suppress(ArgumentError):  # what the environment says is refused when a call asks
        allow()


# what `allow` has told; nobody asks for less than a thread
_told: tuple[object, ...] = ()


def allow() -> None:
    """Tell the compiled kernel how many threads programs of JAX may take; they ask for the cores by themselves."""
    global _told
    asked = _threads, os.environ.get("CLEARHEAD_THREADS"), os.environ.get("OMP_NUM_THREADS")
    native = sys.modules.get("clearhead._native")
    if native is None or asked == _told:
        return
    named = _named()
    native.allow_threads(_limit() if named is None else named, named is None)
    _told = asked


def threads(library: str = "numpy") -> int:
    """How many threads the compiled kernel uses now, for arrays of a library."""
    return crew(library, alone=True)[0]


def crew(library: str, *, alone: bool = False) -> tuple[int, int]:
    """How many threads a call may take now, and how many PyTorch's OpenMP has, which then work for us too.

    The second is 0 where there are none that can be called, and for a call that is to be `alone`.
    """
    native = sys.modules.get("clearhead._native")
    stamp = 0 if native is None else native.surroundings()
    named, own = found_in(stamp, _threads) if stamp else found_in.__wrapped__(0, _threads)
    if library != "torch":
        return own if named is None else named, 0
    theirs: int = sys.modules["torch"].get_num_threads()
    team = native is not None and _has_team()
    if native is not None:  # who may then find it by itself
        native.tell_crew(stamp, named or 0, own, threading.main_thread().ident or 0, team)
    return min(own, theirs) if named is None else named, 0 if alone or not team else theirs


# asked by every call: to look takes as long as a short call
@lru_cache(maxsize=16)
def found_in(surroundings: int, asked: int | None) -> tuple[int | None, int]:
    """How many threads somebody asked for, and how many the process may have, while its surroundings are these.

    `surroundings` is one number for the variables and the cores that are looked at here.
    """
    return _named(), min(cores(), _limit())


def _named() -> int | None:
    """How many threads somebody asked for."""
    if _threads is not None:
        return _threads
    given = os.environ.get("CLEARHEAD_THREADS")
    return None if given is None else _asked(given)


def _limit() -> int:
    """How many threads the process may have, whichever cores it runs on."""
    return _least(quota(), os.environ.get("OMP_NUM_THREADS", ""))


@cache
def _has_team() -> bool:
    """Find the functions by which programs that GCC compiled call OpenMP, as PyTorch's own library does."""
    import ctypes  # not for those without PyTorch

    import clearhead._native as native

    torch = sys.modules["torch"]
    library = Path(str(torch.__file__)).parent / "lib" / "libtorch_cpu.so"
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info() or not library.exists():
        return False
    try:  # looks into the libraries that this one brought, and loads none
        loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD)
        found = [ctypes.cast(f, ctypes.c_void_p).value for f in (loaded.GOMP_parallel, loaded.omp_get_thread_num)]
    except (OSError, AttributeError):
        return False
    native.set_team(*found)
    return True


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# every call asks, and hardly any finds other words than the one before
@lru_cache(maxsize=16)
def _asked(given: str) -> int:
    # [0-9], since `isdigit` is also true of "²"; few of them, since Python reads no number of thousands of digits
    if not re.fullmatch("[0-9]{1,9}", given) or not 1 <= int(given) <= MOST:
        raise ArgumentError("CLEARHEAD_THREADS", f"is {given!r}, expected a whole number from 1 to {MOST}")
    return int(given)


@lru_cache(maxsize=16)
def _least(quota: int | None, openmp: str) -> int:
    return min(limit for limit in (quota, _outermost(openmp), MOST) if limit is not None)


@lru_cache(maxsize=16)
def _outermost(given: str) -> int | None:
    first = given.split(",")[0].strip()
    return max(int(first), 1) if re.fullmatch("[0-9]{1,9}", first) else None


@cache
def quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many cores' time the process's cgroup may use, rounded up, in either version; None without a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if not names:
            found += [_allowed(folder / "cpu.max") for folder in _upwards(root, path)]
        elif "cpu" in names.split(","):
            for mount in {root / names, root / "cpu"}:
                found += [_allowed(f / "cpu.cfs_quota_us", f / "cpu.cfs_period_us") for f in _upwards(mount, path)]
    return min((math.ceil(share) for share in found if share is not None), default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """A cgroup's folder and those above it, whose limits hold for it too; in a container some may not be there."""
    place = root / path.lstrip("/")
    return [folder for folder in (place, *place.parents) if folder.is_relative_to(root)]


def _allowed(*files: Path) -> float | None:
    """Time by period, in one file or two; None where there is no limit ("max", or −1) or no file."""
    try:
        time, period = (int(word) for file in files for word in file.read_text().split())
    except (OSError, ValueError):
        return None
    return time / period if time > 0 and period > 0 else None
