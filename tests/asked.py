"""A drawn problem put to clearhead: arrays laid out in memory, masks and biases made, the verb called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import interpreted
import ml_dtypes
import numpy as np
import pytest
import torch
from drawn import Drawn, bias_array, buckets_of, number_type, table_array
from libraries import LIBRARIES
from meaning import Sizes, Tree, block_table, document_ids, where_array
from reference import Question

import clearhead as ch
from clearhead.kernels.compiled import compiled, native
from clearhead.kernels.tiled import tiled

BY_NAME = {library.name: library for library in LIBRARIES}


def by_row(values: Any, drawn: Drawn) -> Any:
    """A number, or the numbers of each batch row in turn as an array of the batch's shape."""
    if not isinstance(values, tuple):
        return values
    return np.resize(np.array(values), drawn.whole_batch) if drawn.whole_batch else values[0]


def placed(align: str, offset: Any, drawn: Drawn) -> dict[str, Any]:
    return {"align": align} if offset is None else {"offset": by_row(offset, drawn)}


def in_batch(array: np.ndarray, drawn: Drawn) -> np.ndarray:
    """(rows or 1, …) with the batch's own axes, as many as there are."""
    if not drawn.whole_batch:
        return array[0]
    if array.shape[0] == 1:
        return array.reshape((1,) * len(drawn.whole_batch) + array.shape[1:])
    return array.reshape(*drawn.whole_batch, *array.shape[1:])


def made_mask(tree: Tree, drawn: Drawn, make: Callable[[np.ndarray], Any]) -> Any:
    """The mask value that a tree stands for."""
    kind, *given = tree
    if kind in ("and", "or", "not"):
        parts = [made_mask(part, drawn, make) for part in given]
        return ~parts[0] if kind == "not" else parts[0] & parts[1] if kind == "and" else parts[0] | parts[1]
    if kind == "causal":
        return ch.causal(**placed(*given, drawn))
    if kind == "window":
        return ch.window(given[0], given[1], **placed(*given[2:], drawn))
    if kind in ("lengths", "prefix"):
        return getattr(ch, kind)(by_row(given[0], drawn))
    if kind == "documents":
        keys, own = document_ids(tree, drawn.sizes)
        ids = [None if a is None else a[0] if len(a) == 1 else in_batch(a, drawn) for a in (keys, own)]
        return ch.documents(ids[0], ids[1])
    if kind == "global_tokens":
        return ch.global_tokens(given[0], **placed(*given[1:], drawn))
    if kind == "random_blocks":
        return ch.random_blocks(given[0], count=given[1], seed=given[2])
    if kind == "blocks":
        return ch.blocks(make(in_batch(block_table(tree, drawn.sizes), drawn)), given[0])
    if kind == "dilated":
        return ch.dilated(given[0], given[1], given[2], **placed(*given[3:], drawn))
    if kind in ("strided", "first_tokens"):
        return getattr(ch, kind)(given[0], **placed(*given[1:], drawn))
    return ch.where(make(in_batch(where_array(tree, drawn.sizes), drawn)))


def made_bias(drawn: Drawn, make: Callable[[np.ndarray], Any]) -> Any:
    """The bias value, or array, that a tree stands for; and the array that PyTorch may want the gradient of."""
    assert drawn.bias is not None
    kind, *given = drawn.bias
    if kind == "array":
        array = make(in_batch(bias_array(drawn), drawn).astype(given[1]))
        return array, array
    if kind == "alibi":
        return ch.alibi(drawn.sizes.heads, **placed(*given, drawn)), None
    table = make(table_array(drawn))
    _, both, most, *place = given
    return ch.relative_bias(table, bidirectional=both, max_distance=most, **placed(*place, drawn)), table


def laid_out(array: np.ndarray, layout: str, library: str) -> Any:
    """The array in a library, in memory as the layout says."""
    make = BY_NAME[library].make
    if layout == "read-only":
        array.flags.writeable = False
    if layout == "fortran":
        array = np.asfortranarray(array)
    if layout == "reversed":
        array = array[..., ::-1, ::-1].copy()[..., ::-1, ::-1]
    if library in ("jax", "strict") or layout in ("plain", "read-only", "fortran", "reversed"):
        return make(array)
    if layout == "transposed":
        return make(np.swapaxes(array, -2, -3).copy()).swapaxes(-2, -3)
    if layout == "sliced":
        return make(np.repeat(array, 2, axis=-2))[..., ::2, :]
    if layout == "wide":
        wide = np.concatenate([np.full_like(array[..., :1], 7), array, np.full_like(array[..., :2], 9)], axis=-1)
        return make(wide)[..., 1 : 1 + array.shape[-1]]
    if layout == "negative":
        return torch._neg_view(make(-array))
    assert layout == "expanded"
    if 0 in array.shape:
        return make(array)
    one = make(array[..., :1, :, :].copy())
    return np.broadcast_to(one, array.shape) if library == "numpy" else one.expand(array.shape)


@contextmanager
def set_up(drawn: Drawn) -> Iterator[None]:
    """The instruction set and the size of tiles that a problem names, for as long as it runs."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        if drawn.isa:
            patch.setattr(compiled, "isa", drawn.isa)
        if drawn.kernel == "triton":
            interpret(drawn, patch)
        elif drawn.tile is not None:
            patch.setattr(tiled, "rows", drawn.tile[0])
            patch.setattr(tiled, "columns", drawn.tile[1])
        yield


def interpret(drawn: Drawn, patch: pytest.MonkeyPatch) -> None:
    """The GPU kernels in Triton's interpreter, nothing known of earlier calls; in small tiles, or with keys split."""
    from clearhead.kernels.gpu import call, tuning
    from clearhead.kernels.triton import launch

    patch.setenv("TRITON_INTERPRET", "1")
    patch.setattr(call, "_calls", type(call._calls)())
    patch.setattr(call, "_families", type(call._families)())
    if drawn.tile is not None:
        patch.setattr(tuning, "FEW", 0)
        kernels = ("forward", "listed", "by_key", "more_by_key", "top", "keys", "queries")
        patch.setattr(tuning, "FIXED", dict.fromkeys(kernels, tuning.Blocks(*drawn.tile)))
    else:
        patch.setattr(launch, "TILES", 1)
        patch.setattr(tuning, "FIXED", {"decode": tuning.Blocks(16, 16)})


def able(drawn: Drawn) -> bool:
    """False where this machine lacks what a problem names: an instruction set, a compiler, Triton's interpreter."""
    if drawn.kernel == "triton":
        return interpreted.INSTALLED and not torch.cuda.is_available()
    if drawn.kernel == "compiled":
        return native is not None and native.has(drawn.isa)
    return True


def answer(drawn: Drawn, ask: Question) -> dict[str, Any]:
    """What clearhead gives, by name."""
    with set_up(drawn):
        return Asking(drawn, ask).answer()


class Asking:
    """One call."""

    def __init__(self, drawn: Drawn, ask: Question) -> None:
        self.drawn, self.ask, self.make = drawn, ask, BY_NAME[drawn.library].make
        dtype = number_type(drawn.dtype)
        with np.errstate(all="ignore"):
            arrays = [a.astype(dtype) for a in (ask.q, ask.k, ask.v, ask.dout)]
        if drawn.flat:
            arrays = [a[0] for a in arrays]
        layouts = ["plain" if drawn.flat and kind in ("transposed", "expanded") else kind for kind in drawn.layouts]
        self.q, self.k, self.v, self.dout = (
            laid_out(a, layout, drawn.library) for a, layout in zip(arrays, layouts, strict=True)
        )
        self.parameter = None
        self.options: dict[str, Any] = {"scale": drawn.scale, "softcap": drawn.softcap, "dropout": drawn.dropout}
        if ask.sinks is not None:
            self.options["sinks"] = self.make(ask.sinks)
        self.gradients_of: dict[str, Any] = {}
        if "autograd" in drawn.verb:
            self.want_gradients()

    def want_gradients(self) -> None:
        """Mark the arrays that PyTorch is asked for gradients of."""
        arrays = {"q": self.q, "k": self.k, "v": self.v, "s": self.options.get("sinks")}
        for letter, array in arrays.items():
            if letter in self.drawn.wants and array is not None:
                leaf = array.detach().requires_grad_()
                self.gradients_of["dsinks" if letter == "s" else f"d{letter}"] = leaf
        self.q, self.k, self.v = (self.gradients_of.get(f"d{name}", arrays[name]) for name in "qkv")
        if "dsinks" in self.gradients_of:
            self.options["sinks"] = self.gradients_of["dsinks"]

    def whole_options(self) -> dict[str, Any]:
        """The options of a call over all keys."""
        drawn = self.drawn
        options = dict(self.options, kernel=drawn.kernel)
        if drawn.mask is not None:
            options["mask"] = made_mask(drawn.mask, drawn, self.make)
        if drawn.bias is not None:
            wanted = "b" in drawn.wants and "autograd" in drawn.verb
            options["bias"], parameter = made_bias(drawn, self.make)
            if wanted and parameter is not None:
                parameter.requires_grad_()
                self.gradients_of["dtable" if drawn.bias[0] == "relative" else "dbias"] = parameter
        return options

    def answer(self) -> dict[str, Any]:
        """Ask."""
        drawn = self.drawn
        if "merge" in drawn.verb:
            return self.merged()
        options = self.whole_options()
        if drawn.verb == "attention":
            return {"output": ch.attention(self.q, self.k, self.v, **options)}
        if drawn.verb == "observe":
            return self.fields(ch.observe(self.q, self.k, self.v, **options, **dict(drawn.want)))
        if drawn.verb == "gradients":
            if drawn.through_lse:
                options["dlse"] = self.make(self.dlse())
            found = ch.gradients(self.q, self.k, self.v, self.dout, **options)
            return dict(zip(("dq", "dk", "dv"), found, strict=True))
        if drawn.through_lse:
            seen = ch.observe(self.q, self.k, self.v, **options)
            return {"output": seen.output.detach(), **self.derived(self.pairs(seen))}
        output = ch.attention(self.q, self.k, self.v, **options)
        return {"output": output.detach(), **self.derived([(output, self.dout)])}

    def dlse(self) -> np.ndarray:
        """The gradient of the log-sum-exp, in its precision."""
        dlse = self.ask.dlse.astype(np.float64 if self.drawn.dtype == "float64" else np.float32)
        return dlse[0] if self.drawn.flat else dlse

    def derived(self, outputs: list[tuple[Any, Any]]) -> dict[str, Any]:
        """PyTorch's gradients of ⟨output, dout⟩ for each pair; a log-sum-exp has none where only values learn."""
        outputs = [(one, other) for one, other in outputs if one.requires_grad]
        found = torch.autograd.grad(
            [one for one, _ in outputs],
            list(self.gradients_of.values()),
            [other.resolve_neg() for _, other in outputs],
            allow_unused=True,
        )
        given = zip(self.gradients_of.items(), found, strict=True)
        # what does not depend on an array has a gradient of None, which is 0
        return {what: torch.zeros_like(leaf) if g is None else g for (what, leaf), g in given}

    def fields(self, seen: Any) -> dict[str, Any]:
        """An observation by the names of the reference."""
        found = {name: getattr(seen, name) for name in ("output", "lse", "max_score", "entropy", "received", "weights")}
        found = {name: array for name, array in found.items() if array is not None}
        if seen.map is not None:
            found |= {"map_mean": seen.map.mean, "map_max": seen.map.max}
        if seen.top is not None:
            found |= {"top": seen.top.weights, "top_indices": seen.top.indices}
        if seen.queries is not None:
            found["queries"] = seen.queries.weights
        return found

    def merged(self) -> dict[str, Any]:
        """The keys in parts, merged; the sink is given to one of them."""
        drawn, ask = self.drawn, self.ask
        edges = [0, *(min(cut, drawn.keys) for cut in drawn.cuts), drawn.keys]
        parts = []
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            options = {**self.options, "kernel": drawn.kernel, "dropout": None}
            if number != drawn.numbers % len(edges[1:]):
                options.pop("sinks", None)
            if drawn.mask is not None:
                options["mask"] = self.make(in_batch(ask.allowed[..., low:high], drawn).copy())
            if drawn.bias is not None:
                assert ask.bias is not None
                options["bias"] = self.make(in_batch(ask.bias[..., low:high], drawn).copy())
            parts.append(ch.observe(self.q, self.k[..., low:high, :], self.v[..., low:high, :], **options).partial)
        whole = ch.merge(*parts)
        if drawn.verb == "merge":
            return {name: getattr(whole, name) for name in ("output", "lse", "max_score", "entropy")}
        return {"output": whole.output.detach(), **self.derived(self.pairs(whole))}

    def pairs(self, whole: Any) -> list[tuple[Any, Any]]:
        """(output, dout) and (lse, dlse); a row without a log-sum-exp has no gradient of it."""
        dlse = torch.from_numpy(self.dlse())
        return [(whole.output, self.dout), (whole.lse, torch.where(whole.lse.detach() == -torch.inf, 0, dlse))]


def sum_bias(drawn: Drawn, name: str, found: np.ndarray, sizes: Sizes, by: Any = np.sum) -> np.ndarray:
    """The derivative by each score as that by a bias array, or by the table of a relative bias."""
    assert drawn.bias is not None
    if name == "dtable":
        chosen = buckets_of(drawn)
        table = np.zeros((drawn.bias[1], sizes.heads), found.dtype)
        for b, h, i, j in np.ndindex(*found.shape):
            table[chosen[b, i, j], h] = by([table[chosen[b, i, j], h], found[b, h, i, j]])
        return table
    shape = sizes.along(drawn.bias[1])
    axes = tuple(n for n, (have, want) in enumerate(zip(found.shape, shape, strict=True)) if have != want)
    return in_batch(by(found, axis=axes, keepdims=True) if axes else found, drawn)


def as_numbers(array: Any) -> np.ndarray:
    """Any library's array in NumPy, for comparing."""
    if isinstance(array, torch.Tensor):
        array = array.detach().resolve_neg()
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
