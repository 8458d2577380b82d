"""What PyTorch's autograd keeps of a call, and what flows back: through output and log-sum-exp, for one or for many."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from budget import within
from conformance import built

import clearhead as ch

KERNELS = ["dense", "tiled", pytest.param("compiled", marks=built), None]
GENERATOR = torch.Generator().manual_seed(7)


def normal(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).to(dtype).requires_grad_(grad)


def leaves(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [normal(*shape, dtype=dtype, grad=True) for shape in ((2, 4, 11, 5), (2, 2, 20, 5), (2, 2, 20, 3))]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ch.causal(offset=9)},
    "softcap and scale": {"softcap": 1.5, "scale": 0.7},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(0, 7, 20), (0, 1, 5, 6, 20)])
def test_gradients_flow_through_merge(kernel: str | None, dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    given = leaves(dtype)
    weights = normal(2, 4, 11, 3)
    sinks = normal(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32, grad=True)

    def split(q: Any, k: Any, v: Any, sinks: Any, kernel: str | None) -> torch.Tensor:
        parts = [
            ch.observe(
                q,
                k[..., a:b, :],
                v[..., a:b, :],
                mask=ch.causal(offset=9 - a),
                sinks=None if a else sinks,
                kernel=kernel,
            ).partial
            for a, b in pairwise(cuts)
        ]
        return ch.merge(*parts).output

    def whole(q: Any, k: Any, v: Any, sinks: Any) -> torch.Tensor:
        return ch.attention(q, k, v, mask=ch.causal(offset=9), sinks=sinks, kernel="dense")

    mine = torch.autograd.grad((split(*given, sinks, kernel) * weights).sum(), (*given, sinks))
    wide = [a.detach().double().requires_grad_() for a in (*given, sinks)]
    exact = torch.autograd.grad((whole(*wide) * weights).sum(), wide)
    # an output that is merged from rounded parts is rounded as often: plain is the same by the formula
    plain = torch.autograd.grad((split(*given, sinks, "dense") * weights).sum(), (*given, sinks))
    for name, got, true, near in zip(("dq", "dk", "dv", "dsinks"), mine, exact, plain, strict=True):
        within(got, true, near, 20, name, size=float(true.abs().max()) * 4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_log_sum_exp_has_its_gradient_alone_and_with_the_output(kernel: str | None, options: Any) -> None:
    for use in (lambda seen: seen.lse.sin().sum(), lambda seen: seen.lse.sin().sum() + seen.output.cos().sum()):
        given = leaves()
        mine = torch.autograd.grad(use(ch.observe(*given, **options, kernel=kernel)), given, allow_unused=True)
        scores = options.get("scale", 5**-0.5) * given[0] @ given[1].repeat_interleave(2, -3).mT
        if "softcap" in options:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        if "mask" in options:
            allowed = torch.tensor(options["mask"].dense(11, 20))
            scores = scores.masked_fill(~allowed, -torch.inf)
        seen = type("Seen", (), {})()
        seen.lse, seen.output = scores.logsumexp(-1), scores.softmax(-1) @ given[2].repeat_interleave(2, -3)
        theirs = torch.autograd.grad(use(seen), given, allow_unused=True)
        for got, want in zip(mine, theirs, strict=True):
            if got is not None or want is not None:  # values have nothing to do with the log-sum-exp
                torch.testing.assert_close(zero(got, want), zero(want, got))


def zero(gradient: torch.Tensor | None, like: Any) -> torch.Tensor:
    """A gradient; zeros where nothing depends on it."""
    return torch.zeros_like(like) if gradient is None else gradient


@pytest.mark.parametrize("kernel", KERNELS)
def test_whether_an_observation_has_a_gradient_does_not_depend_on_the_kernel(kernel: str | None) -> None:
    seen = ch.observe(*leaves(), kernel=kernel, top=3, received=True, map=(2, 2), queries=[0], weights=True)
    assert seen.output.requires_grad
    assert seen.lse.requires_grad
    others = (seen.max_score, seen.entropy, seen.top.weights, seen.received, *seen.map, seen.queries.weights)
    assert not any(a.requires_grad for a in (*others, seen.weights))
    q, k, v = leaves()
    assert not ch.observe(q.detach(), k.detach(), v, kernel=kernel).lse.requires_grad, "values are no part of it"
    merged = ch.merge(seen.partial, seen.partial)
    assert merged.output.requires_grad
    assert merged.lse.requires_grad
    assert not merged.entropy.requires_grad
    assert not merged.max_score.requires_grad


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_that_sees_nothing_sends_nothing_back(kernel: str | None) -> None:
    given = leaves()
    seen = ch.observe(*given, mask=ch.causal(offset=-4), kernel=kernel)
    assert (seen.lse[..., :4] == -torch.inf).all()
    (seen.output.sum() + torch.where(torch.isinf(seen.lse), 0.0, seen.lse).sum()).backward()
    for a in given:
        assert torch.isfinite(a.grad).all()
    assert not given[0].grad[..., :4, :].any()


MANY: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "is_grads_batched": lambda o, given, douts: torch.autograd.grad(
        o, given, douts, is_grads_batched=True, retain_graph=True
    ),
    "torch.func.vmap": lambda o, given, douts: torch.func.vmap(
        lambda dout: torch.autograd.grad(o, given, dout, retain_graph=True)
    )(douts),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("many", MANY.values(), ids=MANY)
def test_gradients_for_many_at_once(kernel: str | None, many: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    given = [*leaves(), normal(4, grad=True)]
    bias, mask = normal(11, 20), normal(11, 20) > -1
    seen = ch.observe(*given[:3], sinks=given[3], mask=mask & ch.causal(), bias=bias, kernel=kernel)
    for result in (seen.output, seen.lse):
        some = given if result is seen.output else [given[0], given[1], given[3]]
        douts = normal(7, *result.shape)
        found = many(result, some, douts)
        for i, dout in enumerate(douts):
            alone = torch.autograd.grad(result, some, dout, retain_graph=True)
            for got, want in zip(found, alone, strict=True):
                torch.testing.assert_close(got[i], want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_jacobians_in_one_go(kernel: str | None) -> None:
    q, k, v = (a.detach() for a in leaves())

    def call(q: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, k, v, mask=ch.causal(), kernel=kernel)

    at_once = torch.autograd.functional.jacobian(call, q, vectorize=True)
    torch.testing.assert_close(at_once, torch.autograd.functional.jacobian(call, q))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "dense"])
def test_all_that_is_kept_goes_through_the_hooks_on_saved_tensors(kernel: str | None) -> None:
    """So that it can be freed, offloaded or counted: nothing that is large stays behind in the graph."""
    given = [a.detach() for a in leaves()]
    sinks, bias, mask = normal(4), normal(11, 20), normal(11, 20) > -1
    shelf: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        shelf.append(tensor.detach().clone())
        return len(shelf) - 1

    def call(q: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, *given[1:], sinks=sinks, bias=bias, mask=mask, kernel=kernel)

    leaf = given[0].clone().requires_grad_()
    (want,) = torch.autograd.grad(call(leaf).square().sum(), leaf)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: shelf[number]):
        output = call(leaf)
    for tensor in (*given[1:], sinks, bias, mask):  # what the graph reads lies on the shelf: these are read no more
        tensor.zero_()
    (got,) = torch.autograd.grad(output.square().sum(), leaf)
    torch.testing.assert_close(got, want)


def test_checkpointed_layers_keep_no_more_than_pytorchs_own() -> None:
    """Of each layer, its input: keys and values of all layers but one are gone."""
    kept: dict[str, int] = {}
    for name, attend in {
        "clearhead": lambda q, k, v: ch.attention(q, k, v),
        "pytorch": torch.nn.functional.scaled_dot_product_attention,
    }.items():
        alive: list[Any] = []

        def layer(x: torch.Tensor, attend: Any = attend, alive: list[Any] = alive) -> torch.Tensor:
            k, v = x * 2, x * 3
            alive.extend(a.untyped_storage()._weak_ref() for a in (k, v))
            return x + attend(x * 1.5, k, v)

        x = normal(1, 2, 64, 16, grad=True)
        y = x
        for _ in range(4):
            y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
        kept[name] = sum(not torch.UntypedStorage._expired(ref) for ref in alive)
        y.sum().backward()
    assert kept == {"clearhead": 0, "pytorch": 0}


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda a: a.T,
    "backwards": lambda a: a[::-1],
    "as it is": lambda a: a,
    "a part": lambda a: a[:, :6],
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_numpy_view_of_a_tensor_is_the_same_view_backwards(kernel: str | None, view: Callable[[Any], Any]) -> None:
    q, k, v = (normal(2, 6, 5, grad=True) for _ in range(3))
    for name, tensor in (("mask", normal(6, 6) > -0.5), ("bias", normal(6, 6))):
        seen = view(tensor.numpy())
        found = [
            torch.autograd.grad(ch.attention(q, k, v, **{name: a}, kernel=kernel).square().sum(), (q, k, v))
            for a in (seen, seen.copy())
        ]
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k not in ("dense", None)])
def test_gradients_for_many_are_differentiated_no_further_and_say_so(kernel: str) -> None:
    q, k, v = (a.detach() for a in leaves())
    q.requires_grad_()
    jacobian = torch.autograd.functional.jacobian(
        lambda q: ch.attention(q, k, v, kernel=kernel), q, create_graph=True, vectorize=True
    )
    with pytest.raises(ch.KernelRefused, match="it gives no second derivatives"):
        (jacobian.square().sum() + q.square().sum()).backward()
