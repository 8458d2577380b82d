"""Threads that stay: forks, many callers at once, PyTorch's team, the end of the process."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance import built

import clearhead as ch
from clearhead.core.problem import pose
from clearhead.kernels.prepared import Effort
from clearhead.kernels.threads import crew

pytestmark = built
NATIVE = Path(__file__).parents[1] / "src" / "clearhead" / "native"
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def _all_threads_afterwards():
    yield
    ch.set_threads(None)


def arrays(*shape: int) -> list[np.ndarray]:
    return [RNG.standard_normal(shape, dtype=np.float32) for _ in range(3)]


FEWER_CORES = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before anything starts a thread
import statistics, time
import numpy as np
import clearhead as ch

q, k, v = np.random.default_rng(3).standard_normal((3, 8, 256, 64), dtype=np.float32)
counts, times = (None, int(sys.argv[1])), ([], [])
for n in range(40):
    for count, runs in zip(counts, times):
        ch.set_threads(count)
        start = time.perf_counter()
        ch.attention(q, k, v, kernel="compiled")
        if n >= 5:
            runs.append(time.perf_counter() - start)
right, more = map(statistics.median, times)
print(more / right)
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there is one core, or no choice"
)
@pytest.mark.parametrize("threads", [2, 16])
def test_more_threads_than_cores_cost_little(threads: int) -> None:
    """One core and several threads, by turns with one thread: whoever waits lets the one it waits for have the core."""
    found = []
    for _ in range(2):  # others may have the machine meanwhile
        done = subprocess.run(
            [sys.executable, "-c", FEWER_CORES, str(threads)], capture_output=True, text=True, check=True, timeout=120
        )
        found.append(float(done.stdout))
        if found[-1] <= 1.2:
            return
    pytest.fail(f"{threads} threads on one core took {found} times as long as one")


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build it with")
@pytest.mark.parametrize("how", ["thread", "address,undefined", "none"])
def test_a_crowd_of_callers_finds_its_way(how: str, tmp_path: Path) -> None:
    if how == "thread" and platform.machine() == "aarch64" and _address_bits() > 48:
        pytest.skip("ThreadSanitizer does not know this kernel's addresses")
    crowd = tmp_path / "crowd"
    flags = [] if how == "none" else [f"-fsanitize={how}"]
    source = [str(Path(__file__).parent / "native" / "crowd.cpp"), str(NATIVE / "pool.cpp")]
    made = subprocess.run(
        ["g++", "-std=gnu++17", "-O1", "-g", *flags, f"-I{NATIVE}", *source, "-o", crowd, "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode and "cannot find" in made.stderr:
        pytest.skip(f"the compiler has no library for -fsanitize={how}")
    assert made.returncode == 0, made.stderr
    # sanitizers do not follow a fork of a process with threads
    words = [str(crowd), "100", "fork" if how == "none" else "stay"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def _address_bits() -> int:
    """How many bits the addresses of this process have, by where its stack lies."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return max(int(line.split("-")[1].split()[0], 16).bit_length() for line in lines if "vsyscall" not in line)


def alone(program: str, **environment: str) -> None:
    """Run a program in a process without JAX, which has threads of its own and warns of every fork."""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env={**os.environ, **environment})


FORKS = """
import multiprocessing, torch, clearhead as ch

def attend(seed):
    q = torch.randn(4, 300, 32, generator=torch.Generator().manual_seed(seed))
    return ch.attention(q, q, q).numpy().tobytes() + ch.attention(q.numpy(), q.numpy(), q.numpy()).tobytes()

expected = [attend(seed) for seed in range(4)]  # this process has its threads now
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map_async(attend, range(4)).get(timeout=60) == expected

class Attended(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        q = torch.randn(4, 300, 32, generator=torch.Generator().manual_seed(index))
        return ch.attention(q, q, q)

here = [Attended()[index] for index in range(6)]
loader = torch.utils.data.DataLoader(Attended(), num_workers=2, batch_size=None, multiprocessing_context="fork")
for mine, theirs in zip(here, loader, strict=True):
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
"""


def test_forked_workers_and_data_loaders_start_afresh() -> None:
    alone(FORKS, CLEARHEAD_THREADS="4")


def test_a_child_waits_for_no_thread_of_its_parent() -> None:
    """Where a thread is just then asking a problem something, and so would hold a lock if there were one."""
    alone("""
import os, signal, threading
from clearhead.core.once import once
from clearhead.core.problem import Problem

class Slow:
    @once
    def asked(self):
        inside.set()
        return go_on.wait(60)

assert isinstance(Problem.differentiable, once) and isinstance(Problem.found, once)
inside, go_on = threading.Event(), threading.Event()
slow = Slow()
thread = threading.Thread(target=lambda: slow.asked)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)  # should it wait
    inside, go_on = threading.Event(), threading.Event()
    go_on.set()
    os._exit(0 if Slow().asked else 1)
assert os.waitpid(child, 0)[1] == 0
go_on.set()
thread.join()
assert slow.asked is True
""")


def test_many_callers_at_once_have_the_same_bits() -> None:
    calls = [arrays(2, n, 32) for n in (40, 300, 700)]
    expected = [ch.attention(*call) for call in calls]
    for count in (2, 5, 16):
        ch.set_threads(count)
        with ThreadPoolExecutor(8) as callers:
            found = list(callers.map(lambda n: ch.attention(*calls[n % 3]), range(48)))
        for n, one in enumerate(found):
            np.testing.assert_array_equal(one, expected[n % 3])


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="this PyTorch has no OpenMP")
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's OpenMP is found on Linux alone")
def test_pytorchs_own_threads_do_the_work() -> None:
    program = """
import os, torch, clearhead as ch
torch.set_num_threads(3)
q = torch.randn(8, 300, 64)
def count(): return len(os.listdir("/proc/self/task"))
(q @ q.mT).sum()
torch.softmax(q.repeat(4, 1, 1) @ q.repeat(4, 1, 1).mT, -1)
before = count()
a = ch.attention(q, q, q)
assert count() == before, (before, count())  # none was started
torch.testing.assert_close(a, torch.nn.functional.scaled_dot_product_attention(q, q, q), rtol=1e-4, atol=1e-5)
ch.attention(q.numpy(), q.numpy(), q.numpy())
assert count() <= before + 3  # the pool's
"""
    alone(program, CLEARHEAD_THREADS="3")
    assert crew("torch")[1] == torch.get_num_threads()
    assert crew("torch", alone=True)[1] == crew("numpy")[1] == 0


def test_the_process_ends_while_threads_sleep_or_work() -> None:
    program = """
import threading, numpy as np, clearhead as ch
ch.set_threads(8)
x = np.ones((8, 600, 64), np.float32)
ch.attention(x, x, x)
def on():
    while True: ch.attention(x, x, x)
for _ in range(3): threading.Thread(target=on, daemon=True).start()
ch.attention(x, x, x)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("shape", "threads"), [((1, 1, 5, 4), 0), ((1, 1, 16, 64), 0), ((1, 8, 32, 64), 8), ((1, 12, 128, 64), 201)]
)
def test_threads_grow_with_the_work(shape: tuple[int, ...], threads: int) -> None:
    assert Effort.of(pose(*arrays(*shape))).wanted == threads


def test_many_keys_for_one_query_are_worth_threads() -> None:
    q, k, v = arrays(1, 8, 4096, 64)
    assert Effort.of(pose(q[:, :, :1], k, v)).wanted > 16
    assert Effort.of(pose(q[:, :, :1], k[:, :, :16], v[:, :, :16])).wanted <= 1
