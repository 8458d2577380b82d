"""What each mask, bias and dropout says of one query and one key, in plain Python; no code is shared with clearhead.

A mask is a tree of tuples, so that it can be printed, read back and cut down:

    ("causal", align, offset)                   ("window", back, ahead, align, offset)
    ("lengths", count)                          ("prefix", count)
    ("documents", kinds, order, axes, seed)     ("global_tokens", places, align, offset)
    ("random_blocks", block, count, seed)       ("where", axes, density, seed)
    ("blocks", size, axes, density, seed)       ("dilated", step, back, ahead, align, offset)
    ("strided", stride, align, offset)          ("first_tokens", count, align, offset)
    ("and", left, right)    ("or", left, right)     ("not", mask)

`offset` and `count` are a number, or a tuple with one for each batch row in turn. `axes` says along which of batch,
heads, queries and keys an array has its full size ("bhqk"); it is of size one along the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Tree = tuple[Any, ...]
Pair = Callable[[int, int, int, int], bool]


class Sizes(NamedTuple):
    """The sizes of a problem, its batch axes counted as one."""

    batch: int
    heads: int
    queries: int
    keys: int

    def along(self, axes: str) -> tuple[int, int, int, int]:
        """The shape of an array that has its full size along these axes."""
        batch, heads, queries, keys = (n if axis in axes else 1 for n, axis in zip(self, "bhqk", strict=True))
        return batch, heads, queries, keys


def of_row(values: Any, row: int) -> int:
    """One number for all batch rows, or one for each in turn."""
    return int(values[row % len(values)]) if isinstance(values, tuple) else int(values)


def position(query: int, row: int, align: str, offset: Any, sizes: Sizes) -> int:
    """Where a query stands among the keys."""
    if offset is not None:
        return query + of_row(offset, row)
    return query + (sizes.keys - sizes.queries if align == "end" else 0)


def document_ids(tree: Tree, sizes: Sizes) -> tuple[np.ndarray, np.ndarray | None]:
    """The ids of keys (batch or 1, keys), and of queries where they have their own."""
    _, kinds, order, axes, seed = tree
    rng = np.random.default_rng([seed, 1])
    rows = sizes.batch if "b" in axes else 1
    keys = rng.integers(0, kinds, (rows, sizes.keys))
    if order == "sorted":
        keys = np.sort(keys, axis=-1)
    if "q" not in axes and sizes.queries <= sizes.keys:
        return keys, None
    return keys, rng.integers(0, kinds, (rows, sizes.queries))


def where_array(tree: Tree, sizes: Sizes) -> np.ndarray:
    """The boolean array of a leaf."""
    _, axes, density, seed = tree
    return np.random.default_rng([seed, 2]).random(sizes.along(axes)) < density


def block_table(tree: Tree, sizes: Sizes) -> np.ndarray:
    """The truth value of each block of queries and block of keys."""
    _, size, axes, density, seed = tree
    blocks = sizes._replace(queries=math.ceil(sizes.queries / size), keys=math.ceil(sizes.keys / size))
    return np.random.default_rng([seed, 3]).random(blocks.along(axes)) < density


def in_steps(apart: int, step: int, back: int | None, ahead: int) -> bool:
    """A key that stands a whole number of steps from the query, not too many of them."""
    steps, rest = divmod(apart, step)
    return rest == 0 and steps <= ahead and (back is None or steps >= -back)


def in_strides(before: int, stride: int) -> bool:
    """One of the last keys, or a whole number of strides before the query."""
    return 0 <= before <= stride or (before > 0 and before % stride == 0)


def picked(array: np.ndarray, *place: int) -> Any:
    """An entry of an array that is of size one where it broadcasts."""
    return array[tuple([0 if size == 1 else i for size, i in zip(array.shape, place, strict=True)])]


def pair_rule(tree: Tree, sizes: Sizes) -> Pair:
    """May this query attend to this key? Asked as (batch row, head, query, key)."""
    kind, *given = tree
    if kind == "and":
        left, right = (pair_rule(part, sizes) for part in given)
        return lambda b, h, i, j: left(b, h, i, j) and right(b, h, i, j)
    if kind == "or":
        left, right = (pair_rule(part, sizes) for part in given)
        return lambda b, h, i, j: left(b, h, i, j) or right(b, h, i, j)
    if kind == "not":
        inner = pair_rule(given[0], sizes)
        return lambda b, h, i, j: not inner(b, h, i, j)
    if kind == "causal":
        align, offset = given
        return lambda b, h, i, j: j <= position(i, b, align, offset, sizes)
    if kind == "window":
        back, ahead, align, offset = given
        return lambda b, h, i, j: -back <= j - position(i, b, align, offset, sizes) <= ahead
    if kind in ("lengths", "prefix"):
        return lambda b, h, i, j: j < of_row(given[0], b)
    if kind == "documents":
        keys, own = document_ids(tree, sizes)
        queries = keys[:, sizes.keys - sizes.queries :] if own is None else own
        return lambda b, h, i, j: bool(picked(queries, b, i) == picked(keys, b, j))
    if kind == "global_tokens":
        places, align, offset = given
        return lambda b, h, i, j: j in places or position(i, b, align, offset, sizes) in places
    if kind == "random_blocks":
        return random_blocks(*given, sizes)
    if kind == "blocks":
        table, size = block_table(tree, sizes), given[0]
        return lambda b, h, i, j: bool(picked(table, b, h, i // size, j // size))
    if kind == "dilated":
        step, back, ahead, align, offset = given
        return lambda b, h, i, j: in_steps(j - position(i, b, align, offset, sizes), step, back, ahead)
    if kind == "strided":
        stride, align, offset = given
        return lambda b, h, i, j: in_strides(position(i, b, align, offset, sizes) - j, stride)
    if kind == "first_tokens":
        first, align, offset = given
        return lambda b, h, i, j: j < first and j <= position(i, b, align, offset, sizes)
    if kind == "where":
        array = where_array(tree, sizes)
        return lambda b, h, i, j: bool(picked(array, b, h, i, j))
    raise AssertionError(kind)


def random_blocks(block: int, count: int, seed: int, sizes: Sizes) -> Pair:
    """For each block of queries a set by Floyd's rule, drawn by splitmix64 from (seed, block)."""
    blocks = math.ceil(sizes.keys / block)
    count = min(count, blocks)
    few = min(count, blocks - count)
    golden = 0x9E3779B97F4A7C15

    def scrambled(x: int) -> int:
        x = (x + golden) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def drawn(number: int) -> set[int]:
        chosen: set[int] = set()
        stream = scrambled(number ^ scrambled(seed))
        for t in range(few):
            last = blocks - few + t
            one = scrambled((stream + t * golden) % 2**64) % (last + 1)
            chosen.add(last if one in chosen else one)
        return chosen if few == count else set(range(blocks)) - chosen

    by_block = [drawn(number) for number in range(math.ceil(sizes.queries / block))]
    return lambda b, h, i, j: j // block in by_block[i // block]


def allowed_pairs(tree: Tree | None, sizes: Sizes) -> np.ndarray:
    """Every pair asked one by one: (batch, heads, queries, keys)."""
    if tree is None:
        return np.ones(sizes, bool)
    rule = pair_rule(tree, sizes)
    answers = [
        rule(b, h, i, j)
        for b in range(sizes.batch)
        for h in range(sizes.heads)
        for i in range(sizes.queries)
        for j in range(sizes.keys)
    ]
    return np.array(answers, bool).reshape(sizes)


def alibi_slopes(heads: int) -> list[float]:
    """The slopes as the authors of ALiBi publish them."""

    def of_power(n: int) -> list[float]:
        first = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [first * first**i for i in range(n)]

    below = 2 ** int(math.log2(heads))
    if below == heads:
        return of_power(heads)
    return of_power(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def bucket(distance: int, count: int, bidirectional: bool, most: int) -> int:
    """The bucket of a key-minus-query distance as T5 publishes it, its logarithms in float32."""
    found = 0
    if bidirectional:
        count //= 2
        if distance > 0:
            found = count
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return found + distance
    part = np.log(np.float32(distance) / np.float32(exact)) / np.float32(math.log(most / exact))
    return found + min(exact + int(part * np.float32(count - exact)), count - 1)


def kept_weights(probability: float, seed: int, sizes: Sizes) -> np.ndarray:
    """Which weights dropout keeps: each has a 32-bit number, mixed from the seed and its place one after the other."""
    few = 2**32

    def mix(x: int) -> int:
        x = (x + 0x9E3779B9) % few
        x = (x ^ (x >> 16)) * 0x21F0AAAD % few
        x = (x ^ (x >> 15)) * 0x735A2D97 % few
        return x ^ (x >> 15)

    start = mix(mix(seed % few) ^ (seed // few))
    by_key = [mix(j) for j in range(sizes.keys)]
    kept = np.empty(sizes, bool)
    for number in range(sizes.batch * sizes.heads):
        head = mix(start ^ number)
        for i in range(sizes.queries):
            row = mix(head ^ i)
            draws = [mix(row ^ key) for key in by_key]
            kept[number // sizes.heads, number % sizes.heads, i] = [n >= round(probability * few) for n in draws]
    return kept
