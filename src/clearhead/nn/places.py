"""Where queries and keys stand: what a cache hands out, and masks, angles and biases that follow positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.core.array_masks import Padding, given_mask, padding, where
from clearhead.core.arrays import dtype_name, is_array, is_traced
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Alignment, certainly, whole_numbers
from clearhead.core.mask import Mask
from clearhead.core.masks import Documents, GlobalTokens, causal, lengths, window
from clearhead.core.positions import Alibi, Bias, Relative, alibi, relative_bias
from clearhead.core.sparse_masks import BlockTable, RandomBlocks
from clearhead.distributed.current import current
from clearhead.distributed.placement import Placement


class Split(NamedTuple):
    """Keys and values that are split over ranks: the mesh, and who holds which positions."""

    mesh: Any
    placement: Placement


class Held(NamedTuple):
    """What a cache hands to attention: keys and values, and where they and the new queries stand.

    `positions` (batch, S) is the position of each key, −1 where a slot is empty; None where key i has position i. With
    (batch, key heads, S) each key head has its own, for `group` query heads; `by_order`: all are real and in order.
    The first new query of each row has position `start`. A ring also says what it keeps. Of a cache that is `split`
    over ranks, k and v are those that lie here.
    """

    k: Tensor
    v: Tensor
    start: list[int]
    positions: Tensor | None = None
    window: int | None = None
    sinks: int = 0
    group: int = 1
    by_order: bool = False
    real: Tensor | None = None  # which of the new queries are no padding, (batch, T)
    split: Split | None = None

    @property
    def keys(self) -> int:
        """How many keys there are, on all ranks where they are split."""
        return int(self.k.shape[-2]) if self.split is None else self.split.placement.n

    @property
    def by_head(self) -> Tensor:
        """The positions of keys, (batch, 1 or query heads, 1, S)."""
        assert self.positions is not None
        if self.positions.ndim == 2:
            return self.positions[:, None, None, :]
        return self.positions.repeat_interleave(self.group, dim=1)[:, :, None, :]

    def distances(self, queries: int) -> Tensor:
        """Key position minus query position, (batch, 1 or heads, T, S), where keys do not lie in order."""
        return self.by_head - self.query_positions(queries)[:, None, :, None]

    def query_positions(self, queries: int) -> Tensor:
        """The positions of the new queries, (batch, T)."""
        return numbers(self.start, self.k)[:, None] + torch.arange(queries, device=self.k.device)

    def mask(self, queries: int, back: int | None = None) -> Mask:
        """Causal, and at most `back` positions back: what the new queries may see of what is held."""
        if self.positions is None:
            offset = first(self.start)
            return causal(offset=offset) if back is None else window(back, offset=offset)
        if self.by_order and back is None:
            return causal()
        distance = self.distances(queries)
        held = self.by_head
        allowed = (held >= 0) & (distance <= 0)
        if self.real is not None:
            allowed = allowed & self.real[:, None, :, None]
        if self.window is not None:
            allowed = allowed & ((distance >= -self.window) | (held < self.sinks))
        return where(allowed if back is None else allowed & (distance >= -back))

    def bias(self, bias: Alibi | Relative, queries: int) -> Bias | Tensor:
        """A bias by distance, told where the keys are."""
        if self.positions is None:
            offset = first(self.start)
            if isinstance(bias, Alibi):
                return alibi(bias.slopes.size, offset=offset)
            return relative_bias(
                bias.table, bidirectional=bias.bidirectional, max_distance=bias.max_distance, offset=offset
            )
        distance = self.distances(queries)
        if isinstance(bias, Alibi):
            slopes = torch.tensor(bias.slopes.tolist(), dtype=torch.float32, device=self.k.device)
            return -slopes[:, None, None] * distance.abs()  # (batch, heads, T, S)
        chosen = buckets(
            distance, bias.table.shape[0], bias.bidirectional, bias.max_distance
        )  # (batch, 1 or heads, T, S)
        if chosen.shape[1] == 1:
            return bias.table[chosen[:, 0]].movedim(-1, 1)
        heads = torch.arange(chosen.shape[1], device=chosen.device)[:, None, None]
        return bias.table[chosen, heads]


def first(start: Sequence[int]) -> Any:
    """One number where all rows start at the same place, else one for each."""
    return start[0] if all(s == start[0] for s in start) else list(start)


def numbers(values: Sequence[int], like: Tensor) -> Tensor:
    """Whole numbers as a tensor beside another."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def buckets(distance: Tensor, count: int, bidirectional: bool, most: int) -> Tensor:
    """The T5 bucket of each key-minus-query distance, as `clearhead.core.positions.buckets` has it.

    >>> buckets(torch.tensor([-200, -9, -1, 0, 1, 9, 200]), 32, True, 128).tolist()
    [15, 8, 1, 0, 17, 24, 31]
    """
    base = torch.zeros_like(distance)
    if bidirectional:
        count //= 2
        base = torch.where(distance > 0, count, 0)
        far = distance.abs()
    else:
        far = (-distance).clamp(min=0)
    exact = count // 2
    scale = torch.tensor(most / exact, dtype=torch.float64).log().to(torch.float32)
    ratio = (far.clamp(min=1).to(torch.float32) / exact).log() / scale.to(far.device)
    shared = exact + (ratio * (count - exact)).to(torch.int64)
    return base + torch.where(far < exact, far, shared.clamp(max=count - 1))


def query_places(start: Sequence[int], queries: int, like: Tensor) -> Tensor:
    """Positions of the queries: (T,), or (batch, T) where rows start at different ones; those here, of split ones."""
    ranks = current()
    split = None if ranks is None else ranks.places(queries, like)
    if split is not None:
        return split
    begin = first(start)
    ahead = torch.arange(queries, device=like.device)
    return numbers(begin, like)[:, None] + ahead if isinstance(begin, list) else begin + ahead


def visible(
    held: Held,
    queries: int,
    heads: int,
    mask: Any,
    real: Any,
    cached: bool,
    looking_back: bool,
    back: int | None,
    unpadded: Mask | None = None,
) -> Mask | None:
    """What the queries may see: a module's own causality and window, the caller's mask, and no padding."""
    found: Mask | None = None
    if cached:
        found = held.mask(queries, back)
    elif back is not None:
        found = window(back, align="start")
    elif looking_back:
        found = causal(align="start")
    if mask is not None:
        given = of_rows(mask, held.k.shape[0], heads, queries, held.keys)
        if cached:
            given = anchored(given, held, queries)
        found = given if found is None else found & given
    if unpadded is not None:
        speaks_of_keys(unpadded, held)
        found = unpadded if found is None else found & unpadded
    if real is not None and not cached:  # in a cache padding lies ahead of every query
        padded = lengths(real)
        found = padded if found is None else found & padded
    return found


def of_rows(mask: Any, batch: int, heads: int, queries: int, keys: int) -> Mask:
    """The caller's mask; an array that has one row for each batch row is never taken for one with a row for each query.

    In a batch of as many rows as there are queries, or heads, an array without those axes may mean either.
    """
    if isinstance(mask, Mask) or not is_array(mask) or certainly(batch == 1):
        return given_mask("mask", mask)
    shape = tuple(mask.shape)
    if len(shape) == 2 and certainly(shape[0] == batch) and certainly(shape[1] == keys):
        rows = f"has shape {shape}, one row for each of {batch} batch rows"
        if certainly(batch == queries):
            raise ArgumentError(
                "mask",
                f"{rows} or for each of {queries} queries: give padding(mask) for the first, mask[None] for the second",
            )
        raise ArgumentError(
            "mask", f"{rows}, expected one for each of {queries} queries: padding(mask) means the first"
        )
    if len(shape) == 3 and heads > 1 and certainly(shape[0] == batch):
        rows = f"has shape {shape}, a part for each of {batch} batch rows"
        if certainly(batch == heads):
            raise ArgumentError(
                "mask",
                f"{rows} or for each of {heads} heads: give mask[:, None] for the first, mask[None] for the second",
            )
        raise ArgumentError("mask", f"{rows}, expected an axis for heads after it: give mask[:, None]")
    return given_mask("mask", mask)


def without_heads(mask: Mask) -> Mask:
    """The padding in a mask of (batch, 1, 1, keys) as (batch, 1, keys), for queries that have no axis for heads."""
    if isinstance(mask, Padding):
        return Padding(mask.array[:, 0]) if mask.array.ndim == 4 else mask
    fields = {name: getattr(mask, name) for name in getattr(mask, "__dataclass_fields__", ())}
    inner = {name: without_heads(value) for name, value in fields.items() if isinstance(value, Mask)}
    return type(mask)(**{**fields, **inner}) if inner else mask


def hidden_keys(key_padding_mask: Any) -> Mask:
    """PyTorch's `key_padding_mask`, True where a key is padding, as the mask of the keys that are not."""
    name = "key_padding_mask"
    if not is_array(key_padding_mask) or dtype_name(key_padding_mask) != "bool":
        kind = dtype_name(key_padding_mask) if is_array(key_padding_mask) else type(key_padding_mask).__name__
        raise ArgumentError(
            name, f"is {kind}, expected bool, True where a key is padding; mask=padding(…) has 1 for tokens"
        )
    if key_padding_mask.ndim not in (1, 2):
        raise ArgumentError(name, f"has shape {tuple(key_padding_mask.shape)}, expected (batch, keys)")
    return padding(~key_padding_mask)


def speaks_of_keys(unpadded: Mask, held: Held) -> None:
    """Refuse a `key_padding_mask` that has not one number for each key: one of a single key would be taken for all."""
    assert isinstance(unpadded, Padding)
    *rows, _, _, said = unpadded.array.shape if unpadded.array.ndim > 2 else (1, *unpadded.array.shape)
    batch, keys = held.k.shape[0], held.keys
    if certainly(said != keys) or any(certainly(row != batch) and certainly(row != 1) for row in rows):
        shape = (*rows, said)
        raise ArgumentError(
            "key_padding_mask",
            f"has shape {shape}, expected {(batch, keys)[-len(shape) :]}: with a cache, all tokens so far are its keys",
        )


def anchored(mask: Mask, held: Held, queries: int) -> Mask:
    """A mask that is aligned to the end, told where queries stand: a shorter row ends before the last key."""
    if isinstance(mask, BlockTable | RandomBlocks) and max(held.start) > 0:
        raise ArgumentError("mask", f"has {mask!r}, which numbers queries from 0 and not after those in the cache")
    offset = first(held.start)
    uneven = isinstance(offset, list)  # else the last query stands at the last key
    if uneven and isinstance(mask, Documents) and mask.queries is None:
        keys = torch.as_tensor(mask.keys).expand(len(offset), -1)
        places = numbers(offset, keys)[:, None] + torch.arange(queries, device=keys.device)
        return Documents(mask.keys, whole_numbers("documents", keys.gather(1, places.clamp(max=keys.shape[1] - 1))))
    if isinstance(mask, GlobalTokens) and not is_traced(mask.indices):  # those that are still to come are not seen yet
        mask = GlobalTokens(mask.indices[mask.indices < held.keys], mask.alignment)
    fields = {name: getattr(mask, name) for name in getattr(mask, "__dataclass_fields__", ())}
    told: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mask):
            told[name] = anchored(value, held, queries)
        elif uneven and isinstance(value, Alignment) and value.given is None and value.align == "end":
            told[name] = Alignment.of("end", offset)
    return type(mask)(**{**fields, **told}) if told else mask
