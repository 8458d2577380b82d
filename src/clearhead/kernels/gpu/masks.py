"""Masks as the GPU kernels read them: a span of keys for each query where that says it all, else a small program."""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch

from clearhead.core.arrays import Array, to_numpy
from clearhead.core.grid import Grid, Numbers
from clearhead.core.lowered import Node
from clearhead.core.mask import Mask
from clearhead.core.runs import Runs, runs
from clearhead.kernels.extension import native
from clearhead.kernels.gpu.device import Lists, Span
from clearhead.kernels.gpu.tile_lists_kernel import tile_states
from clearhead.kernels.gpu.tuning import cdiv
from clearhead.kernels.mask_nodes import nodes_of
from clearhead.kernels.threads import crew

FAR = 2**30  # no limit: more than any position, and twice that still fits 32 bits
TREES = 4  # masks whose trees are kept
BLOCKS_OF_THREAD = 64  # of queries, whose lists are worth a thread
DEEPEST = 31  # the answers of a mask's parts wait in the bits of one number
Limits: TypeAlias = tuple[Numbers, Numbers, Numbers]


@dataclass
class Prepared:
    """A mask on the device: a span, or a program with its arrays; and its tiles, once a kernel has asked for them."""

    span: Span
    span_by_row: bool = False
    program: tuple[tuple[int, ...], ...] | None = None
    arrays: tuple[Any, ...] = ()
    by_batch: bool = False
    by_head: bool = False
    reads: bool = False  # an array has to be read: runs of tiles are not told by intervals alone
    lists: dict[Any, Any] = field(default_factory=dict)


# the masks with trees, in the order in which they came by them
_with_trees: deque[weakref.ref[Prepared]] = deque()


def prepare(mask: Mask | None, grid: Grid, on: torch.device, root: Node | None = None) -> Prepared:
    """What the kernels are given for a mask; `root` is what it was lowered to, where somebody has done that."""
    if mask is None:
        return _from_span((-FAR, FAR, grid.keys), grid, on)
    root = root or mask.lower(grid)
    limits = as_span(root, grid)
    if limits is not None:
        return _from_span(limits, grid, on)
    return _from_tree(root if depth(root) <= DEEPEST else Mask.lower(mask, grid), grid, on)


def as_span(root: Node, grid: Grid) -> Limits | None:
    """(low, high, count): query i sees keys i + low … i + high below count. None where that does not say it all."""
    span = root.span(grid.keys)
    return None if span is None else (within(span[0]), within(span[1]), span[2])


def within(numbers: Numbers) -> Numbers:
    """Numbers as kernels add them up: no limit is FAR."""
    return max(-FAR, min(numbers, FAR)) if isinstance(numbers, int) else np.clip(numbers, -FAR, FAR)


def depth(root: Node) -> int:
    """How many answers of parts wait at once while a mask is evaluated, left before right."""
    return max((depth(part) + place for place, part in enumerate(root.parts)), default=1)


def flat(values: np.ndarray, grid: Grid) -> Numbers:
    """One number, or one for each batch row in one axis."""
    if values.ndim == 0:
        return max(-FAR, min(int(values), FAR))
    return np.clip(np.broadcast_to(values[..., 0, 0, 0], grid.batch).reshape(-1), -FAR, FAR)


def _from_span(limits: Limits, grid: Grid, on: torch.device) -> Prepared:
    low, high, count = limits
    if isinstance(low, int) and isinstance(high, int) and isinstance(count, int):
        nothing = _nothing(on)
        return Prepared(Span(low, high, count, nothing), arrays=(nothing,))
    rows = np.stack(np.broadcast_arrays(*limits), axis=-1).astype(np.int32)
    return Prepared(Span(-FAR, FAR, grid.keys, upload(rows, on)), span_by_row=True, arrays=(_nothing(on),))


@lru_cache(maxsize=8)
def _nothing(on: torch.device) -> torch.Tensor:
    """An array for arguments that are not used."""
    return torch.zeros(4, dtype=torch.int32, device=on)


def upload(array: np.ndarray, on: torch.device) -> torch.Tensor:
    """A copy of an array on the device."""
    if on.type == "cpu":
        return torch.from_numpy(np.array(array, order="C"))
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(on)  # not copied on the host, too


def _from_tree(root: Node, grid: Grid, on: torch.device) -> Prepared:
    nodes: list[tuple[int, ...]] = []
    arrays: list[Any] = []
    prepared = Prepared(Span(-FAR, FAR, grid.keys, _nothing(on)))

    def add(node: Node) -> None:
        for part in node.parts:
            add(part)
        parts, by_row = uploaded(node, grid, on)
        prepared.by_batch |= by_row
        array = node.array()
        if array is not None:
            prepared.reads = True
            pairs = four_axes(array, grid, on)
            prepared.by_batch |= pairs.shape[0] > 1
            prepared.by_head |= pairs.shape[1] > 1
            parts += [pairs, *(0 if n == 1 else s for n, s in zip(pairs.shape, pairs.stride(), strict=True))]
        prepared.by_head |= node.heads > 0
        nodes.append((int(node.kind), len(arrays) if parts else 0, int(by_row), node.constant, node.heads))
        arrays.extend(parts)

    add(root)
    prepared.program, prepared.arrays = tuple(nodes), tuple(arrays)
    return prepared


def uploaded(node: Node, grid: Grid, on: torch.device) -> tuple[list[Any], bool]:
    """A node's numbers as one array and its rows as one each, on the device; and whether batch rows have their own."""
    few = node.places()
    if few is not None:
        table = torch.zeros((1, few[1]), dtype=torch.uint8, device=on)
        return [table.index_fill_(1, upload(few[0], on), 1)], False
    found = list(node.narrow())
    if node.numbers:
        found.insert(0, np.stack(np.broadcast_arrays(*map(within, node.numbers)), axis=-1).astype(np.int32))
    each = {id(a): a for a in found}  # ids of queries and keys may be one array
    by_row = any(a.ndim > 1 and len(a) != 1 for a in found)
    if by_row:
        each = {name: np.broadcast_to(a, (math.prod(grid.batch), a.shape[-1])) for name, a in each.items()}
    lent = {name: upload(a, on) for name, a in each.items()}
    return [lent[id(a)] for a in found], by_row


def four_axes(array: Array, grid: Grid, on: torch.device) -> torch.Tensor:
    """An array that broadcasts to (*batch, heads, queries, keys), on the device, with one batch axis."""
    tensor = array.detach().to(on) if isinstance(array, torch.Tensor) else upload(to_numpy(array), on)
    rank = len(grid.batch) + 3
    tensor = tensor[(None,) * (rank - tensor.ndim) + (...,)]
    lead = tensor.shape[:-3]
    if all(size == 1 for size in lead):
        return tensor.reshape(1, *tensor.shape[-3:])
    return tensor.expand(*grid.batch, *tensor.shape[-3:]).reshape(math.prod(grid.batch), *tensor.shape[-3:])


def tiles(
    prepared: Prepared, mask: Mask | Node | None, grid: Grid, rows: int, columns: int, *,
    turned: bool = False, coarse: bool = False,
) -> Lists:  # fmt: skip
    """For each block of queries the tiles of keys that are not empty; `turned`: for each block of keys, of queries.

    `coarse`: what was found for larger blocks and tiles will do, for a kernel that seldom has anything to do.
    """
    assert prepared.program is not None
    key = ("coarse", rows, columns) if coarse else (rows, columns, turned)
    if key not in prepared.lists:
        lists = coarsely(prepared, rows, columns) if coarse else None
        if lists is None:
            lists = listed(prepared, mask, grid, rows, columns, turned)
        if lists is None:
            lists = lists_of_states(state_map(prepared, mask, grid, rows, columns), turned)
        else:
            on = prepared.span.rows.device
            lists = lists._replace(tiles=upload(lists.tiles, on), counts=upload(lists.counts, on))
        if capturing(lists.tiles.device):
            return lists
        done(lists.tiles.device)
        prepared.lists[key] = lists
    return prepared.lists[key]


def coarsely(prepared: Prepared, rows: int, columns: int) -> Lists | None:
    """Lists on the host that hold whole blocks and tiles of larger ones, of the smallest that are known; or None."""
    known = [key[1:3] for key in list(prepared.lists) if key[0] == "lists" and not key[3]]
    larger = [(down, across) for down, across in known if down % rows == across % columns == 0]
    if not larger:
        return None
    down, across = min(larger, key=math.prod)
    return refined(prepared.lists["lists", down, across, False], down // rows, across // columns)


def refined(lists: Lists, down: int, across: int) -> Lists:
    """The same with each block cut into `down` blocks and each tile into `across`: what was mixed still is.

    >>> one = Lists(np.array([2, 0], np.int32), np.array([[0, 1, 1]], np.int32), 0, 0, 1, 1, 3)
    >>> cut = refined(one, 2, 2)
    >>> cut.tiles.tolist(), cut.counts.tolist(), cut.down, cut.across
    ([4, 5, 0, 1], [[0, 2, 2], [0, 2, 2]], 2, 6)
    """
    numbers = (lists.tiles[:, None] * across + np.arange(across, dtype=np.int32)).reshape(-1)
    counts = np.repeat(lists.counts * across, down, axis=0)
    return lists._replace(tiles=numbers, counts=counts, down=lists.down * down, across=lists.across * across)


def listed(
    prepared: Prepared, mask: Mask | Node | None, grid: Grid, rows: int, columns: int, turned: bool = False
) -> Lists | None:
    """Lists on the host, told from intervals, made once for all who want them; None where an array has to be read."""
    if prepared.reads or mask is None:
        return None
    key = ("lists", rows, columns, turned)
    if key not in prepared.lists:
        by_hand = native is None or 0 in grid.batch
        prepared.lists[key] = (lists_of_runs if by_hand else lists_of_tree)(prepared, mask, grid, rows, columns, turned)
    known: Lists = prepared.lists[key]
    return known


def lists_of_tree(prepared: Prepared, mask: Mask | Node, grid: Grid, rows: int, columns: int, turned: bool) -> Lists:
    """By the compiled extension, in a fraction of the time that NumPy takes."""
    known = prepared.lists.get("tree")
    tree = known
    if tree is None:
        tree = native.Call()
        tree.set_sizes(math.prod(grid.batch), grid.heads, grid.heads, grid.queries, grid.keys, 1, 1)
        tree.set_mask(nodes_of(mask if isinstance(mask, Node) else mask.lower(grid)))
    batch = math.prod(grid.batch) if prepared.by_batch else 1
    heads = grid.heads if prepared.by_head else 1
    sides = cdiv(grid.queries, rows), cdiv(grid.keys, columns)
    wanted = batch * heads * sides[0] // BLOCKS_OF_THREAD
    # by our own threads: those that have no time are not waited for, as PyTorch's are
    threads = 1 if wanted <= 1 else min(crew("torch", alone=True)[0], wanted)
    found = tree.tile_lists(batch, heads, rows, columns, turned, threads)
    if known is None:
        keep_tree(prepared, tree)  # now that it knows where keys lie, and is only read: other threads may ask for it
    counts, tiles = (np.frombuffer(numbers, np.int32) for numbers in found[:2])
    if not turned:
        prepared.lists["certain", rows, columns] = found[2]
    return lists_of(counts.reshape(-1, 3), tiles, batch, heads, *(sides[::-1] if turned else sides))


def runs_of(prepared: Prepared, mask: Mask | Node | None, grid: Grid, rows: int, columns: int) -> Runs | None:
    """The runs of tiles, found once for all who want them so; None where an array has to be read for them."""
    if prepared.reads or mask is None:
        return None
    key = ("runs", rows, columns)
    if key not in prepared.lists:  # kept without the nodes, which keep the mask's arrays alive
        prepared.lists[key] = runs(mask, grid, rows, columns, whole=True)
    found: Runs = prepared.lists[key]
    return found


def keep_tree(prepared: Prepared, tree: Any) -> None:
    """Keep a mask's tree for lists of other tiles, and forget that of the mask that has had its own the longest.

    It holds the mask's numbers, 2 MB of documents of 131,072 tokens, and many masks are remembered.
    """
    prepared.lists["tree"] = tree
    _with_trees.append(weakref.ref(prepared))
    if len(_with_trees) > TREES:
        oldest = _with_trees.popleft()()
        if oldest is not None:
            oldest.lists.pop("tree", None)


def lists_of_runs(prepared: Prepared, mask: Mask | Node, grid: Grid, rows: int, columns: int, turned: bool) -> Lists:
    """By NumPy, where there is no extension."""
    found = runs_of(prepared, mask, grid, rows, columns)
    assert found is not None
    lists, sides = found.lists(turned=turned), (found.blocks, found.tiles)
    counts = np.stack([lists.starts[:-1], lists.mixed, np.diff(lists.starts) - lists.mixed], axis=-1)
    return lists_of(counts, lists.tiles, found.batch, found.heads, *(sides[::-1] if turned else sides))


def lists_of(counts: np.ndarray, tiles: np.ndarray, batch: int, heads: int, down: int, across: int) -> Lists:
    """Tiles, and where those of each block begin, how many are mixed and how many full."""
    numbers = tiles if tiles.size else np.zeros(1, np.int32)
    return Lists(numbers, counts, int(batch > 1), int(heads > 1), heads, down, across)


def lists_of_states(states: torch.Tensor, turned: bool) -> Lists:
    """From the state of each tile, on the device."""
    states = states.transpose(-1, -2) if turned else states
    # 1 is mixed, 2 full, 0 empty: mixed first, empty last
    order = torch.where(states == 0, 3, states.to(torch.int32))
    found = torch.sort(order, dim=-1, stable=True).indices.to(torch.int32).contiguous()
    batch, heads, down, across = states.shape
    start = torch.arange(batch * heads * down, device=states.device).view(batch, heads, down) * across
    counts = torch.stack([start, (states == 1).sum(-1), (states == 2).sum(-1)], dim=-1).to(torch.int32).contiguous()
    return Lists(found, counts, int(batch > 1), int(heads > 1), heads, down, across)


def state_map(prepared: Prepared, mask: Mask | Node | None, grid: Grid, rows: int, columns: int) -> torch.Tensor:
    """0 empty, 1 mixed, 2 full, for each tile: (batch or 1, heads or 1, blocks of queries, blocks of keys)."""
    key = (rows, columns)
    if key not in prepared.lists:
        on = prepared.span.rows.device
        found = runs_of(prepared, mask, grid, rows, columns)
        if found is None:
            states = states_of_pairs(prepared, grid, rows, columns, on)
        else:
            states = upload(found.states(), on)
        if capturing(on):
            return states
        done(on)
        prepared.lists[key] = states
    return prepared.lists[key]


def states_of_pairs(prepared: Prepared, grid: Grid, rows: int, columns: int, on: torch.device) -> torch.Tensor:
    """The same by looking at every pair, on the device: arrays that lie there are read there, and by a graph again."""
    batch = math.prod(grid.batch) if prepared.by_batch else 1
    heads = grid.heads if prepared.by_head else 1
    down, across = cdiv(grid.queries, rows), cdiv(grid.keys, columns)
    states = torch.empty((batch, heads, down, across), dtype=torch.uint8, device=on)
    if states.numel():
        tile_states[(across, down, batch * heads)](
            states, prepared.arrays, grid.queries, grid.keys, heads, prepared.program, rows, columns
        )
    return states


def done(device: torch.device) -> None:
    """Wait for what was launched: it is kept, and the next call may run on another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured: what is made then holds nothing before it is replayed, and is not kept."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
