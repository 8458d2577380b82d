"""One attention call of a model, in the terms of `observe`: what it was given, and whether it can be observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, is_array, to_numpy
from clearhead.core.grid import Lengths
from clearhead.core.mask import Mask, as_mask
from clearhead.core.masks import causal as causal_mask


@dataclass(frozen=True, eq=False)
class Given(Lengths):
    """Queries, keys, values and options of a call; `causal` aligns the first query with the first key, as PyTorch does.

    A boolean `mask` is True where a query may attend. A float mask of PyTorch is a `bias`.
    """

    q: Array
    k: Array
    v: Array
    causal: bool = False
    mask: Array | None = None
    bias: Array | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `observe`."""
        return {**self.unmasked, "mask": self.masked()}

    @property
    def unmasked(self) -> dict[str, Any]:
        """The keywords of `observe` but for the mask."""
        return {"bias": self.bias, "scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}

    def with_transformers(self, options: Mapping[str, Any]) -> Given:
        """The call with what transformers hands an attention function beside it: a learned bias, a cap, sinks."""
        learned, sinks = options.get("position_bias"), options.get("s_aux")
        bias = self.bias if learned is None else learned if self.bias is None else self.bias + learned
        flat = None if sinks is None else sinks.reshape(-1).to(self.q.dtype)
        return replace(self, bias=bias, softcap=options.get("softcap"), sinks=flat)

    def masked(self, also: Mask | None = None) -> Mask | None:
        """All that hides keys, as one mask; None where nothing does."""
        parts = [] if also is None else [also]
        parts += [causal_mask(align="start")] if self.causal else []
        parts += [] if self.mask is None else [as_mask("attn_mask", self.mask)]
        whole: Mask | None = None
        for part in parts:
            whole = part if whole is None else whole & part
        return whole

    def block(self, start: int, stop: int) -> tuple[Array, dict[str, Any]]:
        """The queries from `start` to `stop` by themselves, and the keywords of `observe` that go with them."""

        def of(array: Array | None) -> Array | None:
            long = array is not None and array.ndim > 1 and array.shape[-2] == self.queries
            return array[..., start:stop, :] if array is not None and long else array

        part = replace(self, causal=False, mask=of(self.mask), bias=of(self.bias))
        first = causal_mask(offset=start) if self.causal else None  # the key of the first of them
        return self.q[..., start:stop, :], {**part.unmasked, "mask": part.masked(first)}

    def detached(self) -> Given:
        """The same call, of which no gradient is asked."""
        arrays = {name: getattr(self, name) for name in ("q", "k", "v", "mask", "bias", "sinks")}
        if not any(getattr(array, "requires_grad", False) for array in arrays.values()):
            return self
        return replace(self, **{name: a.detach() for name, a in arrays.items() if a is not None})

    def of_heads(self, heads: tuple[int, ...]) -> Given:
        """The same call for some query heads, each with the key head that it uses."""
        count, key_heads = self.q.shape[-3], self.k.shape[-3]
        group = count // max(key_heads, 1)
        mine, theirs = list(heads), [head // group for head in heads]

        def of(array: Array | None) -> Array | None:
            if array is None or array.ndim < 3 or array.shape[-3] == 1:
                return array
            return array[..., mine, :, :]

        return replace(
            self,
            q=self.q[..., mine, :, :],
            k=self.k[..., theirs, :, :],
            v=self.v[..., theirs, :, :],
            mask=of(self.mask),
            bias=of(self.bias),
            sinks=None if self.sinks is None else self.sinks[mine],
        )

    def in_float64(self) -> Given:
        """The same call in NumPy and float64, where differences of log-sum-exps lose nothing."""
        arrays = {name: to_numpy(a) for name, a in vars(self).items() if is_array(a)}
        floats: dict[str, Any] = {name: a if a.dtype == bool else a.astype(np.float64) for name, a in arrays.items()}
        return replace(self, **floats)

    def copied(self) -> Given:
        """The same call in memory of its own: a cache may write over keys that were seen."""
        arrays = {name: getattr(self, name) for name in ("q", "k", "v", "mask", "bias", "sinks")}
        arrays |= {name: _one_row(arrays[name]) for name in ("mask", "bias")}
        return replace(self, **{name: a.clone() for name, a in arrays.items() if a is not None})


def _one_row(array: Array | None) -> Array | None:
    """A mask that says the same for every query, as padding does, as one row: n numbers and not n × n."""
    if array is None or array.ndim < 2 or array.shape[-2] < 2 or not bool((array == array[..., :1, :]).all()):
        return array
    return array[..., :1, :]
