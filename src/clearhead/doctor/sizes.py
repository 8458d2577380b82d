"""Which sizes a function is tried with: distinct primes where they may be, and those it was built for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

# What a size that would be mistaken for another one is replaced by
PRIMES = (5, 7, 11, 17, 19, 23)


@dataclass(frozen=True)
class Sizes:
    """Batch rows, heads, queries, keys, features of a key and of a value, and query heads for each key head."""

    batch: int = 2
    heads: int = 3
    queries: int = 5
    keys: int = 7
    features: int = 13
    width: int = 11
    groups: int = 1

    @property
    def elements(self) -> int:
        """How many numbers q, k and v have together, to tell small from large."""
        of_query = self.queries * self.features + self.keys * (self.features + self.width)
        return self.batch * self.heads * of_query

    @property
    def seed(self) -> tuple[int, ...]:
        """What random numbers for these sizes are drawn from."""
        plain = (self.batch, self.heads, self.queries, self.keys, self.features, self.width)
        return plain if self.groups == 1 else (*plain, self.groups)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.groups == 1 else f"{self.heads} over {self.heads // self.groups}"
        return (
            f"batch {self.batch}, heads {heads}, {self.queries} queries, {self.keys} keys,"
            f" {self.features} features, values of {self.width}"
        )


DISTINCT = Sizes()
# What else a right function must get right; each is cut down to what the function was found to take
MORE = (
    Sizes(1, 1, 3, 5, 2, 7),
    Sizes(3, 2, 7, 3, 5, 2),
    Sizes(2, 5, 1, 11, 3, 13),
    Sizes(1, 2, 17, 19, 64, 32),
)
# Whoever takes keys in blocks of 16 to 256 has whole blocks here, several of them, and a tail
LONG = (
    Sizes(1, 1, 3, 256, 8, 5),
    Sizes(1, 1, 70, 150, 8, 5),
    Sizes(1, 1, 3, 600, 8, 5),
)


@dataclass(frozen=True)
class Bounds:
    """What sizes a function takes; None and False where it takes any. `source` says how that is known."""

    features: int | None = None
    width: int | None = None
    heads: int | None = None
    groups: int | None = None
    queries: int | None = None
    keys: int | None = None
    square: bool = False  # as many keys as queries
    even: bool = False  # values as wide as keys
    source: str = ""

    def fit(self, sizes: Sizes) -> Sizes:
        """The sizes that come nearest, with no two alike that a mistake could take for one another."""
        features = self.features or sizes.features
        width = self.width or (features if self.even else sizes.width)
        groups = self.groups or sizes.groups
        heads = self.heads or sizes.heads
        if heads % groups:
            heads, groups = (heads, 1) if self.heads else (groups * 2, groups)
        if features != sizes.features and not self.heads and heads == features and groups == 1 and heads > 1:
            heads = 5
        batch = 3 if features == sizes.batch == 2 and features != sizes.features else sizes.batch
        queries = self.queries or _apart(sizes.queries, {features, width}, sizes.features)
        keys = queries if self.square else _apart(sizes.keys, {features, width, queries}, sizes.features)
        return Sizes(batch, heads, queries, self.keys or keys, features, width, groups)

    def ladder(self) -> tuple[Bounds, ...]:
        """Less and less is asked: not every function takes values of another width, or other keys than queries."""
        return tuple(
            dict.fromkeys(
                (
                    self,
                    replace(self, even=self.width is None),
                    replace(self, square=True),
                    replace(self, even=self.width is None, square=True),
                )
            )
        )

    @property
    def words(self) -> str:
        """The fixed sizes, in words; empty where there are none."""
        named = (
            ("features", self.features),
            ("values of", self.width),
            ("heads", self.heads),
            ("query heads for each key head", self.groups),
        )
        said = ", ".join(f"{name} {number}" for name, number in named if number is not None)
        return f"{said} ({self.source})" if said and self.source else said


def _apart(number: int, taken: set[int], usual: int) -> int:
    """The number, or a prime that is not taken; only where the features are not those that it was chosen for."""
    if number not in taken or usual in taken:
        return number
    return next(prime for prime in PRIMES if prime not in taken)


def small_sizes() -> Iterator[Sizes]:
    """Sizes in the order in which a failing example is looked for: the fewest numbers first."""
    choices = [
        Sizes(batch, heads, queries, keys, features, width)
        for batch in (1, 2)
        for heads in (1, 2)
        for queries in (1, 2, 3)
        for keys in (1, 2, 3)
        for features in (1, 2, 3)
        for width in (1, 2, 3)
    ]
    yield from sorted(choices, key=lambda sizes: (sizes.elements, tuple(vars(sizes).values())))
