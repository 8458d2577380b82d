"""What PyTorch's autograd cannot have is an error: forward derivatives, second ones, and inputs overwritten since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance import built
from torch.autograd import forward_ad

import clearhead as ch
from clearhead.torch_bridge.traced import traced_attention

GENERATOR = torch.Generator().manual_seed(3)


def normal(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).requires_grad_(grad)


def tensors(grad: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(normal(*shape, grad=grad) for shape in ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6)))


# PyTorch's forward mode still imports what PyTorch has deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kernel", ["tiled", pytest.param("compiled", marks=built)])
def test_forward_derivatives_are_refused_and_never_lost(kernel: str) -> None:
    q, k, v = tensors()
    said = f"kernel {kernel!r} refused: it gives no forward-mode derivatives; attention(…, kernel='dense') does"

    def call(q: torch.Tensor, name: str = kernel) -> torch.Tensor:
        return ch.attention(q, k, v, kernel=name)

    with forward_ad.dual_level(), pytest.raises(ch.KernelRefused) as refusal:
        call(forward_ad.make_dual(q, q))
    assert str(refusal.value) == said
    with pytest.raises(ch.KernelRefused) as refusal:
        torch.func.jvp(call, (q,), (q,))
    assert str(refusal.value) == said
    with forward_ad.dual_level():
        assert torch.equal(call(q), ch.attention(q, k, v, kernel=kernel))  # nothing to carry forward
        tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(q, q), "dense")).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(lambda q: call(q, "dense"), (q,), (q,))[1])


def test_dense_as_an_operator_says_where_it_is_differentiated_twice() -> None:
    q, k, v = tensors(grad=True)
    (dq,) = torch.autograd.grad(traced_attention(q, k, v, *[None] * 6, "dense").square().sum(), q, create_graph=True)
    with pytest.raises(ch.KernelRefused) as refusal:
        dq.sum().backward()
    assert str(refusal.value) == (
        "kernel 'dense' refused: as an operator it gives no second derivatives;"
        " outside of torch.compile and dispatch modes it does"
    )


OVERWRITTEN: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], dict[str, Any]]]] = {
    "mask": (lambda: normal(5, 7) > 0, lambda t: {"mask": t}),
    "composed mask": (lambda: normal(7) > 0, lambda t: {"mask": ~(ch.causal() & t)}),
    "lengths": (lambda: torch.tensor([3, 5]), lambda t: {"mask": ch.lengths(t)}),
    "bias": (lambda: normal(5, 7), lambda t: {"bias": t}),
    "offset of alibi": (lambda: torch.tensor([1, 2]), lambda t: {"bias": ch.alibi(4, offset=t)}),
    "table of a relative bias": (lambda: normal(32, 4), lambda t: {"bias": ch.relative_bias(t)}),
    "documents": (lambda: torch.tensor([0, 0, 1, 1, 1, 2, 2]), lambda t: {"mask": ch.documents(t)}),
    "sinks": (lambda: normal(4), lambda t: {"sinks": t}),
}


@pytest.mark.parametrize("kernel", ["tiled", pytest.param("compiled", marks=built)])
@pytest.mark.parametrize(("make", "use"), OVERWRITTEN.values(), ids=OVERWRITTEN)
def test_what_is_overwritten_before_backward_is_an_error(kernel: str, make: Any, use: Any) -> None:
    q, k, v = tensors(grad=True)
    given = make()
    output = ch.attention(q, k, v, **use(given), kernel=kernel)
    given.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
