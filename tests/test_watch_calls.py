"""Watching changes no output: every kind of call that PyTorch's attention takes, watched and not, and those it refuses.

A watched model gives what it gives unwatched, within the error budget, with the same class, dtype, shape and strides;
what is NaN there is NaN here; what PyTorch refuses is refused by PyTorch. What was not seen is named in `missed`.
"""

from __future__ import annotations

import copy
import itertools
import os
import platform
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from watched import doubled, held

import clearhead as ch

NAN, INF, LOWEST = float("nan"), float("inf"), torch.finfo(torch.float32).min
GENERATOR = torch.Generator().manual_seed(17)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


class Sub(Tensor):
    """A tensor class with nothing of its own."""


class Calls(nn.Module):
    """A model that makes one call."""

    def __init__(self, call: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.call, self.inner = call, inner

    def forward(self, cast: Callable[[Any], Any]) -> Any:
        return self.call(cast) if self.inner is None else self.call(self.inner, cast)


def outcome(model: nn.Module, cast: Callable[[Any], Any]) -> tuple[Any, ...] | Exception:
    torch.manual_seed(3)  # dropout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = model(cast)
        except Exception as error:
            return error
    return found if isinstance(found, tuple) else (found,)


def unchanged(model: nn.Module, keys: int = 7) -> ch.Seen:
    """Hold a watched model to the unwatched one, and give what was seen."""
    plain = outcome(model, lambda x: x)
    with ch.watch(model) as seen:
        got = outcome(model, lambda x: x)
    assert seen.calls or seen.missed or not isinstance(plain, tuple), "neither seen nor missed"
    if isinstance(plain, Exception) or isinstance(got, Exception):
        assert (type(got), str(got)) == (type(plain), str(plain))
        return seen
    exact = outcome(copy.deepcopy(model).double(), doubled)
    for place, (mine, theirs) in enumerate(zip(got, plain, strict=True)):
        if theirs is None:
            assert mine is None
            continue
        for what in ("shape", "dtype", "device"):
            assert getattr(mine, what) == getattr(theirs, what), what
        assert (type(mine), mine.stride()) == (type(theirs), theirs.stride())
        if torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)) and torch.equal(mine.isnan(), theirs.isnan()):
            continue
        assert isinstance(exact, tuple)
        held(mine, theirs, exact[place], keys, "watched")
    return seen


sdpa = F.scaled_dot_product_attention
Q, K, V = normal(2, 3, 5, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 6)
SIX = normal(2, 6, 5, 4)  # query heads that share key heads
SEEN = torch.rand(2, 3, 5, 7, generator=GENERATOR) < 0.6
DEAD = SEEN.clone()
DEAD[0, 1, 2] = False
ADDED = normal(2, 3, 5, 7)
LAST = torch.arange(7)[:, None] == 6  # the last key
THIRD = torch.arange(5)[:, None] == 2  # the query that sees nothing

MASKS: dict[str, Any] = {
    "bool": SEEN, "bool (5, 7)": SEEN[0, 0], "bool (5, 1)": SEEN[0, 0, :, :1], "bool (1, 7)": SEEN[0, 0, :1],
    "bool for each row": SEEN[:, :1], "expanded": SEEN[:1, :1].expand(2, 3, 5, 7), "bool of 1 axis": SEEN[0, 0, 0],
    "transposed": SEEN.mT.contiguous().mT, "bool of 5 axes": SEEN[None], "int": SEEN.int(), "too short": SEEN[..., :3],
    "a query that sees nothing": DEAD, "nobody sees anything": torch.zeros(5, 7, dtype=torch.bool),
    "float": ADDED, "float (5, 7)": ADDED[0, 0], "float16": ADDED.half(), "float64": ADDED.double(),
    "negative bit": torch.complex(ADDED, -ADDED).conj().imag,
    "zeros without memory": torch._efficientzerotensor((5, 7)),
    "-inf": torch.where(SEEN, ADDED, -INF), "-inf for one query": torch.where(DEAD, 0.0, -INF),
    "-inf for all": torch.full((5, 7), -INF), "+inf": torch.where(SEEN, ADDED, INF), "NaN": torch.full((5, 7), NAN),
    "lowest": torch.where(DEAD, 0.0, LOWEST), "lowest for all": torch.full((5, 7), LOWEST),
    "wants its gradient": ADDED.clone().requires_grad_(), "parameter": nn.Parameter(ADDED.clone()),
    "upper left": causal_upper_left(5, 7), "lower right": causal_lower_right(5, 7),
    "upper left of other sizes": causal_upper_left(4, 4), "lower right of other sizes": causal_lower_right(4, 4),
    "sparse": SEEN[0, 0].to_sparse(), "a class": SEEN.as_subclass(Sub), "a float class": ADDED.as_subclass(Sub),
}  # fmt: skip


def cast(to: Callable[[Any], Any], mask: Tensor) -> Tensor:
    """A mask in another precision; `CausalBias` has none."""
    return mask if isinstance(mask, CausalBias) else to(mask)


CALLS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda c: sdpa(c(Q), c(K), c(V)),
    **{f"mask: {name}": lambda c, m=m: sdpa(c(Q), c(K), c(V), cast(c, m)) for name, m in MASKS.items()},
    "causal": lambda c: sdpa(c(Q), c(K), c(V), is_causal=True),
    "causal, more queries": lambda c: sdpa(c(K), c(Q), c(V[:, :, :5]), is_causal=True),
    "causal and a mask": lambda c: sdpa(c(Q), c(K), c(V), SEEN, is_causal=True),
    "upper left, more queries": lambda c: sdpa(c(K), c(Q), c(V[:, :, :5]), causal_upper_left(7, 5)),
    "lower right, more queries": lambda c: sdpa(c(K), c(Q), c(V[:, :, :5]), causal_lower_right(7, 5)),
    "upper left and causal": lambda c: sdpa(c(Q), c(K), c(V), causal_upper_left(5, 7), is_causal=True),
    "lower right, grouped": lambda c: sdpa(c(SIX), c(K), c(V), causal_lower_right(5, 7), enable_gqa=True),
    **{f"scale {s}": lambda c, s=s: sdpa(c(Q), c(K), c(V), scale=s) for s in (0.3, 0.0, -1.0, INF, NAN)},
    "scale tensor": lambda c: sdpa(c(Q), c(K), c(V), scale=torch.tensor(0.3)),
    **{f"dropout {p}": lambda c, p=p: sdpa(c(Q), c(K), c(V), dropout_p=p) for p in (0.0, 0.5, 1.0, -1.0, 2.0)},
    "grouped": lambda c: sdpa(c(SIX), c(K), c(V), SEEN[:, :1], enable_gqa=True),
    "grouped, not said": lambda c: sdpa(c(SIX), c(K), c(V)),
    "grouped, key and value differ": lambda c: sdpa(c(SIX), c(K[:, :2]), c(V), enable_gqa=True),
    "grouped, does not divide": lambda c: sdpa(c(SIX[:, :5]), c(K), c(V), enable_gqa=True),
    "one head of queries": lambda c: sdpa(c(Q[:, :1]), c(K), c(V)),
    "one head of keys and values": lambda c: sdpa(c(Q), c(K[:, :1]), c(V[:, :1])),
    "one head of values": lambda c: sdpa(c(Q), c(K), c(V[:, :1])),
    "2 axes": lambda c: sdpa(c(Q[0, 0]), c(K[0, 0]), c(V[0, 0]), SEEN[0, 0]),
    "2 axes, causal": lambda c: sdpa(c(Q[0, 0]), c(K[0, 0]), c(V[0, 0]), is_causal=True),
    "2 axes, mask of 3": lambda c: sdpa(c(Q[0, 0]), c(K[0, 0]), c(V[0, 0]), SEEN[0]),
    "3 axes": lambda c: sdpa(c(Q[0]), c(K[0]), c(V[0]), c(ADDED[0])),
    "3 axes, mask of 4": lambda c: sdpa(c(Q[0]), c(K[0]), c(V[0]), SEEN[:1]),
    "5 axes": lambda c: sdpa(c(Q[None]), c(K[None]), c(V[None]), c(ADDED[None])),
    "1 axis": lambda c: sdpa(c(Q[0, 0, 0]), c(K[0, 0]), c(V[0, 0])),
    "2 and 3 axes": lambda c: sdpa(c(Q[0, 0]), c(K[0]), c(V[0])),
    "3 and 4 axes": lambda c: sdpa(c(Q[0]), c(K), c(V)),
    "one row of queries": lambda c: sdpa(c(Q[:1]), c(K), c(V)),
    "one row of keys": lambda c: sdpa(c(Q), c(K[:1]), c(V[:1])),
    "two dtypes": lambda c: sdpa(c(Q.half()), c(K), c(V)),
    "integers": lambda c: sdpa(c(Q.int()), c(K.int()), c(V.int())),
    "negative bit": lambda c: sdpa(c(torch.complex(Q, -Q).conj().imag), c(K), c(V)),
    "zeros without memory": lambda c: sdpa(torch._efficientzerotensor(Q.shape, dtype=c(Q).dtype), c(K), c(V)),
    "expanded": lambda c: sdpa(c(Q)[:1, :1].expand(2, 3, 5, 4), c(K), c(V)),
    "heads last in memory": lambda c: sdpa(c(Q).transpose(1, 2).contiguous().transpose(1, 2), c(K), c(V)),
    "every other feature": lambda c: sdpa(c(torch.cat((Q, Q), -1))[..., ::2], c(K), c(V)),
    "NaN key": lambda c: sdpa(c(Q), c(K.masked_fill(LAST, NAN)), c(V)),
    "NaN key, hidden": lambda c: sdpa(c(Q), c(K.masked_fill(LAST, NAN)), c(V), ~LAST.T),
    "inf value, hidden": lambda c: sdpa(c(Q), c(K), c(V.masked_fill(LAST, INF)), ~LAST.T),
    "NaN value, hidden by causality": lambda c: sdpa(c(Q), c(K), c(V.masked_fill(LAST, NAN)), is_causal=True),
    "NaN value, hidden by -inf": lambda c: sdpa(c(Q), c(K), c(V.masked_fill(LAST, NAN)), c(LAST.T * -1e30 * 1e30)),
    "NaN query that sees nothing": lambda c: sdpa(c(Q.masked_fill(THIRD, NAN)), c(K), c(V), DEAD),
    "scores that overflow": lambda c: sdpa(c(Q * 1e20), c(K * 1e20), c(V)),
    "inf query": lambda c: sdpa(c(Q.masked_fill(Q > 1.5, INF)), c(K), c(V)),
}  # fmt: skip


def typed(dtype: torch.dtype, mask: Tensor | None) -> Callable[[Any], Any]:
    return lambda c: sdpa(*(c(t.to(dtype)) for t in (Q, K, V)), c(mask))


for dtype in (torch.float16, torch.bfloat16, torch.float64):
    CALLS |= {
        f"{dtype}": typed(dtype, None),
        f"{dtype}, bool": typed(dtype, SEEN),
        f"{dtype}, float": typed(dtype, ADDED),
    }
    CALLS |= {
        f"{dtype}, own": typed(dtype, ADDED.to(dtype)),
        f"{dtype}, other": typed(dtype, ADDED.to(torch.float8_e5m2)),
    }


@pytest.mark.parametrize("name", CALLS)
def test_no_call_of_sdpa_is_changed(name: str) -> None:
    with torch.no_grad():
        unchanged(Calls(CALLS[name]))


def test_causal_bias_is_seen() -> None:
    for mask, align in ((causal_upper_left(5, 7), "start"), (causal_lower_right(5, 7), "end")):
        with torch.no_grad():
            seen = unchanged(Calls(lambda c, m=mask: sdpa(c(Q), c(K), c(V), m)))
        assert not seen.missed
        want = ch.observe(Q, K, V, mask=ch.causal(align=align), received=True)
        torch.testing.assert_close(seen.calls[0].observed.received, want.received)


@pytest.mark.parametrize(
    "sizes", [s for s in itertools.product((0, 2), (0, 3), (0, 5), (0, 7), (0, 4), (0, 6)) if 0 in s]
)
def test_no_empty_call_is_changed(sizes: tuple[int, ...]) -> None:
    batch, heads, queries, keys, features, width = sizes
    q, k, v = (
        normal(batch, heads, queries, features),
        normal(batch, heads, keys, features),
        normal(batch, heads, keys, width),
    )
    with torch.no_grad():
        if ends_the_process(lambda: sdpa(q, k, v)):
            pytest.skip("PyTorch divides by zero in this call, which ends the process: there is nothing to hold to")
        unchanged(Calls(lambda c: sdpa(c(q), c(k), c(v))), keys)


def ends_the_process(call: Callable[[], Any]) -> bool:
    """Does a call kill who makes it? PyTorch 2.11's of no features does so on x86, where ARM divides by zero."""
    if platform.machine() != "x86_64":
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that a child does not have
        child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            call()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_no_call_inside_autocast_is_changed(dtype: torch.dtype, own: torch.dtype, kind: torch.dtype | None) -> None:
    mask = None if kind is None else SEEN if kind == torch.bool else ADDED.to(kind)

    def call(cast: Callable[[Any], Any]) -> Tensor:
        with torch.autocast("cpu", dtype):
            return sdpa(*(cast(t.to(own)) for t in (Q, K, V)), cast(mask))

    with torch.no_grad():
        unchanged(Calls(call))


X, Y = normal(2, 5, 12), normal(2, 7, 12)
PADDED = torch.arange(5) >= torch.tensor([[3], [5]])
ALL_PADDED = torch.arange(5) >= torch.tensor([[3], [0]])
LONG = torch.arange(7) >= torch.tensor([[5], [7]])
LATER = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)

MULTI: dict[str, Callable[..., Any]] = {
    "self": lambda m, x, y, **o: m(x, x, x, **o),
    "cross": lambda m, x, y, **o: m(x, y, y, **o),
    "padding": lambda m, x, y, **o: m(x, y, y, key_padding_mask=LONG, **o),
    "float padding": lambda m, x, y, **o: m(x, y, y, key_padding_mask=LONG.to(x.dtype) * -3, **o),
    "a padded row": lambda m, x, y, **o: m(x, x, x, key_padding_mask=ALL_PADDED, **o),
    "mask": lambda m, x, y, **o: m(x, x, x, attn_mask=LATER, **o),
    "float mask": lambda m, x, y, **o: m(x, x, x, attn_mask=LATER.to(x.dtype) * -2, **o),
    "mask for each head": lambda m, x, y, **o: m(x, x, x, attn_mask=LATER.expand(6, 5, 5), **o),
    "causal": lambda m, x, y, **o: m(x, x, x, attn_mask=LATER, is_causal=True, **o),
    "causal without a mask": lambda m, x, y, **o: m(x, x, x, is_causal=True, **o),
    "mask and padding": lambda m, x, y, **o: m(x, x, x, attn_mask=LATER, key_padding_mask=PADDED, **o),
    "all -inf": lambda m, x, y, **o: m(x, x, x, attn_mask=torch.full((5, 5), -INF, dtype=x.dtype), **o),
    "weights of each head": lambda m, x, y, **o: m(x, x, x, average_attn_weights=False, **o),
    "no batch": lambda m, x, y, **o: m(x[0], x[0], x[0], attn_mask=LATER if len(x[0]) == 5 else None, **o),
    "training": lambda m, x, y, **o: m.train()(x, x, x, **o),
    "no positions": lambda m, x, y, **o: m(x[:0], x[:0], x[:0], **o),
}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {
    "plain": {}, "batch first": {"batch_first": True}, "no bias": {"bias": False}, "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True}, "kdim": {"kdim": 12, "vdim": 12}, "dropout": {"dropout": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("options", MODULES)
@pytest.mark.parametrize("name", MULTI)
def test_no_call_of_multihead_attention_is_changed(name: str, options: str, need_weights: bool) -> None:
    torch.manual_seed(1)
    module = nn.MultiheadAttention(12, 3, **MODULES[options]).eval()
    x, y = (X, Y) if module.batch_first else (X.transpose(0, 1), Y.transpose(0, 1))

    def call(inner: nn.Module, cast: Callable[[Any], Any]) -> Any:
        return MULTI[name](inner, cast(x), cast(y), need_weights=need_weights)

    with torch.no_grad():
        unchanged(Calls(call, module))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_no_precision_of_multihead_attention_is_changed(dtype: torch.dtype, need_weights: bool) -> None:
    module = nn.MultiheadAttention(12, 3, batch_first=True).eval().to(dtype)

    def call(inner: nn.Module, cast: Callable[[Any], Any]) -> Any:
        x = cast(X.to(dtype))
        return inner(x, x, x, need_weights=need_weights)

    with torch.no_grad():
        unchanged(Calls(call, module))


ENCODED: dict[str, Callable[..., Any]] = {
    "plain": lambda m, x: m(x),
    "padding": lambda m, x: m(x, src_key_padding_mask=PADDED),
    "padding on the left": lambda m, x: m(x, src_key_padding_mask=PADDED.flip(1)),
    "a padded row": lambda m, x: m(x, src_key_padding_mask=ALL_PADDED),
    "nothing padded": lambda m, x: m(x, src_key_padding_mask=PADDED & False),
    "mask": lambda m, x: m(x, mask=LATER),
    "causal": lambda m, x: m(x, mask=LATER, is_causal=True),
    "both": lambda m, x: m(x, mask=LATER, src_key_padding_mask=PADDED),
    "no batch": lambda m, x: m(x[0]),
}  # fmt: skip


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("nested", [False, True], ids=["padded", "nested"])
@pytest.mark.parametrize("name", ENCODED)
def test_no_encoder_is_changed(name: str, nested: bool, training: bool, norm_first: bool) -> None:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot nest
        encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(12), enable_nested_tensor=nested).train(training)
    with torch.no_grad():
        unchanged(Calls(lambda inner, cast: ENCODED[name](inner, cast(X)), encoder))
