"""Which cases JAX is held to, and how one of them is under `jit`.

The compiled kernel is held to every case, as it is and under `jit`, and by `python tests/in_jax.py` where JAX has 32
bits. The others are made of steps that JAX compiles anew for each shape, and then takes a hundred times as long as
NumPy for a small one. As it is, they are held to every other case of the two usual shapes, in turn; under `jit`, to
other shapes and to some of each kind, one or the other in tiles that meet. What each mask, bias and number means is
held by NumPy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from budget import check, expected
from cases import CASES, DV, B, Case, D, H, S, T
from conformance import CHECKS, REFUSED
from libraries import LIBRARIES, numbers

import clearhead as ch

JAX = next(library for library in LIBRARIES if library.name == "jax")
SHAPES = [((B, H, queries, D), (B, H, S, D), (B, H, S, DV)) for queries in (T, S)]
USUAL = [case for case in CASES if (case.q, case.k, case.v) in SHAPES and case.dtype != "float64"]
# there are several of each kind, side by side, so that each kernel has some
AS_IT_IS = {case.name: ("dense", "tiled")[number % 2] for number, case in enumerate(USUAL[::2])}
AS_IT_IS |= {"no keys": "tiled", "no queries": "dense"}
UNDER_JIT = {
    "one head, two dimensions": "dense",
    "two batch axes": "tiled",
    "one query": "dense",
    "one key": "tiled",
    "no keys": "dense",
    "no queries": "tiled",
    "empty batch": "dense",
    "more queries than keys": "tiled",
    "wide": "dense",
    "one query, 64 features, lengths": "tiled",
    "batch broadcasts both ways": "dense",
    "only values have a batch": "tiled",
    "multi-query": "tiled",
    "grouped, mask by head": "dense",
    "float64": "dense",
    "bfloat16, saturated and causal": "tiled",
    "bfloat16, everything": "dense",
    "documents by row": "tiled",
    "all masked": "dense",
    "relative bias, offset by row": "dense",
    "everything": "tiled",
    "NaN here and there, everything": "tiled",
}


def under_jit(kernel: str, case: Case) -> None:
    """Output, observations and gradients, compiled together."""
    arrays, dout, options = case.build()
    arrays = tuple(map(jnp.asarray, arrays))
    dout = jnp.asarray(dout.reshape(dout.shape[-2:]) if arrays[0].ndim == 2 else dout)

    @jax.jit
    def everything(q, k, v, dout):
        seen = ch.observe(q, k, v, **options, kernel=kernel, received=True)
        return seen.output, seen.lse, seen.received, ch.gradients(q, k, v, dout, **options, kernel=kernel)

    output, lse, received, gradients = everything(*arrays, dout)
    found = {
        "output": output,
        "lse": lse,
        "received": received,
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
    }
    for what, array in found.items():
        check(numbers(array), expected(case.name)[what], max(arrays[0].shape[-2], arrays[1].shape[-2]), what)


def narrow() -> None:
    """Every third case but those of 64 bits, and all of which a number is a seed or a position, with 32 bits in JAX."""
    jax.config.update("jax_enable_x64", False)
    some = [case for n, case in enumerate(CASES) if n % 3 == 0 or "offset" in case.name or "documents" in case.name]
    held = [case for case in some if case.dtype != "float64" and ("compiled", case.name) not in REFUSED]
    for case in held:
        with np.errstate(all="ignore"):
            for hold in CHECKS.values():
                hold("compiled", case, JAX)
            under_jit("compiled", case)
    print(f"{len(held)} cases hold in 32 bits")


if __name__ == "__main__":
    narrow()
