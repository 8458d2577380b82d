"""Few queries over many keys: the compiled kernel reads what they see, and no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from conformance import built
from libraries import numbers

import clearhead as ch
from clearhead.core.mask import Mask
from clearhead.core.problem import pose
from clearhead.kernels.compiled import compiled

pytestmark = built
KEYS = 32_768
K, V = np.random.default_rng(5).standard_normal((2, 1, KEYS, 64), dtype=np.float32)
IDS = np.arange(KEYS) // 100


def seen_by_array(queries: int) -> np.ndarray:
    seen = np.zeros((queries, KEYS), bool)
    seen[:, -300:-170] = True
    return seen


# (mask for so many queries) that sees a few hundred keys at most
NARROW: dict[str, Callable[[int], Mask | np.ndarray]] = {
    "window": lambda queries: ch.window(128),
    "lengths": lambda queries: ch.lengths(10),
    "documents": lambda queries: ch.documents(IDS),
    "documents out of order": lambda queries: ch.documents(IDS[::-1].copy()),
    "array": seen_by_array,
    "negated lengths": lambda queries: ~ch.lengths(KEYS - 100),
    "negated band": lambda queries: ~ch.causal(offset=KEYS - 100),
    "negated array": lambda queries: ~ch.where(~seen_by_array(queries)),
    "window and prefix": lambda queries: ch.window(128) | ch.prefix(4),
    "window and global tokens": lambda queries: ch.window(128) | ch.global_tokens([0, 15_000]),
    "window in blocks": lambda queries: ch.window(128) & ch.random_blocks(64, count=350, seed=1),
}


def quickest(call: Callable[[], object]) -> float:
    """Seconds of this process, all threads together: others may have the machine meanwhile."""
    times = []
    for _ in range(5):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def some(queries: int) -> np.ndarray:
    return np.random.default_rng(queries).standard_normal((1, queries, 64), dtype=np.float32)


@cache
def seconds_for_everything(queries: int) -> float:
    return quickest(lambda: ch.attention(some(queries), K, V, kernel="compiled"))


@pytest.mark.parametrize("queries", [1, 4, 5, 30])
@pytest.mark.parametrize("name", NARROW)
def test_only_what_is_seen_is_read(name: str, queries: int) -> None:
    q = some(queries)
    mask = NARROW[name](queries)
    mine = ch.attention(q, K, V, mask=mask, kernel="compiled")
    plain = ch.attention(q, K, V, mask=mask, kernel="dense")
    np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-5)
    problem = pose(q, K, V, mask=mask)
    compiled.run(problem)
    assert compiled.used < K.nbytes / 8, f"{compiled.used:,} bytes of its own"
    took = quickest(lambda: ch.attention(q, K, V, mask=mask, kernel="compiled"))
    assert took < seconds_for_everything(queries)


def test_pieces_that_nobody_sees_may_hold_anything() -> None:
    q = np.ones((1, 2, 64), np.float32)
    k, v = K.copy(), V.copy()
    k[:, 100:-100], v[:, 100:-100] = np.nan, np.inf
    output = ch.attention(q, k, v, mask=ch.window(50) | ch.prefix(7), kernel="compiled")
    assert np.isfinite(numbers(output)).all()
