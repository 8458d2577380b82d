"""Every kind of tensor that PyTorch has, in every place where one may be given; each try in a process of its own.

`python tests/tensor_kinds.py` prints what came of each as JSON: "right", "shape" (right for tensors without numbers),
"refused: …", or what went wrong. A crash costs one try and not the others.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import clearhead as ch
import clearhead.nn

GENERATOR = torch.Generator().manual_seed(5)
LOST: list[Tensor] = []


class Marked(Tensor):
    """A class with nothing of its own."""


class Wrapped(Tensor):
    """A tensor around another one, with operators of its own that take it off and put it on again."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        off = lambda x: x.inner if isinstance(x, Wrapped) else x  # noqa: E731  # a pair, read together
        on = lambda x: Wrapped(x) if isinstance(x, Tensor) else x  # noqa: E731  # a pair, read together
        map_ = torch.utils._pytree.tree_map
        return map_(on, func(*map_(off, args), **map_(off, kwargs or {})))


class Deaf(Wrapped):
    """The same, but it takes no operators at all."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def negated(tensor: Tensor) -> Tensor:
    """The same numbers behind PyTorch's negative bit; booleans have none."""
    if tensor.dtype == torch.bool:
        return tensor
    return torch.complex(tensor, -tensor).conj().imag.requires_grad_(tensor.requires_grad)


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor whose memory was given back, as sharded training does."""
    gone = tensor.clone()
    gone.untyped_storage().resize_(0)
    return gone


def escaped(tensor: Tensor) -> Tensor:
    """A tensor that has left the transform it belongs to."""
    LOST.clear()
    torch.func.vmap(lambda x: (LOST.append(x), x)[1])(tensor[None])
    return LOST[0]


def inferred(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def distributed(tensor: Tensor) -> Tensor:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return DTensor.from_local(tensor, init_device_mesh("cpu", (1,)))


def sparse_rows(tensor: Tensor) -> Tensor:
    """CSR, which wants as many numbers in every matrix; else COO."""
    return tensor.to_sparse_csr() if tensor.ndim >= 2 and bool(tensor.all()) else tensor.to_sparse()


def halves(tensor: Tensor) -> list[Tensor]:
    return list(tensor.reshape(2, -1)) if tensor.numel() % 2 == 0 else [tensor]


FAKE = FakeTensorMode()

# the tensor, and which numbers are in it where they are others
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "negative": negated,
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "lazy copy": torch._lazy_clone,
    "inference": inferred,
    "marked": lambda t: t.as_subclass(Marked),
    "wrapped": Wrapped,
    "deaf": Deaf,
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": sparse_rows,
    "mkldnn": lambda t: t if t.dtype == torch.bool else t.to_mkldnn(),
    "functional": torch._to_functional_tensor,
    "nested": lambda t: torch.nested.nested_tensor(halves(t)),
    "jagged": lambda t: torch.nested.nested_tensor(halves(t), layout=torch.jagged),
    "masked": lambda t: masked_tensor(t, torch.ones(t.shape, dtype=torch.bool)),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
    "complex": lambda t: t.to(torch.complex64).conj(),
    "distributed": distributed,
    "without memory": without_memory,
    "escaped": escaped,
    "uninitialised": lambda t: torch.nn.parameter.UninitializedParameter(),
    "causal bias": lambda t: causal_lower_right(5, 7),
    "upper left bias": lambda t: causal_upper_left(5, 7),
    "fake": FAKE.from_tensor,
    "meta": lambda t: t.to("meta"),
}


def problem() -> dict[str, Tensor]:
    """One problem, in distinct primes, with a mask, a bias and sinks for it; the first axis is even."""
    shapes = {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4), "v": (2, 3, 7, 6), "dout": (2, 3, 5, 6), "bias": (2, 3, 5, 7)}
    found = {name: torch.randn(shape, generator=GENERATOR) for name, shape in shapes.items()}
    found["sinks"] = torch.randn(3, generator=GENERATOR)
    found["mask"] = torch.rand(2, 3, 5, 7, generator=GENERATOR) < 0.7
    return found


def differentiated(x: dict[str, Tensor]) -> list[Tensor]:
    """PyTorch's own backward, with the tensor as the gradient that comes in."""
    leaves = [x[name].detach().requires_grad_() for name in "qkv"]
    return list(torch.autograd.grad(ch.attention(*leaves), leaves, x["dout"]))


def attend(*names: str) -> Callable[[dict[str, Any]], Any]:
    """`attention` of the problem with some of its options."""
    return lambda x: ch.attention(x["q"], x["k"], x["v"], **{name: x[name] for name in names})


def sdpa(x: dict[str, Any], mask: Any = None) -> Any:
    return clearhead.nn.functional.scaled_dot_product_attention(x["q"], x["k"], x["v"], mask)


# which of the arrays are of the kind, and what is done with them
USES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "attention": ("q k v", attend()),
    "q alone": ("q", attend()),
    "k alone": ("k", attend()),
    "tiled": ("q k v", lambda x: ch.attention(x["q"], x["k"], x["v"], kernel="tiled")),
    "dense": ("q k v", lambda x: ch.attention(x["q"], x["k"], x["v"], kernel="dense")),
    "observe": ("q k v", lambda x: ch.observe(x["q"], x["k"], x["v"], top=2).output),
    "gradients": ("q k v dout", lambda x: list(ch.gradients(x["q"], x["k"], x["v"], x["dout"]))),
    "dout": ("dout", lambda x: list(ch.gradients(x["q"], x["k"], x["v"], x["dout"]))),
    "backward": ("dout", differentiated),
    "mask": ("mask", attend("mask")),
    "where": ("mask", lambda x: ch.attention(x["q"], x["k"], x["v"], mask=ch.where(x["mask"]) & ch.causal())),
    "observe mask": ("mask", lambda x: ch.observe(x["q"], x["k"], x["v"], mask=x["mask"]).output),
    "bias": ("bias", attend("bias")),
    "sinks": ("sinks", attend("sinks")),
    "plan": ("q k v", lambda x: torch.tensor(ch.plan(x["q"], x["k"], x["v"]).flops)),
    "sdpa": ("q k v", sdpa),
    "sdpa mask": ("mask", lambda x: sdpa(x, x["mask"])),
    "sdpa bias": ("bias", lambda x: sdpa(x, x["bias"])),
}  # fmt: skip


def numbers(kind: str, tensor: Tensor) -> Any:
    """The numbers that a tensor of this kind stands for."""
    if kind == "zeros without memory":
        return torch.zeros_like(tensor)
    if kind in ("causal bias", "upper left bias") and tensor.shape[-2:] == (5, 7):
        return torch.ones(5, 7, dtype=torch.bool).tril(2 if kind == "causal bias" else 0)
    return tensor


def attempt(kind: str, use: str) -> str:
    """What came of one kind of tensor in one place."""
    places, call = USES[use]
    given = problem()
    names = places.split()
    odd = {name: KINDS[kind](given[name]) for name in names}
    try:
        found = call({**given, **odd})
    except ch.ArgumentError as error:
        return f"refused: {error}"
    right = call({**given, **{name: numbers(kind, given[name]) for name in names}})
    if isinstance(right, Tensor):
        found, right = [found], [right]
    for got, want in zip(found, right, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"wrong: {tuple(got.shape)} of {got.dtype} for {tuple(want.shape)} of {want.dtype}"
        if got.is_meta or type(got).__name__ == "FakeTensor":
            return "shape"
        got = got.inner if isinstance(got, Wrapped) else got
        if not torch.allclose(got.as_subclass(Tensor), want, rtol=0, atol=2e-6):
            return f"wrong: off by {float((got - want).abs().max()):.3g}"
    return "right"


def tried(kind: str, use: str) -> str:
    """The same, and what was raised where it should not be."""
    try:
        return attempt(kind, use)
    except BaseException as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"


def apart(kind: str, uses: list[str]) -> dict[str, str]:
    """One kind in several places, in a process of its own: where it ends by a signal, each place in one of its own."""
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if not child:
            json.dump({use: tried(kind, use) for use in uses}, answer)
            answer.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            answer.seek(0)
            found: dict[str, str] = json.load(answer)
            return found
    if len(uses) == 1:
        return {uses[0]: f"crashed: signal {os.WTERMSIG(status)}"}
    return {use: words for one in uses for use, words in apart(kind, [one]).items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a fork has no threads
    ch.set_threads(1)
    chosen = sys.argv[1:] or list(KINDS)
    print(json.dumps({kind: apart(kind, list(USES)) for kind in chosen}))
