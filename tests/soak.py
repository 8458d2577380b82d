"""Many Python threads, forks and interrupts on the compiled kernel for as long as one likes; nothing may hang, or grow.

    python tests/soak.py [--seconds 600] [--threads 16]

`make soak` runs it. Every result is compared, bit by bit, with what one thread alone gives.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

import clearhead as ch

PATIENCE = 60  # seconds without a finished call after which something hangs


def problems() -> list[tuple[torch.Tensor, ...]]:
    """Short and long calls, few and many queries."""
    shapes = [(1, 1, 5, 4), (1, 8, 32, 64), (2, 4, 300, 32), (1, 2, 1, 64), (1, 8, 600, 64)]
    keys = [5, 32, 300, 3000, 600]
    found = []
    for (batch, heads, queries, width), count in zip(shapes, keys, strict=True):
        q = torch.randn(batch, heads, queries, width)
        k, v = (torch.randn(batch, heads, count, width) for _ in range(2))
        found.append((q, k, v))
    return found


def resident() -> float:
    """MiB that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class Soak:
    """What the threads share."""

    def __init__(self) -> None:
        self.problems = problems()
        ch.set_threads(1)
        self.expected = [ch.attention(*one).numpy().copy() for one in self.problems]
        for (
            q,
            k,
            v,
        ) in self.problems:  # imports what NumPy's arrays need: a fork while another thread imports waits forever
            ch.attention(q.numpy(), k.numpy(), v.numpy())
        ch.set_threads(None)
        self.ended, self.failed = False, ""
        self.calls: dict[int, int] = {}

    def call(self, place: int, numpy: bool) -> None:
        """One call, compared."""
        q, k, v = self.problems[place]
        found = ch.attention(q.numpy(), k.numpy(), v.numpy()) if numpy else ch.attention(q, k, v).numpy()
        # small NumPy calls are NumPy's own, in another order of sums
        if not (
            np.array_equal(found, self.expected[place])
            or (numpy and np.allclose(found, self.expected[place], atol=1e-5))
        ):
            self.failed = f"problem {place} differs"

    def work(self, number: int) -> None:
        """One Python thread."""
        rng = random.Random(number)
        self.calls[number] = 0
        while not self.ended and not self.failed:
            self.call(rng.randrange(len(self.problems)), rng.random() < 0.5)
            self.calls[number] += 1

    def fork(self) -> None:
        """A child that attends, while all others go on."""
        child = os.fork()
        if child == 0:
            try:
                for place in range(len(self.problems)):
                    self.call(place, True)
                os._exit(1 if self.failed else 0)
            finally:
                os._exit(2)
        start = time.monotonic()
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() - start > PATIENCE:
                os.kill(child, signal.SIGKILL)
                self.failed = "a forked child hangs"
            time.sleep(0.01)

    def interrupt(self) -> None:
        """A long call that Ctrl-C ends."""
        q = torch.randn(1, 8, 6000, 64)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()  # which among many threads may itself take as long
            ch.attention(q, q, q)
            time.sleep(1)
        except KeyboardInterrupt:
            pass
        while timer.is_alive():
            time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=16)
    options = parser.parse_args()
    soak = Soak()
    workers = [threading.Thread(target=soak.work, args=(number,), daemon=True) for number in range(options.threads)]
    for worker in workers:
        worker.start()
    start, sizes, forks, interrupts = time.monotonic(), [], 0, 0
    before, since = 0, start
    while time.monotonic() - start < options.seconds and not soak.failed:
        soak.fork()
        forks += 1
        soak.interrupt()
        interrupts += 1
        sizes.append(resident())
        count = sum(soak.calls.values())
        if count != before:
            before, since = count, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            soak.failed = "no call has ended for a minute"
    soak.ended = True
    for worker in workers:
        worker.join(PATIENCE)
    early, late = np.median(sizes[len(sizes) // 4 : len(sizes) // 2 or 1]), np.median(sizes[-max(len(sizes) // 4, 1) :])
    print(
        f"{sum(soak.calls.values())} calls in {options.threads} threads, {forks} forks, {interrupts} interrupts, "
        f"{time.monotonic() - start:.0f} s; resident {early:.0f} MiB in the second quarter, {late:.0f} in the last"
    )
    if not soak.failed and late > early * 1.1 + 16:
        soak.failed = "memory grows"
    print(soak.failed or "well")
    return bool(soak.failed)


if __name__ == "__main__":
    sys.exit(main())
