"""The assembly that finds the eighth largest of 16 numbers on Hopper, run here one instruction after the other."""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import MARKS

pytestmark = MARKS
LANES = 32


def run(text: str, given: np.ndarray) -> np.ndarray:
    """What a warp of threads gives, each of eight numbers: (8, lanes)."""
    held: dict[str, np.ndarray] = {f"${8 + n}": numbers for n, numbers in enumerate(given)}
    held["%laneid"] = np.arange(LANES)
    lines = [part.strip() for line in text.splitlines() for part in line.strip("{}").split(";") if part.strip()]
    for line in lines:
        if line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        into, *operands = (word.strip() for word in rest.split(","))
        a, *more = (held[word] if word in held else int(word, 0) for word in operands)
        if name in ("mov.f32", "mov.u32"):
            held[into] = a
        elif name == "and.b32":
            held[into] = a & more[0]
        elif name == "setp.ne.u32":
            held[into] = a != more[0]
        elif name in ("max.f32", "min.f32"):
            held[into] = (np.fmax if name == "max.f32" else np.fmin)(a, more[0])
        elif name == "selp.f32":
            held[into] = np.where(more[1], a, more[0])
        elif name == "shfl.sync.bfly.b32":
            held[into] = a[np.arange(LANES) ^ more[0]]
        else:
            raise AssertionError(f"{name} is not known here")
    return np.stack([held[f"${n}"] for n in range(8)])


@pytest.mark.parametrize("kind", ["drawn", "equal", "few values", "mostly unseen"])
def test_the_eighth_largest_of_sixteen(kind: str) -> None:
    pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
    from clearhead.kernels.hopper.softmax import half_of_sixteen

    text, _ = half_of_sixteen()
    rng = np.random.default_rng(len(kind))
    for _ in range(20):
        given = rng.standard_normal((8, LANES))
        if kind == "equal":
            given[:] = 1.5
        elif kind == "few values":
            given = rng.integers(0, 3, (8, LANES)).astype(float)
        elif kind == "mostly unseen":
            given[rng.random((8, LANES)) < 0.6] = -np.inf
        found = run(text, given)
        for four in range(0, LANES, 4):
            for row in ((0, 1, 4, 5), (2, 3, 6, 7)):  # what `level_of` takes the least of
                right = np.sort(given[list(row), four : four + 4], axis=None)[-8]
                assert found[list(row), four : four + 4].min() == right
