"""What attention costs on paper: FLOPs and bytes of each step, and the key–value cache, for any configuration."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.core.errors import ArgumentError
from clearhead.measure.plans import quantity


@dataclass(frozen=True)
class Configuration:
    """A model's attention: layers, query heads, key heads, features of a head, and how many tokens at once."""

    name: str
    layers: int
    heads: int
    key_heads: int
    features: int
    tokens: int
    batch: int = 1
    item: int = 2  # bytes a number: half precision
    source: str = ""


PUBLISHED: dict[str, Configuration] = {
    one.name: one
    for one in (
        Configuration("GPT-3 175B", 96, 96, 96, 128, 2048, source="Brown et al. 2020, table 2.1"),
        Configuration("LLaMA-2 70B", 80, 64, 8, 128, 4096, source="Touvron et al. 2023, table 1 and appendix A.2.1"),
        Configuration(
            "ViT-L/16", 24, 16, 16, 64, 197, source="Dosovitskiy et al. 2021, table 1; 224 px in patches of 16"
        ),
        Configuration(
            "AlphaFold 2",
            48,
            8,
            8,
            32,
            256,
            batch=128,
            source="Jumper et al. 2021, supplement, algorithm 7: row attention over 256 residues of 128 sequences",
        ),
    )
}


@dataclass(frozen=True)
class StepCost:
    """One step of the formula as it is written: floating-point operations, and bytes read and written."""

    name: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """What one call costs, all layers together; `fused_bytes` is what must move where the matrix is never built."""

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

    def __str__(self) -> str:
        one = self.configuration
        shared = f" over {one.key_heads}" if one.key_heads != one.heads else ""
        batch = f", batch {one.batch}" if one.batch != 1 else ""
        sizes = f"{one.layers} layers, {one.heads} heads{shared}, {one.features} features"
        rows = [one.name, f"  {sizes}, {one.tokens:,} tokens{batch}"]
        counts: list[tuple[str, int | None, int, str]] = [
            (step.name, step.flops, step.bytes, "") for step in self.steps
        ]
        counts += [
            ("all", self.flops, self.bytes, ""),
            ("fused", None, self.fused_bytes, "the matrix is never built"),
            ("matrix", None, self.matrix_bytes, ""),
            ("cache", None, self.cache_bytes, "keys and values"),
        ]
        for name, flops, moved, words in counts:
            operations = "" if flops is None else quantity(flops, 1000, "FLOP")
            rows.append(f"  {name:<8} {operations:>12}  {quantity(moved, 1024, 'B'):>10}  {words}".rstrip())
        return "\n".join(rows)


def cost(configuration: Configuration | str) -> Cost:
    """FLOPs and bytes of each step, for a configuration or the name of a published one.

    >>> from clearhead.measure.costs import cost
    >>> print(cost("LLaMA-2 70B"))
    LLaMA-2 70B
      80 layers, 64 heads over 8, 128 features, 4,096 tokens
      scores    21.99 TFLOP   165.6 GiB
      scale      85.9 GFLOP     320 GiB
      softmax   429.5 GFLOP     320 GiB
      values    21.99 TFLOP   165.6 GiB
      all        44.5 TFLOP   971.2 GiB
      fused                   11.25 GiB  the matrix is never built
      matrix                    160 GiB
      cache                    1.25 GiB  keys and values

    A multiply and an add are two operations; a softmax is five for each score: maximum, difference, exponential, sum
    and quotient. Bytes are those of the formula as it is written, each step reading and writing whole arrays.
    """
    if isinstance(configuration, str):
        if configuration not in PUBLISHED:
            raise ArgumentError("configuration", f"is {configuration!r}, expected one of {', '.join(PUBLISHED)}")
        configuration = PUBLISHED[configuration]
    one = configuration
    copies = one.layers * one.batch
    pairs = copies * one.heads * one.tokens * one.tokens
    queries = copies * one.heads * one.tokens * one.features  # numbers in q, and in the output
    keys = copies * one.key_heads * one.tokens * one.features  # numbers in k, and in v
    matmul = 2 * pairs * one.features
    steps = (
        StepCost("scores", matmul, one.item * (queries + keys + pairs)),
        StepCost("scale", pairs, one.item * 2 * pairs),
        StepCost("softmax", 5 * pairs, one.item * 2 * pairs),
        StepCost("values", matmul, one.item * (pairs + keys + queries)),
    )
    return Cost(one, steps, one.item * pairs, one.item * 2 * (queries + keys), one.item * 2 * keys)
