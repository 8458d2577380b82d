"""What attention costs on paper: multiply-adds, FLOPs and bytes of each step, and the key–value cache."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from clearhead.core.errors import ArgumentError, shown
from clearhead.explain.render.sheet import rows as table
from clearhead.explain.render.sheet import sheet
from clearhead.measure.plans import quantity
from clearhead.measure.tables import WIDTH, growth, laid_out

__all__ = ["Configuration", "Cost", "Growth", "StepCost", "cost", "grown"]

# A product of seven sizes up to this is still a float
MOST = 2**40


@dataclass(frozen=True)
class Configuration:
    """A model's attention: layers, query heads, key heads, features of a head, and how many tokens at once.

    >>> cost(Configuration("mine", layers=2, heads=4, key_heads=4, features=32, tokens=128)).flops
    17563648
    """

    name: str
    layers: int
    heads: int
    key_heads: int
    features: int
    tokens: int
    batch: int = 1
    item: int = 2  # bytes a number: half precision
    source: str = ""

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers:,} layers"
        shared = f" over {self.key_heads:,}" if self.key_heads != self.heads else ""
        batch = f", batch {self.batch:,}" if self.batch != 1 else ""
        heads = "1 head" if self.heads == 1 else f"{self.heads:,} heads{shared}"
        return f"{layers}, {heads}, {self.features:,} features, {self.tokens:,} tokens{batch}"


ALPHAFOLD = "Jumper et al. 2021, supplement, algorithm 7: row attention over"

# Sizes that were published; GPT-4's were not, and what is said of them elsewhere is guessed
PUBLISHED: dict[str, Configuration] = {
    one.name: one
    for one in (
        Configuration("GPT-3 175B", 96, 96, 96, 128, 2048, source="Brown et al. 2020, table 2.1"),
        Configuration("LLaMA-2 70B", 80, 64, 8, 128, 4096, source="Touvron et al. 2023, table 1 and appendix A.2.1"),
        Configuration(
            "ViT-L/16", 24, 16, 16, 64, 197, source="Dosovitskiy et al. 2021, table 1; 224 px in patches of 16"
        ),
        Configuration(
            "AlphaFold 2", 48, 8, 8, 32, 256, batch=128, source=f"{ALPHAFOLD} 256 residues of 128 sequences, as trained"
        ),
        Configuration(
            "AlphaFold 2, 500 residues", 48, 8, 8, 32, 500, batch=128,
            source=f"{ALPHAFOLD} 500 residues, the protein that texts count it for, of 128 sequences",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class StepCost:
    """One step of the formula as it is written.

    - flops: floating-point operations, of which a multiply-add is two and a softmax five a score.
    - bytes: read and written.
    - multiply_adds: as texts count: one for each feature of a score, one a score for the softmax, and none for the
      scale, which they take for part of the product.
    - held: bytes that there are at once while one layer does this step: q, k and v, what the step reads, and what it
      writes.

    >>> [step.name for step in cost("GPT-3 175B").steps]
    ['scores', 'scale', 'softmax', 'values']
    """

    name: str
    flops: int
    bytes: int
    multiply_adds: int = 0
    held: int = 0


@dataclass(frozen=True)
class Cost:
    """What one call costs, all layers together; `fused_bytes` is what must move where the matrix is never built.

    >>> found = cost("GPT-3 175B")
    >>> found.flops, found.cache_bytes
    (20023137533952, 9663676416)
    """

    configuration: Configuration
    steps: tuple[StepCost, ...]
    matrix_bytes: int
    fused_bytes: int
    cache_bytes: int

    @property
    def flops(self) -> int:
        """All steps together."""
        return sum(step.flops for step in self.steps)

    @property
    def bytes(self) -> int:
        """All steps together, each reading what the one before it wrote."""
        return sum(step.bytes for step in self.steps)

    @property
    def multiply_adds(self) -> int:
        """All steps together."""
        return sum(step.multiply_adds for step in self.steps)

    @property
    def held(self) -> int:
        """The most that any step holds in one layer."""
        return max(step.held for step in self.steps)

    def text(self, width: int = WIDTH) -> str:
        """The table, within a width."""
        one = self.configuration
        rows = [
            [step.name, _count(step.multiply_adds), *_amounts(step.flops, step.bytes, step.held)] for step in self.steps
        ]
        rows.append(["all", _count(self.multiply_adds), *_amounts(self.flops, self.bytes, self.held)])
        inner = max(width - 2, 1)
        lines = textwrap.wrap(str(one), inner)
        lines += laid_out(["", "multiply-adds", "FLOPs", "moved", "held/layer"], rows, inner, names=True)
        for name, amount, words in (
            ("fused", self.fused_bytes, "moved: the matrix is never built"),
            ("matrix", self.matrix_bytes, "in all layers"),
            ("cache", self.cache_bytes, "keys and values"),
        ):
            head = f"{name:<9}{quantity(amount, 1024, 'B'):<9}  {words}"
            lines += textwrap.wrap(head, inner, subsequent_indent=" " * 9 if inner > 30 else "  ")
        return "\n".join([*textwrap.wrap(one.name, width), *(f"  {line}".rstrip() for line in lines)])

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        counted = [(step.name, step.multiply_adds, step.flops, step.bytes, step.held) for step in self.steps]
        counted.append(("all", self.multiply_adds, self.flops, self.bytes, self.held))
        cells = [(name, _count(adds), *_amounts(flops, moved, held)) for name, adds, flops, moved, held in counted]
        moved = {"fused": self.fused_bytes, "matrix": self.matrix_bytes, "cache": self.cache_bytes}
        cells += [(name, "", "", quantity(size, 1024, "B"), "") for name, size in moved.items()]
        headings = ("step", "multiply-adds", "FLOPs", "moved", "held/layer")
        title = self.configuration.name
        return sheet(title, [str(self.configuration)], table(cells, headings=headings, numbers=(1, 2, 3, 4)))


def _count(value: int) -> str:
    return quantity(value, 1000, "").rstrip() if value else "–"


def _amounts(flops: int, moved: int, held: int) -> list[str]:
    return [quantity(flops, 1000, "FLOP"), quantity(moved, 1024, "B"), quantity(held, 1024, "B")]


def cost(configuration: Configuration | str) -> Cost:
    """Multiply-adds, FLOPs and bytes of each step, for a configuration or the name of a published one.

    >>> from clearhead.measure.costs import Configuration, cost
    >>> print(cost("LLaMA-2 70B"))
    LLaMA-2 70B
      80 layers, 64 heads over 8, 128 features, 4,096 tokens
               multiply-adds        FLOPs      moved  held/layer
      scores            11 T  21.99 TFLOP  165.6 GiB   2.078 GiB
      scale                –   85.9 GFLOP    320 GiB   4.078 GiB
      softmax         85.9 G  429.5 GFLOP    320 GiB   4.078 GiB
      values            11 T  21.99 TFLOP  165.6 GiB   2.141 GiB
      all            22.08 T   44.5 TFLOP  971.2 GiB   4.078 GiB
      fused    11.25 GiB  moved: the matrix is never built
      matrix   160 GiB    in all layers
      cache    1.25 GiB   keys and values

    A multiply and an add are two operations; a softmax is five for each score: maximum, difference, exponential, sum
    and quotient. Texts count multiply-adds, and one a score for the softmax: a head of 512 tokens and 64 features has
    17 million for the scores, 34 with the values, and eight heads have 270.

    >>> one = cost(Configuration("a text's", layers=1, heads=8, key_heads=8, features=64, tokens=512))
    >>> [step.multiply_adds // 8 for step in one.steps], one.multiply_adds
    ([16777216, 0, 262144, 16777216], 270532608)

    Bytes moved are those of the formula as it is written, each step reading and writing whole arrays. Bytes held are
    those of one layer at a time: q, k and v, and what the step reads and writes.
    """
    if isinstance(configuration, str):
        if configuration not in PUBLISHED:
            raise ArgumentError("configuration", f"is {configuration!r}, expected one of {', '.join(PUBLISHED)}")
        configuration = PUBLISHED[configuration]
    one = configuration
    for name in ("layers", "heads", "key_heads", "features", "tokens", "batch", "item"):
        value = getattr(one, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= MOST:
            raise ArgumentError(name, f"is {shown(value)}, expected a whole number from 1 to {MOST:,}")
    if one.heads % one.key_heads:
        raise ArgumentError("heads", f"is {one.heads}, expected a multiple of key_heads, {one.key_heads}")
    copies = one.layers * one.batch
    pairs = copies * one.heads * one.tokens * one.tokens
    queries = copies * one.heads * one.tokens * one.features  # numbers in q, and in the output
    keys = copies * one.key_heads * one.tokens * one.features  # numbers in k, and in v
    products = pairs * one.features
    item, given = one.item, queries + 2 * keys
    steps: tuple[StepCost, ...] = (
        StepCost("scores", 2 * products, item * (queries + keys + pairs), products, item * (given + pairs)),
        StepCost("scale", pairs, item * 2 * pairs, 0, item * (given + 2 * pairs)),
        StepCost("softmax", 5 * pairs, item * 2 * pairs, pairs, item * (given + 2 * pairs)),
        StepCost("values", 2 * products, item * (pairs + keys + queries), products, item * (given + pairs + queries)),
    )
    steps = tuple(replace(step, held=step.held // one.layers) for step in steps)
    return Cost(one, steps, item * pairs, item * 2 * (queries + keys), item * 2 * keys)


COLUMNS = (("multiply_adds", 1000, ""), ("matrix_bytes", 1024, "B"), ("cache_bytes", 1024, "B"))


@dataclass(frozen=True)
class Growth:
    """What a configuration costs as its tokens grow; growth is by the row before.

    >>> print(grown("GPT-3 175B", [1024, 2048]))
    tokens multiply-adds growth matrix growth   cache growth
     1,024       2.484 T        18 GiB        4.5 GiB
     2,048       9.934 T × 4.00 72 GiB × 4.00   9 GiB × 2.00
    """

    costs: tuple[Cost, ...]

    def text(self, width: int = WIDTH) -> str:
        """The table, within a width."""
        titles = ["tokens", "multiply-adds", "growth", "matrix", "growth", "cache", "growth"]
        rows = []
        before: Cost | None = None
        for one in self.costs:
            row = [f"{one.configuration.tokens:,}"]
            for field, base, unit in COLUMNS:
                now = getattr(one, field)
                row += [
                    quantity(now, base, unit).rstrip(), "" if before is None else growth(now, getattr(before, field))
                ]  # fmt: skip
            rows.append(row)
            before = one
        return "\n".join(laid_out(titles, rows, width))

    def __str__(self) -> str:
        return self.text()


def grown(configuration: Configuration | str, tokens: Sequence[int]) -> Growth:
    """The same configuration with other numbers of tokens.

    >>> from clearhead.measure.costs import grown
    >>> print(grown("GPT-3 175B", [2048, 4096, 16384]))
    tokens multiply-adds  growth  matrix  growth  cache growth
     2,048       9.934 T          72 GiB          9 GiB
     4,096       39.74 T  × 4.00 288 GiB  × 4.00 18 GiB × 2.00
    16,384       635.8 T × 16.00 4.5 TiB × 16.00 72 GiB × 4.00
    """
    base = cost(configuration).configuration
    chosen = list(tokens)
    if not chosen:
        raise ArgumentError("tokens", "is empty, expected at least one number")
    return Growth(tuple(cost(replace(base, tokens=count)) for count in chosen))
