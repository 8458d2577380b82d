"""Attention as PyTorch operators: compiled, exported, transformed, on fake and meta tensors, differentiated twice."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from budget import check, expected, within
from cases import CASES, Case
from conformance import built
from libraries import LIBRARIES, numbers
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import clearhead as ch
from clearhead.core.grid import Grid
from clearhead.core.mask import as_mask
from clearhead.core.positions import as_bias
from clearhead.torch_bridge import ops, traced
from clearhead.torch_bridge.wire import pack_bias, pack_mask, unpack_bias, unpack_mask

TORCH = next(library for library in LIBRARIES if library.name == "torch")
GENERATOR = torch.Generator().manual_seed(3)


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=GENERATOR).requires_grad_(grad)


def tensors(dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(normal(*shape, dtype=dtype, grad=grad) for shape in ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6)))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    names = ("mask", "bias", "scale", "softcap", "sinks", "dropout", "kernel")
    return traced.traced_attention(q, k, v, *(options.get(name) for name in names))


# every other: what is behind the operator is held to all of them, and so is the way of masks and biases into it, below
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_the_operator_conforms(case: Case) -> None:
    arrays, dout, options = case.build()
    q, k, v = (TORCH.make(array).requires_grad_() for array in arrays)
    options = TORCH.options(options)
    output = operator(q, k, v, **options)
    keys = max(q.shape[-2], k.shape[-2])
    check(numbers(output), expected(case.name)["output"], keys, "output")
    found = torch.autograd.grad(output, (q, k, v), TORCH.make(dout).reshape(output.shape))
    for what, gradient in zip(("dq", "dk", "dv"), found, strict=True):
        check(numbers(gradient), expected(case.name)[what], keys, what)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks_and_biases_survive_the_wire(case: Case) -> None:
    (q, k, v), _, options = case.build()
    arrays: list[torch.Tensor] = []
    whole: list[int] = []
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]) if q.ndim > 2 else ()
    sizes = {"queries": q.shape[-2], "keys": k.shape[-2], "batch": batch, "heads": q.shape[-3] if q.ndim > 2 else 1}
    if "mask" in options:
        mask = as_mask("mask", options["mask"])
        back = unpack_mask(pack_mask(mask, arrays, whole), arrays, whole)
        assert repr(back) == repr(mask)
        assert np.array_equal(back.dense(**sizes), mask.dense(**sizes))
    if "bias" in options:
        bias = as_bias(options["bias"])
        back_bias = unpack_bias(*_packed(bias, arrays, whole))
        assert repr(back_bias) == repr(bias)
        all_of = Grid(batch, sizes["heads"], sizes["queries"], sizes["keys"])
        tiles = [b.tile(range(all_of.queries), range(all_of.keys), all_of) for b in (bias, back_bias)]
        assert np.array_equal(*map(numbers, tiles), equal_nan=True)


def _packed(bias: Any, arrays: list[torch.Tensor], whole: list[int]) -> tuple[Any, ...]:
    text, learned = pack_bias(bias, arrays, whole)
    return text, arrays, whole, learned


def test_a_mask_of_ones_own_is_refused_where_it_would_be_traced() -> None:
    class Odd(ch.Mask):
        def tile(self, rows: range, columns: range, grid: Any) -> Any:
            return True

    with pytest.raises(ch.ArgumentError) as refusal:
        pack_mask(Odd(), [], [])
    assert str(refusal.value) == "mask: is a Odd, which cannot be traced; where(mask.dense(queries, keys)) can"


BUILT: dict[str, Callable[[], Any]] = {
    "causal": lambda: ch.causal(),
    "window": lambda: ch.window(3, 1) & ch.causal(),
    "offset by row": lambda: ch.causal(offset=[1, 2]),
    "lengths": lambda: ch.lengths([3, 5]),
    "documents": lambda: ch.documents([0, 0, 0, 1, 1, 1, 1]),
    "Longformer": lambda: ch.window(1, 1) | ch.global_tokens([0]),
    "random blocks": lambda: ch.random_blocks(2, count=1),
    "tensor": lambda: torch.ones(5, 7, dtype=torch.bool).tril(),
    "array": lambda: np.tril(np.ones((5, 7), bool)),
    "array and causal": lambda: ch.causal() & ch.where(torch.ones(5, 7, dtype=torch.bool).triu()),
}


def test_compiled_in_one_graph_with_masks_from_inside_and_outside() -> None:
    q, k, v = tensors(grad=True)
    want = [ch.attention(q, k, v, mask=make()) for make in BUILT.values()]

    @torch.compile(fullgraph=True, backend="eager")  # what is traced differs; what becomes of it is looked at outside
    def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [ch.attention(q, k, v, mask=make()) for make in BUILT.values()]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def outside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: list[Any]) -> list[torch.Tensor]:
        return [ch.attention(q, k, v, mask=mask) for mask in masks]

    traced = inside(q, k, v), outside(q, k, v, [make() for make in BUILT.values()])
    dout = torch.randn_like(want[0])
    for name, right, *found in zip(BUILT, want, *traced, strict=True):
        assert all(torch.equal(output, right) for output in found), name
        gradients = (torch.autograd.grad(o, (q, k, v), dout, retain_graph=True) for o in (found[1], right))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), name


def test_a_changed_mask_is_never_taken_for_the_old_one() -> None:
    q, k, v = tensors()
    call = torch.compile(lambda mask: ch.attention(q, k, v, mask=mask), fullgraph=True, backend="eager")
    masks = [ch.window(1), ch.window(2), ch.window(3), ch.window(3, 1), ch.causal(), ~ch.causal(), ch.prefix(2)]
    masks += [ch.lengths(2), ch.lengths([3, 5]), ch.lengths([5, 3]), ch.causal(align="start"), ch.causal(offset=1)]
    with torch._dynamo.config.patch(recompile_limit=64):
        for mask in [*masks, *reversed(masks)]:
            torch.testing.assert_close(call(mask), ch.attention(q, k, v, mask=mask), rtol=0, atol=0)


def test_other_lengths_of_the_same_mask_are_not_compiled_again() -> None:
    counted = CompileCounter()
    call = torch.compile(lambda q, k, v, n: ch.attention(q, k, v, mask=ch.lengths(n)), fullgraph=True, backend=counted)
    q, k, v = tensors()
    for n in ([3, 5], [7, 1], [0, 2]):
        torch.testing.assert_close(
            call(q, k, v, torch.tensor(n)), ch.attention(q, k, v, mask=ch.lengths(n)), rtol=0, atol=0
        )
    assert counted.frame_count == 1


def test_lengths_that_vary_are_compiled_once() -> None:
    counted = CompileCounter()
    call = torch.compile(
        lambda q, k, v: ch.attention(q, k, v, mask=ch.causal() & ch.window(3)),
        fullgraph=True,
        dynamic=True,
        backend=counted,
    )
    for n in (5, 9, 17):
        q, k, v = (normal(2, 3, n, 4) for _ in range(3))
        want = ch.attention(q, k, v, mask=ch.causal() & ch.window(3))
        torch.testing.assert_close(call(q, k, v), want, rtol=0, atol=0)
    assert counted.frame_count == 1


def test_every_option_compiles_and_learns() -> None:
    q, k, v = tensors(grad=True)
    table, sinks, bias = normal(32, 4, grad=True), normal(4, grad=True), normal(4, 1, 7, grad=True)
    calls: dict[str, Callable[..., torch.Tensor]] = {
        "relative": lambda: ch.attention(q, k, v, bias=ch.relative_bias(table)),
        "alibi": lambda: ch.attention(q, k, v, bias=ch.alibi(4)),
        "bias": lambda: ch.attention(q, k, v, bias=bias, softcap=2.0),
        "sinks": lambda: ch.attention(q, k, v, sinks=sinks, scale=0.3),
        "dropout": lambda: ch.attention(q, k, v, dropout=(0.3, 2**63 + 5)),
        "dense": lambda: ch.attention(q, k, v, kernel="dense"),
    }
    for name, call in calls.items():
        want, got = call(), torch.compile(call, fullgraph=True, backend="aot_eager")()
        assert torch.equal(got, want), name
        leaves = [q, k, v, *{"relative": [table], "bias": [bias], "sinks": [sinks]}.get(name, [])]
        dout = torch.randn_like(want)
        for a, b in zip(*(torch.autograd.grad(o, leaves, dout) for o in (got, want)), strict=True):
            torch.testing.assert_close(a, b, msg=name)


def test_a_seed_drawn_in_the_graph_drops_anew_each_time() -> None:
    q, k, v = tensors()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call() -> torch.Tensor:
        return ch.attention(q, k, v, dropout=(0.5, torch.randint(2**62, ())))

    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert torch.equal(call(), first)
    assert not torch.equal(first, second)
    seed = torch.tensor(2**40 + 7)
    assert torch.equal(ch.attention(q, k, v, dropout=(0.5, seed)), ch.attention(q, k, v, dropout=(0.5, 2**40 + 7)))


def test_observing_while_compiling_is_refused_and_falls_back_between_graphs() -> None:
    q, k, v = tensors()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda: ch.observe(q, k, v).lse + 1, fullgraph=True, backend="eager")()
    with pytest.raises(ch.ArgumentError, match='q: is traced, expected numbers: it is on "meta"'):
        ch.observe(*(a.to("meta") for a in (q, k, v)))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_saved_and_loaded(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return ch.attention(q, k, v, mask=ch.causal() & ch.lengths(n), bias=ch.alibi(4))

    q, k, v = tensors()
    n = torch.tensor([3, 7])
    program = torch.export.export(Module(), (q, k, v, n), strict=strict)
    assert "clearhead.attention" in str(program.graph)
    held = io.BytesIO()
    torch.export.save(program, held)
    held.seek(0)
    loaded = torch.export.load(held).module()
    for lengths in (n, torch.tensor([1, 2])):
        want = ch.attention(q, k, v, mask=ch.causal() & ch.lengths(lengths), bias=ch.alibi(4))
        assert torch.equal(loaded(q, k, v, lengths), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_meta_and_fake_tensors_have_the_right_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    real = tensors(dtype)
    options: dict[str, Any] = {"mask": ch.causal() & ch.lengths([3, 7]), "bias": ch.alibi(4), "softcap": 2.0}
    want = ch.attention(*real, **options)
    meta = ch.attention(*(a.to("meta") for a in real), **options)
    with FakeTensorMode() as mode:
        fake = ch.attention(*(mode.from_tensor(a) for a in real), **options)
        flat = ch.attention(*(mode.from_tensor(a)[0, 0] for a in real))
    for stand_in in (meta, fake):
        assert (stand_in.shape, stand_in.dtype, stand_in.stride()) == (want.shape, want.dtype, want.stride())
    assert meta.device.type == "meta"
    assert flat.shape == (5, 6)
    with pytest.raises(ch.ArgumentError, match=r"mask: has shape \(9, 9\), which does not broadcast"):
        ch.attention(*(a.to("meta") for a in real), mask=torch.ones(9, 9, dtype=torch.bool, device="meta"))
    with pytest.raises(ch.ArgumentError, match="alibi: is for 3 heads, but the queries have 4"):
        ch.attention(*(a.to("meta") for a in real), bias=ch.alibi(3))


def test_a_tracer_of_operators_sees_one() -> None:
    graph = make_fx(lambda q, k, v: ch.attention(q, k, v, mask=ch.causal()))(*tensors()).graph
    assert next(str(node.target) for node in graph.nodes if node.op == "call_function") == "clearhead.attention.default"


@pytest.mark.parametrize("name", ["causal", "everything", "relative bias", "one head, two dimensions", "float16"])
def test_pytorchs_own_check_of_operators(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    arrays, _, options = case.build()
    inputs: list[Any] = []

    def record(*given: Any) -> tuple[torch.Tensor]:
        inputs.extend(given)
        return (torch.zeros(()),)

    q, k, v = (TORCH.make(a).requires_grad_() for a in arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "attention", record)
        operator(q, k, v, **TORCH.options(options))
    torch.library.opcheck(ops.attention, tuple(inputs))


AXES = [((0, 0, 0), 0), ((1, None, 2), 0), ((None, 0, None), 1), ((0, None, None), 0)]


@pytest.mark.parametrize(("in_dims", "out_dim"), AXES, ids=str)
@pytest.mark.parametrize("flat", [False, True], ids=["heads", "one head"])
@pytest.mark.parametrize("kernel", [None, "dense"])
def test_vmap_is_a_loop(in_dims: Any, out_dim: int, flat: bool, kernel: str | None) -> None:
    shapes = ((5, 3), (7, 3), (7, 6)) if flat else ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6))
    inputs = [
        normal(*(shape if dim is None else (*shape[:dim], 3, *shape[dim:])))
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, k, v, mask=ch.causal(), kernel=kernel)

    def at(i: int) -> list[torch.Tensor]:
        return [a if dim is None else a.select(dim, i) for a, dim in zip(inputs, in_dims, strict=True)]

    got = torch.func.vmap(call, in_dims=in_dims, out_dims=out_dim)(*inputs)
    torch.testing.assert_close(got, torch.stack([call(*at(i)) for i in range(3)], out_dim))

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return (call(*given) ** 2).sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=in_dims)(*inputs)
    one_by_one = [torch.func.grad(loss, argnums=(0, 1, 2))(*at(i)) for i in range(3)]
    for place, gradient in enumerate(each):
        torch.testing.assert_close(gradient, torch.stack([found[place] for found in one_by_one]))


def test_vmap_over_lengths_sinks_tables_and_dropout_is_a_loop() -> None:
    q, k, v = tensors()
    lengths = torch.tensor([[3, 7], [1, 2]])
    sinks, table = normal(2, 4), normal(2, 32, 4)

    def call(n: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, k, v, mask=ch.lengths(n), sinks=s, bias=ch.relative_bias(t), dropout=(0.3, 5))

    got = torch.func.vmap(call)(lengths, sinks, table)
    torch.testing.assert_close(got, torch.stack([call(*each) for each in zip(lengths, sinks, table, strict=True)]))
    grad = torch.func.grad(lambda s, t, n: call(n, s, t).square().sum(), argnums=(0, 1))
    each = torch.func.vmap(grad)(sinks, table, lengths)
    loop = [grad(*given) for given in zip(sinks, table, lengths, strict=True)]
    for place in range(2):
        torch.testing.assert_close(each[place], torch.stack([found[place] for found in loop]))


def test_dense_is_differentiated_twice() -> None:
    shapes = ((2, 3, 2), (1, 4, 2), (1, 4, 3), (2, 3, 4), (2,))
    q, k, v, bias, sinks = (normal(*shape, dtype=torch.float64, grad=True) for shape in shapes)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, bias, sinks = inputs
        return ch.attention(q, k, v, mask=ch.causal(), bias=bias, sinks=sinks, softcap=3.0, kernel="dense")

    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks))
    assert torch.autograd.gradgradcheck(call, (q, k, v, bias, sinks))
    few = [a[:1, :2].detach() for a in (q, k, v)]

    def loss(q: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, *few[1:], kernel="dense").sum()

    twice = torch.func.jacrev(torch.func.jacrev(loss))(few[0])
    torch.testing.assert_close(twice, torch.autograd.functional.hessian(loss, few[0]))


@pytest.mark.parametrize("kernel", ["tiled", pytest.param("compiled", marks=built)])
@pytest.mark.parametrize("by", [ch.attention, operator], ids=["eager", "operator"])
def test_other_kernels_are_differentiated_once_and_say_so(kernel: str, by: Callable[..., torch.Tensor]) -> None:
    shapes = ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3))
    q, k, v = (normal(*shape, dtype=torch.float64, grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(lambda *inputs: by(*inputs, mask=ch.causal(), kernel=kernel), (q, k, v))
    (dq,) = torch.autograd.grad(by(q, k, v, kernel=kernel).square().sum(), q, create_graph=True)
    with pytest.raises(ch.KernelRefused) as refusal:
        dq.sum().backward()
    said = f"kernel {kernel!r} refused: it gives no second derivatives; attention(…, kernel='dense') does"
    assert str(refusal.value) == said


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast_is_followed_as_pytorch_does(dtype: torch.dtype, to: torch.dtype) -> None:
    x = normal(2, 3, 5, 4).to(dtype)
    with torch.autocast("cpu", to):
        got, theirs = ch.attention(x, x, x), torch.nn.functional.scaled_dot_product_attention(x, x, x)
        seen = ch.observe(x, x, x).output
        inner = torch.compile(lambda x: ch.attention(x, x, x), fullgraph=True, backend="aot_eager")(x)
    assert got.dtype == theirs.dtype == seen.dtype == inner.dtype
    exact = ch.attention(*(3 * [x.double()]))
    within(got, exact, theirs, 5)
    within(inner, exact, theirs, 5)
    assert ch.attention(x, x, x).dtype == dtype
