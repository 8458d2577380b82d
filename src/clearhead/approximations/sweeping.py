"""sweep(): the error of methods as one thing grows: their features, the length, or the temperature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from clearhead.approximations.auditing import audit
from clearhead.approximations.method import Method, whole
from clearhead.approximations.reformer import LSH
from clearhead.core.arrays import AnyArray
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.mask import Mask
from clearhead.measure.tables import WIDTH, laid_out, number

By = Literal["features", "length", "temperature"]


@dataclass(frozen=True)
class Swept:
    """One method at one place: its name, the number that was set, the mean error over seeds and their deviation."""

    name: str
    at: float
    error: float
    deviation: float


@dataclass(frozen=True)
class Sweep:
    """What `sweep` found. `print` it, ask for `json()`, or draw it with `plot_sweep`."""

    by: str
    points: tuple[Swept, ...]

    @property
    def names(self) -> list[str]:
        """The methods, in order."""
        return list(dict.fromkeys(point.name for point in self.points))

    def of(self, name: str) -> list[Swept]:
        """The points of one method."""
        return [point for point in self.points if point.name == name]

    def text(self, width: int = WIDTH) -> str:
        """The errors as a table, a column for each method."""
        places = sorted({point.at for point in self.points})
        found = {(point.name, point.at): point.error for point in self.points}
        rows = [
            [f"{at:,g}", *(number(found[name, at], 4) if (name, at) in found else "–" for name in self.names)]
            for at in places
        ]
        return "\n".join(laid_out([self.by, *self.names], rows, width))

    def __str__(self) -> str:
        return self.text()

    def json(self) -> str:
        """Every number."""
        return json.dumps({"by": self.by, "points": [asdict(point) for point in self.points]})


def sweep(
    methods: Method | Sequence[Method],
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    by: By = "features",
    at: Sequence[float] | None = None,
    mask: Mask | AnyArray | None = None,
    seeds: int = 4,
    queries: int = 64,
) -> Sweep:
    """The error of methods against their features (slots, landmarks, rounds, blocks), the length, or the temperature.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 256, 16))
    >>> print(ch.sweep([ch.performer(), ch.nystrom()], q / 2, k / 2, v, at=[16, 64, 256]))
    features  performer  nystrom
          16     0.3765   0.2337
          64     0.4554   0.1759
         256     0.1601   0.0396

    `at` are the numbers to set. By length, the first so many positions are taken. Of methods with a seed the error is
    the mean over `seeds` of them, and `deviation` says how much they differ.
    """
    chosen = [methods] if isinstance(methods, Method) else list(methods)
    for method in chosen:
        if not isinstance(method, Method):
            raise ArgumentError("methods", f"has {shown(method)[:60]}, expected methods, such as performer(256)")
    if by not in ("features", "length", "temperature"):
        raise ArgumentError("by", f"is {shown(by)}, expected 'features', 'length' or 'temperature'")
    whole("seeds", seeds)
    length = min(q.shape[-2], k.shape[-2])
    usual = {"features": (16, 64, 256), "length": [n for n in (64, 256, 1024, 4096) if n < length] + [length]}
    places = list(usual.get(by, (0.5, 1.0, 2.0)) if at is None else at)
    points = []
    for method in chosen:
        for place in places:
            if by != "temperature" and (place != int(place) or place < 1):
                raise ArgumentError("at", f"has {shown(place)}, expected whole numbers of at least 1")
            changed, arrays, options = _at(method, (q, k, v), by, place)
            errors = [
                audit(one, *arrays, mask=mask, queries=queries, **options).error for one in seeded(changed, seeds)
            ]
            # by features the number in its name is the one that changes
            name = repr(method).partition("(")[0] if by == "features" else repr(method)
            points.append(Swept(name, float(place), float(np.mean(errors)), float(np.std(errors))))
    return Sweep(by, tuple(points))


def _at(
    method: Method, arrays: tuple[Any, ...], by: str, place: float
) -> tuple[Method, tuple[Any, ...], dict[str, Any]]:
    if by == "features":
        return resized(method, int(place)), arrays, {}
    if by == "length":
        return method, tuple(array[..., : int(place), :] for array in arrays), {}
    return method, arrays, {"temperature": place}


def resized(method: Method, count: int) -> Method:
    """The same method with so many features, slots, landmarks, rounds, blocks or clusters; linear stays as it is."""
    own = [one.name for one in fields(method)]  # type: ignore[arg-type]  # every method is a dataclass
    first = "rounds" if isinstance(method, LSH) else own[0]
    return method if first == "feature" else replace(method, **{first: count})  # type: ignore[type-var]  # a dataclass


def seeded(method: Method, seeds: int) -> list[Method]:
    """The same method with other seeds, where it has one."""
    if not hasattr(method, "seed"):
        return [method]
    return [replace(method, seed=method.seed + i) for i in range(seeds)]  # type: ignore[type-var]  # a dataclass
