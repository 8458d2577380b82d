"""What every GPU kernel does to a tile: load it, multiply, turn products into scores, mask them, drop weights.

Functions here are Triton's and run on the device; `KernelForm` says what is fixed when they are compiled, the other
tuples what is not. Scores are kept in `unit`s of nats: where a score is only a scaled product it stays the bare
product, and 2^(score · factor − shift) is its exponential, one multiply-add and one exponential for each pair. ALiBi's
slopes and tables of biases are then divided by the scale, so that they join the bare product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs

from clearhead.core.lowered import NodeKind

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# nodes of a mask in postfix order: (kind, its first array, 1 if batch rows differ, constant, heads of its table)
BAND, BEFORE, DOCUMENTS, FLAGS, BLOCKS, ARRAY, AND, OR, NOT = map(tl.constexpr, map(int, NodeKind))
# biases
NONE, ADDED, ALIBI, TABLE = map(tl.constexpr, range(4))


class KernelForm(NamedTuple):
    """What a kernel is compiled for."""

    head_dim: int  # D and Dv, and the powers of two that hold them
    padded_head_dim: int
    value_dim: int
    padded_value_dim: int
    group: int  # query heads that share a key head
    heads: int
    raw: bool  # scores stay in the unit of products: a positive scale is in the factor
    softcap: bool
    bias: int
    bias_by_row: bool  # each batch row has an offset of its own
    span_by_row: bool
    program: tuple[tuple[int, ...], ...] | None  # a mask that is no span, in postfix order
    dropout: bool
    described: bool  # full tiles of keys and values come through tensor descriptors (TMA)


class Scoring(NamedTuple):
    """Numbers and arrays that make a product a score."""

    scale: float
    factor: float  # log2(e) in the unit of scores
    softcap: float
    bias: Any
    # strides of the bias, one by one: Triton 3.6 loses a stride of 1 in a tuple inside a tuple
    bias_batch: int
    bias_head: int
    bias_row: int
    bias_column: int
    bias_offset: Any  # the key position of query 0: a number, or one for each batch row
    centre: int  # where distance 0 is in a table of biases
    rescale: float  # dropout
    threshold: int
    seed: int


class Span(NamedTuple):
    """Keys from query + low to query + high, below limit; `rows` holds the three for each batch row."""

    low: int
    high: int
    limit: int
    rows: Any


@triton.jit
def multiply(a, b, acc, form: tl.constexpr):
    """acc + a b, float32 as exactly as the formula has it."""
    if INTERPRETED:  # bfloat16 products are wrong in the interpreter
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def multiply_allowed(pairs, rows, allowed, acc, form: tl.constexpr):
    """acc + pairs rows, in which only pairs that are allowed take part.

    The others are 0, but in a product 0 · NaN is NaN. What is not finite is left out, and NaN put where it is seen.
    """
    return spoil(multiply(pairs, finite_part(rows), acc, form), allowed, rows)


@triton.jit
def finite_part(rows):
    """Zeros in place of what is not finite."""
    return tl.where(tl.abs(rows.to(tl.float32)) < float("inf"), rows, 0.0)


@triton.jit
def spoil(acc, allowed, rows):
    """NaN where a pair that is allowed meets a number of the rows that is not finite: a product of ones tells."""
    odd = tl.where(tl.abs(rows.to(tl.float32)) < float("inf"), 0.0, 1.0)
    met = tl.dot(allowed.to(tl.float32).to(tl.float16), odd.to(tl.float16), out_dtype=tl.float32)
    return tl.where(met > 0, float("nan"), acc)


@triton.jit
def load_rows(
    base, stride, first, low, high, N: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr, ALL: tl.constexpr
):
    """Rows first … first + N of a matrix, zeros outside low … high − 1; ALL where none is outside."""
    rows, columns = tl.arange(0, N), tl.arange(0, PADDED)
    at = base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if ALL and W == PADDED:
        return tl.load(at)
    inside = (columns < W)[None, :]
    if not ALL:
        inside = inside & ((first + rows >= low) & (first + rows < high))[:, None]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_described(tensor, batch, head, first, N: tl.constexpr, PADDED: tl.constexpr):
    """Rows first … first + N of a head, fetched by the copy engine; zeros past the end."""
    return tl.reshape(tensor.load([batch, head, first, 0]), (N, PADDED))


@triton.jit
def load_numbers(base, first, low, high, N: tl.constexpr, other):
    """Numbers first … first + N of a vector, `other` outside low … high − 1."""
    at = first + tl.arange(0, N)
    return tl.load(base + at, mask=(at >= low) & (at < high), other=other)


@triton.jit
def span_of(span, batch, form: tl.constexpr):
    """(low, high, count) of a batch row."""
    if form.span_by_row:
        at = span.rows + 3 * batch
        return tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return span.low, span.high, span.limit


@triton.jit
def allowed_by_program(mask, rows, columns, head, batch, T, S, form: tl.constexpr):
    """True where a query may attend to a key: the postfix program on a stack of bits, one number for each pair.

    `rows` and `columns` broadcast against each other, in either order.
    """
    stack = ((rows + columns) * 0).to(tl.int32)
    inside_rows, inside_columns = rows < T, columns < S
    for i in tl.static_range(len(form.program)):
        if form.program[i][0] == AND:
            stack = (stack >> 1) & (stack | -2)
        elif form.program[i][0] == OR:
            stack = (stack >> 1) | (stack & 1)
        elif form.program[i][0] == NOT:
            stack = stack ^ 1
        else:
            leaf = stack * 0
            if form.program[i][0] == BAND:
                limits = mask[form.program[i][1]] + 2 * batch * form.program[i][2]
                apart = columns - rows
                leaf = ((apart >= tl.load(limits)) & (apart <= tl.load(limits + 1))).to(tl.int32)
            elif form.program[i][0] == BEFORE:
                count = tl.load(mask[form.program[i][1]] + batch * form.program[i][2])
                leaf = ((columns + rows * 0) < count).to(tl.int32)
            elif form.program[i][0] == DOCUMENTS:
                queries = mask[form.program[i][1]] + batch * form.program[i][2] * T
                keys = mask[form.program[i][1] + 1] + batch * form.program[i][2] * S
                mine = tl.load(queries + rows, mask=inside_rows, other=0)
                leaf = (mine == tl.load(keys + columns, mask=inside_columns, other=0)).to(tl.int32)
            elif form.program[i][0] == FLAGS:
                queries = mask[form.program[i][1]] + batch * form.program[i][2] * T
                mine = tl.load(queries + rows, mask=inside_rows, other=0) != 0
                keys = mask[form.program[i][1] + 1] + batch * form.program[i][2] * S
                theirs = tl.load(keys + columns, mask=inside_columns, other=0) != 0
                # truths, not bytes: of those the LLVM of Triton 3.6 makes vectors, and then stops the process
                leaf = (mine | theirs).to(tl.int32)
            elif form.program[i][0] == BLOCKS:
                across = (S + form.program[i][3] - 1) // form.program[i][3]
                place = (rows // form.program[i][3]) * across + columns // form.program[i][3]
                table = mask[form.program[i][1]]
                if form.program[i][2] or form.program[i][4]:
                    cells = ((T + form.program[i][3] - 1) // form.program[i][3]) * across
                    if form.program[i][4]:
                        table += (batch * form.program[i][2] * form.program[i][4] + head).to(tl.int64) * cells
                    else:
                        table += batch.to(tl.int64) * cells
                leaf = tl.load(table + place, mask=inside_rows & inside_columns, other=0).to(tl.int32)
            else:
                base = mask[form.program[i][1]] + batch.to(tl.int64) * mask[form.program[i][1] + 1]
                base += head * mask[form.program[i][1] + 2]
                place = rows.to(tl.int64) * mask[form.program[i][1] + 3]
                place += columns.to(tl.int64) * mask[form.program[i][1] + 4]
                leaf = tl.load(base + place, mask=inside_rows & inside_columns, other=0).to(tl.int32)
            stack = (stack << 1) | leaf
    return ((stack & 1) != 0) & inside_rows & inside_columns


@triton.jit
def allowed_by_span(low, high, count, rows, columns):
    """True where a query may attend to a key, by a span."""
    apart = columns - rows
    return (apart >= low) & (apart <= high) & (columns < count)


@triton.jit
def capped(x):
    """tanh x. One exponential, and no branch; as exact as scores are."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def score(product, scoring, rows, columns, head, batch, T, S, form: tl.constexpr):
    """A product as a score in the unit of scores, before any mask; and the slope of its cap."""
    slope = 1.0
    scores = product
    if not form.raw:
        scores = product * scoring.scale
        if form.softcap:
            t = capped(scores / scoring.softcap)
            scores = scoring.softcap * t
            slope = 1.0 - t * t
    if form.bias == ADDED:
        base = scoring.bias + batch.to(tl.int64) * scoring.bias_batch + head * scoring.bias_head
        place = rows.to(tl.int64) * scoring.bias_row + columns.to(tl.int64) * scoring.bias_column
        inside = (rows < T) & (columns < S)
        scores += tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    elif form.bias != NONE:
        offset = scoring.bias_offset
        if form.bias_by_row:
            offset = tl.load(scoring.bias_offset + batch)
        if form.bias == ALIBI:
            # positions become floats before they meet: a conversion for each pair would cost as much as the exponential
            back = (rows + offset).to(tl.float32) - columns.to(tl.float32)
            scores = tl.fma(-tl.load(scoring.bias + head), tl.abs(back), scores)
        else:
            inside = (rows < T) & (columns < S)
            place = head * scoring.bias_head + (rows + offset - columns) + scoring.centre
            scores += tl.load(scoring.bias + place, mask=inside, other=0.0)
    return scores, slope


@triton.jit
def mix(x):
    """Scramble 32-bit numbers, as `dropout.mix` does."""
    x = x + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def kept(scoring, rows, columns, head, batch, form: tl.constexpr):
    """True where dropout keeps a weight."""
    number = (batch * form.heads + head).to(tl.uint32, bitcast=True)
    seed = tl.full((), scoring.seed, tl.int32).to(tl.uint32, bitcast=True)
    threshold = tl.full((), scoring.threshold, tl.int32).to(tl.uint32, bitcast=True)
    row = mix(mix(seed ^ number) ^ rows.to(tl.uint32, bitcast=True))
    return mix(row ^ mix(columns.to(tl.uint32, bitcast=True))) >= threshold


@triton.jit
def key_tiles(span, lists, batch, head, block, T, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr):
    """The tiles of keys that a block of queries meets, as numbers for `key_tile`: (mixed, full, a, b, c).

    Spans: a first tile, how many mixed ones come before the full ones, the first full one. Lists: where they lie.
    """
    if form.program is None:
        low, high, count = span_of(span, batch, form)
        first_row = block * BM
        last_row = tl.minimum(first_row + BM, T) - 1
        a = tl.maximum(first_row + low, 0) // BN
        stop = tl.maximum(tl.cdiv(tl.minimum(count, last_row + high + 1), BN), a)
        b = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last_row + low, 0), BN), a), stop)
        c = tl.minimum(tl.maximum(tl.minimum(count, first_row + high + 1) // BN, b), stop)
        full = c - b
        mixed = stop - a - full
    else:
        row = (batch * lists.by_batch * lists.mask_heads + head * lists.by_head) * lists.down + block
        a = tl.load(lists.counts + 3 * row).to(tl.int64)
        mixed = tl.load(lists.counts + 3 * row + 1)
        full = tl.load(lists.counts + 3 * row + 2)
        b = mixed
        c = mixed
    return mixed, full, a, b, c


@triton.jit
def key_tile(lists, i, a, b, c, FULL: tl.constexpr, form: tl.constexpr):
    """The number of the i-th mixed or full tile."""
    if form.program is None:
        if FULL:
            tile = b + i
        else:
            tile = tl.where(i < b - a, a + i, c + i - (b - a))
    elif FULL:
        tile = tl.load(lists.tiles + a + b + i)
    else:
        tile = tl.load(lists.tiles + a + i)
    return tile


@triton.jit
def any_tile(lists, i, mixed, a, b, c, form: tl.constexpr):
    """The number of the i-th tile, the mixed ones first."""
    tile = key_tile(lists, i, a, b, c, False, form)  # of lists, the full ones follow the mixed ones
    if form.program is None:
        tile = tl.where(i < mixed, tile, b + i - mixed)
    return tile


@triton.jit
def next_tile(lists, i, seen, mixed, full, a, b, c, form: tl.constexpr):
    """The i-th tile in the order of keys, whether it is mixed, and how many of those seen so far are."""
    if form.program is None:
        tile = a + i
        masked = (tile < b) | (tile >= c)
    else:  # two lists in order become one
        end = 2147483647
        one = tl.load(lists.tiles + a + seen, mask=seen < mixed, other=end)
        two = tl.load(lists.tiles + a + mixed + i - seen, mask=i - seen < full, other=end)
        tile = tl.minimum(one, two)
        masked = one < two
    return tile, masked, seen + masked.to(tl.int32)


class Lists(NamedTuple):
    """For each block of one side, the tiles of the other that are mixed and then those that are full.

    `counts` has for each block where its tiles begin, how many are mixed and how many full.
    """

    tiles: Any
    counts: Any
    by_batch: int
    by_head: int
    mask_heads: int
    down: int
    across: int
