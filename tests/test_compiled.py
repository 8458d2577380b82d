"""The compiled kernel: threads that change nothing, forks, long strides, and what it refuses."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import array_api_strict
import numpy as np
import pytest
import torch
from conformance import built

import clearhead as ch
from clearhead.core.problem import pose
from clearhead.kernels import compiled as module

pytestmark = built
RNG = np.random.default_rng(11)


@pytest.fixture(autouse=True)
def _all_threads_afterwards():
    yield
    ch.set_threads(None)


def arrays(heads: int, queries: int, keys: int, width: int, dtype: str = "float32") -> list[np.ndarray]:
    shapes = (heads, queries, width), (heads, keys, width), (heads, keys, width)
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


def everything(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: ch.Mask | None) -> list[np.ndarray]:
    seen = ch.observe(q, k, v, mask=mask, kernel="compiled", top=5, received=True, map=(13, 7), queries=[0, -1])
    found = [seen.output, seen.lse, seen.max_score, seen.entropy, *seen.top, seen.received, *seen.map, *seen.queries]
    return found + list(ch.gradients(q, k, v, np.ones_like(seen.output), mask=mask, kernel="compiled"))


PROBLEMS = [
    (arrays(3, 700, 900, 40), ch.causal()),
    (arrays(1, 2000, 1500, 24), None),
    (arrays(2, 1, 5000, 64), None),
    (arrays(5, 300, 300, 33, "float64"), ch.window(40, 3)),
    (arrays(2, 100, 777, 17, "float16"), ch.lengths(500)),
    # tasks of several panels, cut where blocks end and ordered by what they see
    (arrays(4, 1500, 1700, 16), ch.blocks(RNG.random((4, 47, 54)) < 0.1, 32)),
    (arrays(4, 1500, 1700, 16), ch.window(40, 20) | ch.global_tokens(range(16))),
]


@pytest.mark.parametrize("threads", [2, 3, 7, 16])
def test_results_are_the_same_bit_by_bit_whatever_the_threads(threads: int) -> None:
    for problem, mask in PROBLEMS:
        ch.set_threads(1)
        one = everything(*problem, mask)
        ch.set_threads(threads)
        for mine, theirs in zip(one, everything(*problem, mask), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_sixteen_python_threads_get_what_one_gets() -> None:
    alone = [everything(*problem, mask) for problem, mask in PROBLEMS]
    with ThreadPoolExecutor(16) as pool:
        together = [
            (
                i % len(PROBLEMS),
                pool.submit(everything, *PROBLEMS[i % len(PROBLEMS)][0], PROBLEMS[i % len(PROBLEMS)][1]),
            )
            for i in range(48)
        ]
        for number, future in together:
            for mine, theirs in zip(alone[number], future.result(), strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_a_fork_after_use_can_use_it() -> None:
    program = """
import os, numpy as np, clearhead as ch
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 600, 32), dtype=np.float32)
before = ch.attention(q, k, v, kernel="compiled")
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(before, ch.attention(q, k, v, kernel="compiled")) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_strides_past_two_to_the_31_elements() -> None:
    rows, stride = 3000, 1 << 20  # three billion elements apart from first to last, of which few pages are touched
    memory = mmap.mmap(-1, rows * stride * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # no reserve
    far = np.ndarray((rows, 8), np.float32, buffer=memory, strides=(stride * 4, 4))
    near = RNG.standard_normal((rows, 8)).astype(np.float32)
    far[...] = near
    q = RNG.standard_normal((5, 8)).astype(np.float32)
    assert far.strides[0] // 4 * rows > 2**31
    for queries in (q, q[:1]):
        np.testing.assert_array_equal(
            ch.attention(queries, far, far, kernel="compiled"), ch.attention(queries, near, near, kernel="compiled")
        )
    dout = np.ones((5, 8), np.float32)
    for mine, theirs in zip(
        ch.gradients(q, far, far, dout, kernel="compiled"),
        ch.gradients(q, near, near, dout, kernel="compiled"),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_more_pairs_than_two_to_the_31() -> None:
    n = 70_000
    q = np.broadcast_to(np.float32(1), (1, n, 4))
    v = np.arange(n, dtype=np.float32).reshape(1, n, 1)
    seen = ch.observe(q, q, v, mask=ch.window(0), kernel="compiled", received=True)
    np.testing.assert_array_equal(seen.output, v)
    np.testing.assert_array_equal(seen.received, np.ones((1, n)))


def test_what_it_refuses() -> None:
    x = np.zeros((1, 4, 513), np.float32)
    plan = ch.plan(x, x, x)
    assert plan.others["compiled"] == "refused: 513 features of a query are outside 1 to 512"
    j = array_api_strict.zeros((1, 4, 8), dtype=array_api_strict.float32)
    said = "refused: it takes NumPy, PyTorch and JAX arrays on the CPU, not array_api_strict"
    assert ch.plan(j, j, j).others["compiled"] == said
    meta = torch.zeros((1, 4, 8), device="meta")
    assert module.compiled.rejects(pose(meta, meta, meta)) == "it takes tensors on the CPU, not on meta"
    with pytest.raises(ch.KernelRefused, match="it has no dropout"):
        ch.attention(x[..., :8], x[..., :8], x[..., :8], dropout=(0.1, 1), kernel="compiled")


def test_tensors_and_arrays_are_not_copied() -> None:
    q, k, v = (torch.from_numpy(a) for a in arrays(2, 50, 60, 16))
    np.testing.assert_array_equal(
        ch.attention(q, k, v, kernel="compiled"), ch.attention(*(a.numpy() for a in (q, k, v)), kernel="compiled")
    )
    running = module.Running(pose(q, k, v))
    assert [kept.data_ptr() for kept in running.kept[:3]] == [q.data_ptr(), k.data_ptr(), v.data_ptr()]


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 31, 64, 127, 256, 512])
def test_every_width_and_tail(width: int) -> None:
    for queries, keys in ((1, 1), (4, 9), (12, 8), (13, 511), (97, 513)):
        q, k, v = arrays(1, queries, keys, width, "float64")
        np.testing.assert_allclose(
            ch.attention(q, k, v, kernel="compiled"), ch.attention(q, k, v, kernel="dense"), rtol=1e-11, atol=1e-12
        )


def test_memory_of_its_own_is_counted() -> None:
    q, k, v = arrays(4, 1000, 1000, 64)
    one_head = 2 * k.nbytes // 4
    for threads in (1, 2):
        ch.set_threads(threads)
        ch.attention(q, k, v, kernel="compiled")
        assert threads * one_head <= module.compiled.used <= 2 * threads * one_head


@pytest.mark.parametrize(("queries", "keys"), [(40, 90_000), (200, 12_000), (100, 22_000)])
@pytest.mark.parametrize("mask", [None, ch.causal(), ch.window(5_000), ch.lengths(700) | ch.global_tokens([3, 80])])
def test_what_the_first_look_kept_and_what_is_computed_again(queries: int, keys: int, mask: ch.Mask | None) -> None:
    """Exponentials are kept for the second look where there is room: for all panels, for some, or for none."""
    q, k, v = arrays(1, queries, keys, 4)
    q *= 5
    seen, exact = (
        ch.observe(*(a.astype(dtype) for a in (q, k, v)), mask=mask, kernel=kernel, top=4, received=True, map=(7, 9))
        for kernel, dtype in (("compiled", "float32"), ("dense", "float64"))
    )
    np.testing.assert_allclose(seen.top.weights, exact.top.weights, rtol=2e-5)
    np.testing.assert_allclose(seen.received, exact.received, rtol=2e-5, atol=2e-7)
    np.testing.assert_allclose(seen.map.mean, exact.map.mean, rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(seen.map.max, exact.map.max, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("keys", [1, 7, 8, 64, 129])
@pytest.mark.parametrize("mask", [None, ch.causal(), ch.window(9, 2), ch.lengths(6)])
def test_keys_that_few_queries_read_may_end_where_memory_ends(keys: int, mask: ch.Mask | None) -> None:
    """Where keys are read as they lie, nothing behind the last of them is."""
    page = mmap.PAGESIZE
    for width in (8, 5):
        size = keys * width * 4
        room = mmap.mmap(-1, -(-size // page) * page)
        held = np.frombuffer(room, np.float32)[-keys * width :].reshape(1, keys, width)  # ends where its page does
        q, k, v = arrays(1, 20, keys, width)
        held[:] = k
        for inputs in ((q, held, v), (q, k, held)):
            exact = ch.attention(*(a.astype(np.float64) for a in inputs), mask=mask, kernel="dense")
            got = ch.attention(*inputs, mask=mask, kernel="compiled")
            np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


def test_arrays_that_lie_in_files_are_read_as_they_are(tmp_path: Path) -> None:
    q, k, v = arrays(2, 9, 9, 8)
    mapped = []
    for name, array in (("q", q), ("k", k), ("v", v), ("mask", np.tril(np.ones((9, 9), bool)))):
        np.save(tmp_path / f"{name}.npy", array)
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    *inputs, mask = mapped
    assert isinstance(inputs[0], np.memmap)
    got = ch.attention(*inputs, mask=mask, kernel="compiled")
    np.testing.assert_array_equal(got, ch.attention(q, k, v, mask=np.asarray(mask), kernel="compiled"))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="the system has no large pages to ask for"
)
@pytest.mark.parametrize("back", [False, True])
def test_large_results_are_asked_to_lie_in_large_pages(back: bool) -> None:
    q, k, v = (torch.ones(1, 8, 20_000, 64, requires_grad=back) for _ in range(3))  # 39 MiB, which malloc maps anew
    result = ch.attention(q, k, v, mask=ch.window(4), kernel="compiled")
    if back:
        (result,) = torch.autograd.grad(result.sum(), v)
    middle = result.data_ptr() + result.nbytes // 2
    pieces = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for piece, after in pairwise(pieces):
        span = re.search(r"^([0-9a-f]+)-([0-9a-f]+) ", piece, re.MULTILINE)
        if span and int(span[1], 16) <= middle < int(span[2], 16):
            assert "hg" in after.splitlines()[0].split()
            break
    else:
        pytest.fail("the result lies nowhere")
    torch.testing.assert_close(result[0, 0, 100], torch.ones(64))
