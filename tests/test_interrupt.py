"""Ctrl-C during a long call of the compiled kernel: it stops at once and leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from conformance import built

import clearhead as ch

pytestmark = [
    built,
    pytest.mark.skipif("CLEARHEAD_EMULATE" in os.environ, reason="an emulated call runs in another process"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads and memory are counted in Linux's /proc"),
]

RNG = np.random.default_rng(17)
SOON = 0.1


@pytest.fixture(autouse=True)
def _interrupts_are_heard_and_all_threads_come_back() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    yield
    signal.signal(signal.SIGINT, before)
    ch.set_threads(None)


def arrays(heads: int, queries: int, keys: int, features: int = 64) -> list[np.ndarray]:
    shapes = (heads, queries, features), (1, keys, features), (1, keys, features)
    q, k, v = (RNG.standard_normal(shape, dtype=np.float32) for shape in shapes)
    # every head has the same keys: much to do and little memory
    return [q, *(np.broadcast_to(a, (heads, keys, features)) for a in (k, v))]


def forward() -> Callable[[], Any]:
    q, k, v = arrays(1, 40_000, 40_000)
    return lambda: ch.attention(q, k, v, kernel="compiled")


def packing() -> Callable[[], Any]:
    q, k, v = arrays(100, 5, 50_000, 128)  # packing a key takes longer than five queries do
    return lambda: ch.attention(q, k, v, kernel="compiled")


def observing() -> Callable[[], Any]:
    q, k, v = arrays(1, 700, 100_000)  # one task
    return lambda: ch.observe(q, k, v, kernel="compiled", received=True, top=3)


def jax_arrays(length: int) -> list[Any]:
    """Of the CPU, also where JAX has a GPU."""
    return [jax.device_put(a, jax.devices("cpu")[0]) for a in arrays(1, length, length)]


def in_jax() -> Callable[[], Any]:
    q, k, v = jax_arrays(11_000)
    ch.attention(q, k, v)  # of a kind that was seen before, which a program of XLA's would compute to its end
    return lambda: ch.attention(q, k, v)


def learning_in_jax() -> Callable[[], Any]:
    q, k, v = jax_arrays(20_000)
    return lambda: ch.gradients(q, k, v, q, kernel="compiled")


def decoding() -> Callable[[], Any]:
    q, k, v = arrays(1, 1, 1)
    k, v = (np.broadcast_to(a, (1, 100_000_000, 64)) for a in (k, v))
    return lambda: ch.attention(q, k, v, kernel="compiled")


def gradients() -> Callable[[], Any]:
    q, k, v = arrays(1, 20_000, 20_000)
    return lambda: ch.gradients(q, k, v, q, kernel="compiled")


CALLS = {call.__name__: call for call in (forward, packing, observing, decoding, gradients, in_jax, learning_in_jax)}
SMALL = arrays(2, 300, 700, 24)


def small() -> list[np.ndarray]:
    return [ch.attention(*SMALL, kernel="compiled"), *ch.gradients(*SMALL, SMALL[0], kernel="compiled")]


def threads_now() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def threads_soon(running: int) -> int:
    """How many threads there are, once they are as many as before: one that was joined may be there a moment longer."""
    until = time.perf_counter() + 5
    while threads_now() != running and time.perf_counter() < until:
        time.sleep(0.01)
    return threads_now()


class Counts(ctypes.Structure):
    """What glibc's `mallinfo2` says of its memory."""

    names = ("arena", "free", "bins", "maps", "mapped", "spare", "bin_bytes", "used", "unused", "top")
    _fields_ = tuple((name, ctypes.c_size_t) for name in names)


def in_use() -> int:
    """Bytes that were taken and not freed; what the process holds on to for later does not count."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("this C library does not say how much memory is in use")
    mallinfo2.restype = Counts
    counts = mallinfo2()
    return counts.used + counts.mapped


def forever(call: Callable[[], Any]) -> None:
    while True:
        call()


def signalled(call: Callable[[], Any], after: float = 0.3) -> float:
    """Seconds from a signal to KeyboardInterrupt, while something is called again and again."""
    sent = []

    def send() -> None:
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after, send)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            forever(call)
        return time.perf_counter() - sent[0]
    finally:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_it_stops_at_once(name: str, threads: int) -> None:
    ch.set_threads(threads)
    before = small()
    call = CALLS[name]()
    running = threads_now()
    # the best of six: other processes may have the cores at that moment
    waits = []
    while len(waits) < 6 and min(waits, default=1.0) > SOON:
        waits.append(signalled(call))
        assert threads_soon(running) == running
    assert min(waits) <= SOON, waits
    for mine, theirs in zip(small(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_memory_of_a_call_that_was_stopped_is_freed() -> None:
    call = packing()
    before = in_use()
    signalled(call)
    assert in_use() - before < 50_000 * 128 * 4  # less than one head's keys


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_signal_that_raises_nothing_lets_the_call_end_and_its_handler_may_call_too(dtype: Any) -> None:
    q, k, v = (a.astype(dtype) for a in arrays(8, 3_000, 3_000))
    expected, inside = ch.attention(q, k, v, kernel="compiled"), []

    def short() -> Any:  # by the same units of the CPU as the call that it comes in between
        return (*small(), ch.attention(q[:, :40], k[:, :70], v[:, :70], kernel="compiled"))

    alone = short()

    def again(*_: Any) -> None:
        inside.append(short())
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # only now, so that handlers do not pile up

    handler = signal.signal(signal.SIGALRM, again)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        output = ch.attention(q, k, v, kernel="compiled")
        while not inside:
            ch.attention(q, k, v, kernel="compiled")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    np.testing.assert_array_equal(output, expected)
    assert inside
    for found in inside:
        for mine, theirs in zip(found, alone, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_what_a_handler_raises_comes_out() -> None:
    class Late(Exception):
        pass

    def raises(*_: Any) -> None:
        raise Late("too late")

    call = forward()
    handler = signal.signal(signal.SIGALRM, raises)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Late, match="too late"):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_calls_of_other_threads_go_on() -> None:
    q, k, v = arrays(4, 3_000, 3_000)
    expected, found = ch.attention(q, k, v, kernel="compiled"), []
    other = threading.Thread(target=lambda: found.append(ch.attention(q, k, v, kernel="compiled")))
    other.start()
    signalled(forward(), after=0.05)
    other.join()
    np.testing.assert_array_equal(found[0], expected)
