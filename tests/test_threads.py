"""How many threads the compiled kernel uses: what was asked for, or the least of what the process may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import built

import clearhead as ch
from clearhead.kernels import compiled
from clearhead.kernels import threads as module
from clearhead.kernels.threads import MOST, quota, threads


@pytest.fixture(autouse=True)
def _as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Eight cores, and nothing said; afterwards as it was."""
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.setattr(module, "quota", lambda: None)
    for name in ("CLEARHEAD_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    module.found_in.cache_clear()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    ch.set_threads(None)
    module.found_in.cache_clear()
    module._told = ()  # which was said of eight cores


def test_what_was_asked_for_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CLEARHEAD_THREADS", "3")
    assert threads() == threads("torch") == 3
    ch.set_threads(12)
    assert threads() == threads("torch") == 12
    ch.set_threads(None)
    assert threads() == 3


@pytest.mark.parametrize(
    "given", ["many", "", "0", "-1", "²", "3²", "٣", "1.5", " 3", "99999999999", "4097", "9" * 5000]
)
def test_the_environment_is_read_or_refused_in_words(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_THREADS", given)
    with pytest.raises(ch.ArgumentError) as refusal:
        threads()
    assert str(refusal.value) == f"CLEARHEAD_THREADS: is {given!r}, expected a whole number from 1 to {MOST}"


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", MOST + 1, 99999999999])
def test_a_number_is_taken_or_refused_in_words(count: Any) -> None:
    with pytest.raises(ch.ArgumentError) as refusal:
        ch.set_threads(count)
    assert str(refusal.value) == (
        f"count: is {count!r}, expected a whole number from 1 to {MOST}, or None for all cores"
    )
    ch.set_threads(MOST)
    assert threads() == MOST


def test_the_least_of_what_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> int:
        module.found_in.cache_clear()  # of what is found out here by itself, the real one hears
        return threads()

    assert found() == 8
    monkeypatch.setattr(module, "quota", lambda: 6)
    assert found() == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads() == 5
    monkeypatch.setattr(module, "cores", lambda: 4)
    assert found() == 4


def test_tensors_follow_pytorch_and_arrays_do_not() -> None:
    torch.set_num_threads(3)
    assert (threads("torch"), threads("numpy")) == (3, 8)
    torch.set_num_threads(64)
    assert threads("torch") == 8


@pytest.mark.parametrize(
    ("given", "found"), [("2", 2), ("3,2", 3), (" 4 ", 4), ("0", 1), ("²", 8), ("", 8), ("all", 8), ("9" * 50, 8)]
)
def test_openmp_says_something_or_nothing(given: str, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads() == found


def test_the_cores_are_those_that_the_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    assert module.cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert module.cores() == 1


# the lines of /proc/self/cgroup, the files of the cgroups, and how many cores that allows
CGROUPS: dict[str, tuple[str, dict[str, str], int | None]] = {
    "no limit": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
    "a limit": ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n"}, 3),
    "a part of a core counts": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    "rounded up": ("0::/a\n", {"a/cpu.max": "210000 100000\n"}, 3),
    "a limit above": ("0::/a/b\n", {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
    "a path of the host, in a container": ("0::/docker/1234\n", {"cpu.max": "400000 100000\n"}, 4),
    "version 1": (
        "9:cpuset:/\n4:cpu,cpuacct:/a\n0::/\n",
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
        3,
    ),
    "version 1 without a limit": (
        "1:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "another cgroup's limit": ("0::/a\n", {"b/cpu.max": "100000 100000\n"}, None),
    "nothing there": ("", {}, None),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_a_cgroups_quota(name: str, tmp_path: Path) -> None:
    lines, files, allowed = CGROUPS[name]
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text(lines)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    assert quota(root, own) == allowed


def test_no_cgroups() -> None:
    assert quota(Path("/nowhere"), Path("/nowhere/own")) is None


@built
def test_the_kernel_is_given_that_many(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Call(compiled.native.Call):
        def forward(self, isa: str, count: int) -> None:
            given.append(count)
            super().forward(isa, count)

    monkeypatch.setattr(compiled.native, "Call", Call)
    q = torch.zeros(1, 200, 64)
    torch.set_num_threads(2)
    ch.attention(q, q, q, kernel="compiled")
    ch.attention(q.numpy(), q.numpy(), q.numpy(), kernel="compiled")
    ch.attention(q[:, :4], q, q, kernel="compiled")  # too little for a second
    assert given == [2, 8, 1]


@built
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not say which cores a process has")
def test_programs_of_jax_take_no_more_threads_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import _native as native

    module._told = ()
    own = os.sched_getaffinity(0)
    module.allow()
    assert native.allowed_threads() == len(own)
    try:
        os.sched_setaffinity(0, {min(own)})
        assert native.allowed_threads() == 1  # with nobody telling it
        ch.set_threads(3)
        assert native.allowed_threads() == 3  # as asked for
    finally:
        os.sched_setaffinity(0, own)
    monkeypatch.setenv("CLEARHEAD_THREADS", "7")
    ch.set_threads(None)
    assert native.allowed_threads() == 7
    monkeypatch.setenv("CLEARHEAD_THREADS", "none")
    for _ in range(2):  # each call says so
        with pytest.raises(ch.ArgumentError, match="CLEARHEAD_THREADS: is 'none'"):
            module.allow()
