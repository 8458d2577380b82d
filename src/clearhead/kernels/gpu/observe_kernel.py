"""The second look: weights again from queries, keys and denominators, read by keys or by queries.

By keys, a block of keys stays and the queries go by: what each key received, and a pooled map, are sums down the
columns and need no other program's help, so nothing is added in an order that differs from run to run. By queries, a
block of queries stays: its largest weights, or whole rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.kernels.gpu.device import (
    allowed_by_program,
    allowed_by_span,
    key_tiles,
    load_numbers,
    load_rows,
    multiply,
    next_tile,
    score,
    span_of,
)


@triton.jit
def allowed(limits, mask, rows, columns, head, batch, T, S, form: tl.constexpr):
    """True where a query may attend to a key."""
    if form.program is None:
        found = allowed_by_span(limits[0], limits[1], limits[2], rows, columns)
    else:
        found = allowed_by_program(mask, rows, columns, head, batch, T, S, form)
    return found


@triton.jit(do_not_specialize=["count"])
def relative_rows(peaks, totals, shifts, inverses, count, ratio, rest, EXACT: tl.constexpr, N: tl.constexpr):
    """The shift of each query, and the inverse of its total relative to it; ratio + rest is what peaks are times."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    inside = at < count
    peak = tl.load(peaks + at, mask=inside, other=0.0)
    total = tl.load(totals + at, mask=inside, other=1.0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.where(total == 0, 1.0, total)
    if EXACT:
        exact = peak.to(tl.float64) * ratio + peak.to(tl.float64) * rest
        shift = exact.to(tl.float32)
        inverse = tl.exp2((shift.to(tl.float64) - exact).to(tl.float32)) / total
    else:
        shift = peak * 1.4426950408889634
        inverse = 1.0 / total
    tl.store(shifts + at, shift, mask=inside)
    tl.store(inverses + at, inverse, mask=inside)


@triton.jit(do_not_specialize=["span", "states", "mask", "scoring"])
def by_key(
    q, k, shift_at, inverse_at, received_at, sums_at, tops_at, q_strides, k_strides,
    span, states, mask, scoring, T, S, counted, bins, each, first_number,
    RECEIVED: tl.constexpr, MAP: tl.constexpr, POOLED: tl.constexpr, LISTED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """What a block of keys received of the queries from `counted` on, and from each bin of queries (sum, largest).

    RECEIVED is 0 for no, 1 for all queries (or, without a map, those that count), 2 for some. `each` is how many tiles
    a bin has. POOLED: the block's keys are in one cell of the map. LISTED is the number of queries that an entry of
    `states` speaks of, or 0 for spans.
    """
    across = tl.cdiv(S, BN)
    number, block = first_number + tl.program_id(0) // across, tl.program_id(0) % across
    batch, head = number // form.heads, number % form.heads
    q += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    k += batch.to(tl.int64) * k_strides[0] + (head // form.group).to(tl.int64) * k_strides[1]
    shift_at += number.to(tl.int64) * T
    inverse_at += number.to(tl.int64) * T
    keys = load_rows(k, k_strides[2], block * BN, 0, S, BN, form.head_dim, form.padded_head_dim, False)
    places = block * BN + tl.arange(0, BN)
    columns = places[:, None]
    limits = span_of(span, batch, form)
    row_low, row_high = 0, T
    if LISTED == 0:  # the queries that see any of these keys
        row_low = tl.maximum(block * BN - limits[1], 0)
        row_high = tl.minimum(tl.minimum(block * BN + BN, limits[2]) - limits[0], T)
        row_high = tl.where(block * BN < limits[2], row_high, 0)
    else:
        mask_head = 0
        if states.by_head:
            mask_head = head
        state_row = (batch * states.by_batch * states.mask_heads + mask_head) * states.down
    # One loop over all tiles, so that its pipeline is filled once: `each` tiles a bin, the last maybe cut short.
    # Bins that nobody of here sees are left out; their strips are zeros already.
    lowest = 0
    if not MAP:
        lowest = counted
    begin, end = tl.maximum(row_low, lowest) // BM, tl.cdiv(row_high, BM)
    if MAP:
        begin = (tl.cast(row_low, tl.int64) * bins // T).to(tl.int32) * each
        end = ((tl.cast(row_high, tl.int64) - 1) * bins // T + 1).to(tl.int32) * each
        end = tl.where(row_low < row_high, end, begin)
    received = tl.zeros((BN,), tl.float32)
    sums = tl.zeros((BN,), tl.float32)
    tops = tl.zeros((BN,), tl.float32)
    for i in range(begin, end):
        first, stop = i * BM, T
        if MAP:
            place = i // each
            first = tl.cdiv(tl.cast(place, tl.int64) * T, bins).to(tl.int32) + (i - place * each) * BM
            stop = tl.cdiv(tl.cast(place + 1, tl.int64) * T, bins).to(tl.int32)
        live = True
        if LISTED == 0:
            full = (first + BM <= stop) & (first + BM - 1 + limits[0] <= block * BN) & (first >= lowest)
            full = full & (first + limits[1] >= block * BN + BN - 1) & (block * BN + BN <= limits[2])
        else:
            last = tl.minimum(tl.minimum(first + BM, stop), T) - 1
            entry = tl.minimum(first, T - 1) // LISTED
            one = tl.load(states.tiles + tl.cast(state_row + entry, tl.int64) * across + block)
            two = tl.load(states.tiles + tl.cast(state_row + last // LISTED, tl.int64) * across + block)
            live = ((one + two) > 0) & (first < stop)
            full = ((one + two) == 4) & (first + BM <= stop) & (first >= lowest)
        if live:
            queries = load_rows(q, q_strides[2], first, 0, stop, BM, form.head_dim, form.padded_head_dim, False)
            product = multiply(keys, tl.trans(queries), tl.zeros((BN, BM), tl.float32), form)
            rows = (first + tl.arange(0, BM))[None, :]
            scores, _ = score(product, scoring, rows, columns, head, batch, T, S, form)
            shift = load_numbers(shift_at, first, 0, stop, BM, 0.0)
            inverse = load_numbers(inverse_at, first, 0, stop, BM, 0.0)
            weights = tl.exp2(tl.fma(scores, scoring.factor, -shift[None, :])) * inverse[None, :]
            if not full:
                inside = allowed(limits, mask, rows, columns, head, batch, T, S, form)
                weights = tl.where(inside & (rows < stop) & (rows >= lowest), weights, 0.0)
            sums += tl.sum(weights, 1)
            if MAP:
                tops = tl.maximum(tops, tl.max(weights, 1))
            if RECEIVED == 2:
                received += tl.sum(tl.where(rows >= counted, weights, 0.0), 1)
        if MAP:
            done = i - i // each * each == each - 1
            if done:
                strip = tl.cast(tl.program_id(0) // across, tl.int64) * bins + i // each
                if POOLED:  # a maximum does not keep NaN, a sum does
                    sum_of_all = tl.sum(sums, 0)
                    tl.store(sums_at + strip * across + block, sum_of_all)
                    largest = tl.where(sum_of_all == sum_of_all, tl.max(tops, 0), sum_of_all)
                    tl.store(tops_at + strip * across + block, largest)
                else:
                    tl.store(sums_at + strip * S + places, sums, mask=places < S)
                    tl.store(tops_at + strip * S + places, tl.where(sums == sums, tops, sums), mask=places < S)
            if RECEIVED == 1:
                received += tl.where(done, sums, 0.0)
            sums = tl.where(done, 0.0, sums)
            tops = tl.where(done, 0.0, tops)
    if RECEIVED != 0:
        if not MAP:
            received = sums
        tl.store(received_at + tl.cast(number, tl.int64) * S + places, received, mask=places < S)


@triton.jit
def pool(
    sums, tops, mean, most, units, T, S, bins, cells, first_number,
    EVEN: tl.constexpr, CELLS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Strips of a map, one number for each of `units`, become cells: the mean and the largest; CELLS to a program.

    EVEN where all cells have the same number of queries and of units: no division for each of them.
    """
    strip = tl.program_id(0)
    cell = (tl.program_id(1) * CELLS + tl.arange(0, CELLS)).to(tl.int64)
    if EVEN:
        start = cell * (units // cells)
        stop = tl.where(cell < cells, start + units // cells, 0)
    else:
        start = tl.cdiv(cell * units, cells)
        stop = tl.where(cell < cells, tl.cdiv((cell + 1) * units, cells), 0)
    base = strip.to(tl.int64) * units
    total = tl.zeros((CELLS, BN), tl.float32)
    largest = tl.zeros((CELLS, BN), tl.float32)
    for first in range(0, tl.cdiv(units, cells), BN):
        at = start[:, None] + first + tl.arange(0, BN)[None, :]
        inside = at < stop[:, None]
        total += tl.load(sums + base + at, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.load(tops + base + at, mask=inside, other=0.0))
    if EVEN:
        pairs = tl.cast(T // bins, tl.int64) * (S // cells)
    else:
        place = tl.cast(strip % bins, tl.int64)
        rows = tl.cdiv((place + 1) * T, bins) - tl.cdiv(place * T, bins)
        pairs = rows * (tl.cdiv((cell + 1) * S, cells) - tl.cdiv(cell * S, cells))
    at = (first_number * bins + strip).to(tl.int64) * cells + cell
    total = tl.sum(total, 1)
    tl.store(mean + at, total / pairs.to(tl.float32), mask=cell < cells)
    tl.store(most + at, tl.where(total == total, tl.max(largest, 1), total), mask=cell < cells)


@triton.jit
def keep_best(scores, best, where, columns, K: tl.constexpr):
    """The K largest scores so far and their keys, in no order, after one more tile."""
    slots = tl.arange(0, K)[None, :]
    worst = tl.min(best, 1)
    peak = tl.max(scores, 1)
    while tl.max((peak > worst).to(tl.int32), 0) > 0:
        better = peak > worst
        found = tl.min(tl.where(scores == peak[:, None], columns, 2147483647), 1)
        slot = tl.min(tl.where(best == worst[:, None], slots, K), 1)
        here = (slots == slot[:, None]) & better[:, None]
        best = tl.where(here, peak[:, None], best)
        where = tl.where(here, found[:, None], where)
        scores = tl.where((columns == found[:, None]) & better[:, None], float("-inf"), scores)
        worst = tl.min(best, 1)
        peak = tl.max(scores, 1)
    return best, where


@triton.jit(do_not_specialize=["span", "lists", "mask", "scoring"])
def top_keys(
    q, k, shift_at, inverse_at, weights_at, indices_at, q_strides, k_strides, span, lists, mask, scoring, T, S, count,
    K: tl.constexpr, REVERSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The `count` largest weights of each query of a block, in descending order, and their keys; −1 for none."""
    blocks = tl.cdiv(T, BM)
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if REVERSED:
        block = blocks - 1 - block
    batch, head = number // form.heads, number % form.heads
    q += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    k += batch.to(tl.int64) * k_strides[0] + (head // form.group).to(tl.int64) * k_strides[1]
    rows = block * BM + tl.arange(0, BM)
    queries = load_rows(q, q_strides[2], block * BM, 0, T, BM, form.head_dim, form.padded_head_dim, False)
    limits = span_of(span, batch, form)
    slots = tl.arange(0, K)[None, :]
    # places beyond the count are never the worst
    best = tl.where(slots < count, float("-inf"), float("inf")) + tl.zeros((BM, K), tl.float32)
    where = tl.full((BM, K), -1, tl.int32)
    mixed, full, a, b, c = key_tiles(span, lists, batch, head, block, T, BM, BN, form)
    seen = 0
    for i in range(mixed + full):  # in the order of keys: of equal weights those of the first keys are kept
        tile, masked, seen = next_tile(lists, i, seen, mixed, full, a, b, c, form)
        columns = (tile * BN + tl.arange(0, BN))[None, :]
        keys = load_rows(k, k_strides[2], tile * BN, 0, S, BN, form.head_dim, form.padded_head_dim, False)
        product = multiply(queries, tl.trans(keys), tl.zeros((BM, BN), tl.float32), form)
        scores, _ = score(product, scoring, rows[:, None], columns, head, batch, T, S, form)
        if masked:
            inside = allowed(limits, mask, rows[:, None], columns, head, batch, T, S, form)
            scores = tl.where(inside, scores, float("-inf"))
        best, where = keep_best(scores, best, where, columns, K)
    here = number.to(tl.int64) * T + rows
    inside = rows < T
    shift = tl.load(shift_at + here, mask=inside, other=0.0)
    inverse = tl.load(inverse_at + here, mask=inside, other=0.0)
    best = tl.where(where < 0, float("-inf"), best)
    for rank in range(count):  # of equal ones the first key
        most = tl.max(best, 1)
        chosen = tl.min(tl.where(best == most[:, None], where, 2147483647), 1)
        weights = tl.exp2(tl.fma(most, scoring.factor, -shift)) * inverse
        tl.store(weights_at + here * count + rank, weights, mask=inside)
        tl.store(indices_at + here * count + rank, tl.where(weights > 0, chosen, -1).to(tl.int64), mask=inside)
        best = tl.where(where == chosen[:, None], float("-inf"), best)


@triton.jit(do_not_specialize=["span", "mask", "scoring"])
def rows_of_weights(
    q, k, shift_at, inverse_at, chosen, weights_at, q_strides, k_strides, span, mask, scoring, T, S, count,
    BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The weights of `count` chosen queries over all keys, zeros where they may not attend."""
    across, down = tl.cdiv(S, BN), tl.cdiv(count, BM)
    tile, rest = tl.program_id(0) % across, tl.program_id(0) // across
    block, number = rest % down, rest // down
    batch, head = number // form.heads, number % form.heads
    q += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    k += batch.to(tl.int64) * k_strides[0] + (head // form.group).to(tl.int64) * k_strides[1]
    PADDED: tl.constexpr = form.padded_head_dim
    place = block * BM + tl.arange(0, BM)
    rows = tl.load(chosen + place, mask=place < count, other=0)
    features = tl.arange(0, PADDED)
    at = q + rows.to(tl.int64)[:, None] * q_strides[2] + features[None, :]
    queries = tl.load(at, mask=(place < count)[:, None] & (features < form.head_dim)[None, :], other=0.0)
    columns = (tile * BN + tl.arange(0, BN))[None, :]
    keys = load_rows(k, k_strides[2], tile * BN, 0, S, BN, form.head_dim, form.padded_head_dim, False)
    product = multiply(queries, tl.trans(keys), tl.zeros((BM, BN), tl.float32), form)
    scores, _ = score(product, scoring, rows[:, None], columns, head, batch, T, S, form)
    here = number.to(tl.int64) * T + rows
    shift = tl.load(shift_at + here)
    inverse = tl.load(inverse_at + here)
    weights = tl.exp2(tl.fma(scores, scoring.factor, -shift[:, None])) * inverse[:, None]
    inside = allowed(span_of(span, batch, form), mask, rows[:, None], columns, head, batch, T, S, form)
    weights = tl.where(inside, weights, 0.0)
    at = ((number.to(tl.int64) * count + place) * S)[:, None] + columns
    tl.store(weights_at + at, weights, mask=(place < count)[:, None] & (columns < S))
