"""Programs of JAX that hand a described call on, with the addresses of its arrays, to kernels that XLA does not know.

What a program holds of a call is a number. Whoever runs it is kept here under that number as long as the process lasts:
a program may be run at any time, and nobody says when it is forgotten. Calls that say the same have one number, in
every process: so programs that JAX keeps on disk are found again, and by then the call has been described here as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from clearhead.core.errors import first_line
from clearhead.kernels.extension import NOT_BUILT, native
from clearhead.kernels.xla.spec import Spec

NAME = "clearhead_lent"

# where an array lies, its type as `kernels/extension.py` numbers them, and its sizes
Place: TypeAlias = tuple[int, int, tuple[int, ...]]


class Handed(NamedTuple):
    """What a program asks for."""

    spec: Spec
    back: bool
    with_lse: bool


class Lender(Protocol):
    """Who runs calls instead of the compiled kernel; equal to all who would run them alike."""

    @property
    def content(self) -> bytes:
        """All that is known of those calls, the same for all who would run them alike."""

    def __call__(self, handed: Handed, stream: int, given: list[Place], results: list[Place]) -> None:
        """Read what is given and write the results; on a GPU in their turn on a stream."""


_handed: dict[int, Handed] = {}
_numbers: dict[Handed, int] = {}


def number_of(handed: Handed) -> int:
    """The number by which a program knows a call."""
    number = _numbers.get(handed)
    if number is None:
        spec, back, with_lse = handed
        described = repr((replace(spec, lent=None), back, with_lse)).encode()
        content = hashlib.blake2b(described + spec.lent.content, digest_size=8).digest()
        number = _numbers[handed] = int.from_bytes(content, "little") >> 1  # of 63 bits, which are never negative
        _handed[number] = handed
    return number


def called(number: int, stream: int, given: Sequence[Any], results: Sequence[Any]) -> None:
    """What XLA calls, by way of `native/xla.cpp`, in a thread of its own."""
    handed = _handed.get(number)
    if handed is None:
        raise RuntimeError(
            "the program was compiled by another process, where its arrays are lent to kernels: compile it here"
        )
    handed.spec.lent(handed, stream, list(given), list(results))


@cache
def missing(platform: str) -> str | None:
    """Why programs for a platform, "cpu" or "cuda", cannot hand calls on; None where they can."""
    if native is None:
        return NOT_BUILT
    if not hasattr(getattr(jax, "ffi", None), "register_ffi_target"):
        return f"JAX {jax.__version__} has no foreign function interface"
    oldest, newest = native.xla_minors()
    reason = None
    for minor in range(newest, oldest - 1, -1):
        try:
            handler = native.xla_lender(minor, called)
            jax.ffi.register_ffi_target(NAME, handler, platform="cpu" if platform == "cpu" else platform.upper())
        except Exception as error:  # whatever it is, in XLA's words
            reason = reason or f"{type(error).__name__}: {first_line(error)}"
        else:
            return None
    return reason


def lowered(ctx: Any, operands: Any, spec: Spec, *, back: bool, with_lse: bool, platform: str) -> Any:
    """The call in a program: q, k, v and, backwards, what the forward pass gave; whoever runs it knows the rest."""
    reason = missing(platform)
    if reason is not None:
        raise NotImplementedError(f"programs for {platform} do not hand calls on: {reason}")
    kept = [*range(3), *range(len(spec.roles), len(operands))]
    inner = ctx.replace(avals_in=[ctx.avals_in[n] for n in kept])
    number = number_of(Handed(spec, back, with_lse))
    call = jax.ffi.ffi_lowering(NAME)
    return call(inner, *(operands[n] for n in kept), number=np.int64(number), on_stream=np.int64(platform != "cpu"))
