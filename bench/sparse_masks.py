"""Sparse masks for both benchmarks, each as our value and as the rule of pairs that FlexAttention takes; their rows.

Longformer, BigBird, block top-k (16 of 256 blocks for each block of queries), prefix with window, unsorted documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from cpu_turns import measure
from torch.nn.functional import scaled_dot_product_attention

import clearhead as ch
from clearhead.core.grid import Grid
from clearhead.core.runs import runs

if TYPE_CHECKING:
    from cpu import Report
    from gpu import Bench

HEADS, BLOCK, CHOSEN = 8, 64, 16


class Pattern(NamedTuple):
    """A mask, and the same as a rule of (batch, head, query, key)."""

    mask: ch.Mask
    rule: Callable[..., torch.Tensor]


def patterns(n: int, device: str, tokens: int, other: int = 0) -> dict[str, Pattern]:
    """The masks for n tokens, `tokens` of them global; `other`: alike but for their numbers, so that none is known."""
    rng = np.random.default_rng(other)
    blocks = min(256, n // 32)
    size = n // blocks
    top = np.zeros((blocks, blocks), bool)
    for row in top:
        row[rng.permutation(blocks)[:CHOSEN]] = True
    drawn = ch.random_blocks(BLOCK, count=3, seed=other)
    cells = drawn.lower(Grid((), 1, n, n)).rows()[0].reshape(-(-n // BLOCK), -1)
    ids = (np.arange(n) // 512 * 7 + other) % (n // 512)  # each in one piece, but not in order
    chosen, random, document = (torch.from_numpy(np.array(a)).to(device) for a in (top, cells, ids))

    def near(i: Any, j: Any, back: int, ahead: int) -> Any:
        return (j >= i - back) & (j <= i + ahead)

    return {
        "Longformer": Pattern(
            ch.window(256 - other, 256) | ch.global_tokens(range(tokens)),
            lambda b, h, i, j: near(i, j, 256 - other, 256) | (i < tokens) | (j < tokens),
        ),
        "BigBird": Pattern(
            ch.window(192 - other, 192) | ch.global_tokens(range(tokens)) | drawn,
            lambda b, h, i, j: (
                near(i, j, 192 - other, 192) | (i < tokens) | (j < tokens) | random[i // BLOCK, j // BLOCK]
            ),
        ),
        "block top-k": Pattern(ch.blocks(top, size), lambda b, h, i, j: chosen[i // size, j // size]),
        "prefix and window": Pattern(
            ch.prefix(512) | ch.window(512 - other), lambda b, h, i, j: near(i, j, 512 - other, 0) | (j < 512)
        ),
        "unsorted documents": Pattern(ch.documents(ids), lambda b, h, i, j: document[i] == document[j]),
    }


def share(mask: ch.Mask, n: int) -> float:
    """The part of all pairs that a mask lets through, exactly."""
    return runs(mask, Grid((), 1, n, n), 1, 1).pairs / n**2


def on_cpu(report: Report, n: int = 8192, width: int = 64) -> None:
    """Time by what is let through, against the same boolean mask, and as an array."""
    report.title(f"sparse masks at N {n}, D {width}: our time ÷ (share of pairs · our unmasked time); SDPA ÷ ours")
    q, k, v = (torch.randn(1, HEADS, n, width) for _ in range(3))
    for name, (mask, _) in patterns(n, "cpu", 16).items():
        array = torch.from_numpy(np.array(mask.dense(n)[0]))
        times = measure(
            {
                "plain": partial(ch.attention, q, k, v),
                "mask": partial(ch.attention, q, k, v, mask=mask),
                "array": partial(ch.attention, q, k, v, mask=ch.where(array)),
                "sdpa": partial(scaled_dot_product_attention, q, k, v, attn_mask=array),
            },
            least=5,
            seconds=5.0,
        )
        part = share(mask, n)
        report.add(name, "its share of plain", times["mask"] / times["plain"] / part, "≤ 1.40", share=round(part, 4))
        report.add(name, "SDPA, same mask", times["sdpa"] / times["mask"], "≥ 10.0" if name == "Longformer" else "")
        report.add(name, "as an array, by ours", times["array"] / times["mask"], "≤ 1.30")


def on_gpu(bench: Bench, tensors: Callable[..., Any], flex: Callable[..., Any], together: Callable[..., Any]) -> None:
    """Against compiled FlexAttention with its block mask prebuilt; observing."""
    for n in (8192, 16384):
        for width in (64, 128):
            q, k, v = tensors(n, width)
            trained = tensors(n, width, grad=True)
            dout = torch.randn_like(q)
            for name, (mask, rule) in patterns(n, "cuda", 64).items():
                ours, learnt = partial(ch.attention, mask=mask), flex(*trained, rule=rule)

                def both(call: Callable[[], torch.Tensor], trained: Any = trained, dout: Any = dout) -> Any:
                    return torch.autograd.grad(call(), trained, dout)

                what = f"{name}, N {n:,}, D {width}"
                theirs, mine = together({"flex": flex(q, k, v, rule=rule), "ours": partial(ours, q, k, v)}).values()
                bench.add(f"{what}: forward, ours", mine, "ms")
                bench.at_least(f"{what}: forward, FlexAttention's time by ours", theirs / mine, "×", 1.3)
                theirs, whole = together(
                    {"flex": partial(both, learnt), "ours": partial(both, partial(ours, *trained))}
                ).values()
                bench.at_least(f"{what}: forward and backward", theirs / whole, "×", 1.2)
                own, seen = together(
                    {
                        "own": partial(ours, q, k, v),
                        "seen": partial(ch.observe, q, k, v, mask=mask, received=True, top=8),
                    }
                ).values()
                bench.at_most(f"{what}: received and top=8 by our forward", seen / own, "×", 2.2)


def first_calls(bench: Bench, tensors: Callable[..., Any], n: int = 131_072, width: int = 128, tries: int = 5) -> None:
    """What the first call with a mask takes beyond later ones, and what the second does; of that, the runs of tiles.

    Masks of each try are alike but for their numbers, so that all kernels were compiled before; times are medians.
    """
    q, k, v = tensors(n, width)

    def once(mask: ch.Mask) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        ch.attention(q, k, v, mask=mask)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    some = [patterns(n, "cpu", 64, other) for other in range(tries + 1)]
    for name in some[0]:
        known, *masks = (one[name].mask for one in some)
        for _ in range(4):
            once(known)
        first, second, later = np.median(
            [(once(mask), once(mask), np.median([once(mask) for _ in range(5)])) for mask in masks], axis=0
        ).tolist()
        what = f"{name}, N {n:,}, D {width}"
        bench.add(f"{what}: a call", later, "ms")
        bench.add(f"{what}: the first call beyond it", first - later, "ms")
        bench.at_most(f"{what}: the first call by later ones", first / later, "×", 1.02)
        bench.at_most(f"{what}: the second call by later ones", second / later, "×", 1.02)
        on_host = []
        for mask in masks:
            start = time.perf_counter()
            found = runs(mask, Grid((1,), 16, n, n), 128, 128, whole=True)
            found.lists(), found.lists(turned=True)
            on_host.append((time.perf_counter() - start) * 1e3)
        bench.add(f"{what}: runs of tiles, on the host", float(np.median(on_host)), "ms")
