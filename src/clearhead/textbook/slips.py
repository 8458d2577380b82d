"""Numbers that the texts print and that are slightly wrong, each beside the right one, which the library computes.

>>> print(page())
text            what                                      printed             right
linear algebra  A₀, the weights of the first query        .382 .382 .236      .401 .401 .198
linear algebra  O₀, the first number of its output        .618                .599
linear algebra  GPT-3 at 16k tokens, FLOP of attention    4e12                1.28e15
course          32 × 96 matrices of 2048², entries        12.8e9              12.88e9
course          the same in float32, GB                   51.2                51.5
course          the same for 96 layers, TB                4.9                 4.95
tutorial        scaled scores of "it"                     7.09 4.96           7.07 4.95
tutorial        what "because" adds to the second number  .04                 .03
book            bars of "The", in signs                   4 11 7 7 9 cut off  4 12 7 7 9 rounded
<BLANKLINE>
The texts count multiply-adds, the library FLOP, two for each. For 512 tokens of 64 features:
what                          multiply-adds      FLOP
q kᵀ, one head                16.8M (17M)        33.6M
q kᵀ and weights v, one head  33.6M (34M)        67.1M
the same, eight heads         268.4M (270M)      536.9M
softmax                       262K, one a score  1.3M, five a score
<BLANKLINE>
AlphaFold 2 is counted at 500 residues there. A row for GPT-4 is left out here: its sizes were never published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from clearhead.measure.costs import PUBLISHED, Configuration, cost
from clearhead.measure.plans import plan
from clearhead.textbook.chapter import WIDTH
from clearhead.textbook.examples import EXAMPLES
from clearhead.textbook.names import ScaledDotProductAttention, scaled_dot_product_attention


@dataclass(frozen=True)
class Slip:
    """One number or row of numbers: which text has it, what it is, as printed there, and as it is.

    >>> slips()[0].printed, slips()[0].right
    ('.382 .382 .236', '.401 .401 .198')
    """

    text: str
    what: str
    printed: str
    right: str


def slips() -> tuple[Slip, ...]:
    """Every slip, computed now.

    >>> [slip.right for slip in slips() if slip.text == "tutorial"]
    ['7.07 4.95', '.03']
    """
    algebra, animal, sentence = (EXAMPLES[name] for name in ("two_by_three", "it_animal", "cat_sat"))
    output, weights = scaled_dot_product_attention(algebra.q, algebra.k, algebra.v)
    it = ScaledDotProductAttention(2)
    scaled = it.scale_scores(it.compute_scores(animal.q, animal.k))
    added = it.compute_weights(scaled)[0, :, None] * animal.v
    bars = WIDTH * scaled_dot_product_attention(sentence.q, sentence.k, sentence.v)[1][0]
    # no memory behind it: a plan reads sizes only
    x = np.broadcast_to(np.float32(0.0), (32, 96, 2048, 128))
    many = plan(x, x, x)
    layers = PUBLISHED["GPT-3 175B"].layers
    long = cost(replace(PUBLISHED["GPT-3 175B"], tokens=16 * 1024))
    return (
        Slip("linear algebra", "A₀, the weights of the first query", ".382 .382 .236", _places(weights[0], 3)),
        Slip("linear algebra", "O₀, the first number of its output", ".618", _places(output[0, :1], 3)),
        Slip("linear algebra", "GPT-3 at 16k tokens, FLOP of attention", "4e12", f"{long.flops:.3g}".replace("+", "")),
        Slip("course", "32 × 96 matrices of 2048², entries", "12.8e9", f"{many.all_pairs / 1e9:.2f}e9"),
        Slip("course", "the same in float32, GB", "51.2", f"{many.matrix_bytes / 1e9:.1f}"),
        Slip("course", f"the same for {layers} layers, TB", "4.9", f"{layers * many.matrix_bytes / 1e12:.2f}"),
        Slip("tutorial", 'scaled scores of "it"', "7.09 4.96", _places(scaled[0, :2], 2)),
        Slip("tutorial", 'what "because" adds to the second number', ".04", _places(added[2, 1:], 2)),
        Slip(
            "book",
            'bars of "The", in signs',
            f"{' '.join(str(int(bar)) for bar in bars)} cut off",
            f"{' '.join(str(round(bar)) for bar in bars)} rounded",
        ),
    )


def page() -> str:
    """The page: every slip, and what the texts and the library count.

    >>> print(page().splitlines()[0])
    text            what                                      printed             right
    """
    rows = [("text", "what", "printed", "right")]
    rows += [(slip.text, slip.what, slip.printed, slip.right) for slip in slips()]
    one = Configuration("one head", layers=1, heads=1, key_heads=1, features=64, tokens=512)
    steps = {step.name: step.flops for step in cost(one).steps}
    products, softmax = steps["scores"] + steps["values"], steps["softmax"]
    scores = one.tokens * one.tokens
    counts = [("what", "multiply-adds", "FLOP")]
    for what, flops, theirs in (
        ("q kᵀ, one head", steps["scores"], "17M"),
        ("q kᵀ and weights v, one head", products, "34M"),
        ("the same, eight heads", 8 * products, "270M"),
    ):
        counts.append((what, f"{flops / 2e6:.1f}M ({theirs})", f"{flops / 1e6:.1f}M"))
    each = {1: "one", 5: "five"}[softmax // scores]
    counts.append(("softmax", f"{scores / 1e3:.0f}K, one a score", f"{softmax / 1e6:.1f}M, {each} a score"))
    return "\n".join(
        [
            _table(rows),
            "",
            "The texts count multiply-adds, the library FLOP, two for each. For 512 tokens of 64 features:",
            _table(counts),
            "",
            "AlphaFold 2 is counted at 500 residues there."
            " A row for GPT-4 is left out here: its sizes were never published.",
        ]
    )


def _places(numbers: np.ndarray, places: int) -> str:
    return " ".join(f"{number:.{places}f}".removeprefix("0") for number in numbers)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    print(page())
