"""What an installed clearhead must do by itself, away from its source: run by every wheel that is made.

    python tests/wheel_works.py

It needs nothing that a plain installation does not bring, and no file beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np

import clearhead as ch
from clearhead.kernels.extension import NOT_BUILT, native

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def formula(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[-2], k.shape[-2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def it_is_the_installed_one() -> str:
    assert ch.__version__ == version("clearhead"), f"{ch.__version__} calls itself {version('clearhead')}"
    place = Path(ch.__file__).resolve()
    assert not place.is_relative_to(Path(__file__).resolve().parents[1] / "src"), f"{place} is the source"
    return f"clearhead {ch.__version__} in {place.parent}"


def the_kernel_is_there_and_right() -> str:
    assert not NOT_BUILT, NOT_BUILT
    q, k, v = np.random.default_rng(0).standard_normal((3, 7, 131, 67), dtype=np.float32)
    exact = formula(*(a.astype(np.float64) for a in (q, k, v)))
    for kernel in ("compiled", "tiled", "dense"):
        error = np.abs(ch.attention(q, k, v, mask=ch.causal(), kernel=kernel) - exact).max()
        assert error < 131**0.5 * np.finfo(np.float32).eps * np.abs(exact).max(), f"{kernel} is off by {error}"
    seen = ch.observe(q, k, v, mask=ch.causal(), kernel="compiled", top=3, received=True)
    np.testing.assert_allclose(seen.received.sum(-1), 131, rtol=1e-5)
    _, _, dv = ch.gradients(q, k, v, np.ones_like(v), mask=ch.causal(), kernel="compiled")
    np.testing.assert_allclose(dv.sum((-1, -2)), 131 * 67, rtol=1e-5)
    return f"the compiled kernel runs by {native.instruction_set()}"


def threads_do_not_disturb_one_another() -> str:
    """Calls of one kind, which share what is kept of the first, from many threads at once."""

    def everything(one: np.ndarray) -> list[np.ndarray]:
        q, k, v = one
        seen = ch.observe(q, k, v, mask=ch.causal(), kernel="compiled", received=True)
        return [ch.attention(q, k, v), seen.received, *ch.gradients(q, k, v, v, kernel="compiled")]

    inputs = np.random.default_rng(1).standard_normal((24, 3, 4, 64, 32), dtype=np.float32)
    alone = [everything(one) for one in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            for one, other in zip(alone, pool.map(everything, inputs), strict=True):
                assert all(map(np.array_equal, one, other)), "a call from another thread gave something else"
    if not FREE_THREADED:
        return "many threads give what one gives"
    assert not sys._is_gil_enabled(), "importing clearhead switched the interpreter's lock on again"
    return "many threads give what one gives, without the interpreter's lock"


def the_demo_runs() -> str:
    with tempfile.TemporaryDirectory() as elsewhere:
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}
        command = [sys.executable, "-m", "clearhead", "explain"]
        done = subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, encoding="utf-8", check=False
        )
    assert done.returncode == 0, done.stderr
    assert "Attention map" in done.stdout, done.stdout
    return f"the demo has {len(done.stdout.splitlines())} lines"


def main() -> None:
    for check in (
        it_is_the_installed_one,
        the_kernel_is_there_and_right,
        threads_do_not_disturb_one_another,
        the_demo_runs,
    ):
        print(check(), flush=True)


if __name__ == "__main__":
    main()
