"""From a whole number to a problem, and from a problem to smaller ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from drawn import BORDERS, FAR, FEATURES, SMALL, Drawn
from meaning import Tree

ISAS = ("", "", "portable", "neon", "neon_fp16", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx")
MOST_ROWS = 72  # queries in all batch rows and heads: the reference takes about a millisecond for each


class Chance:
    """A generator of random numbers that says what it picks."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 11])

    def of(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def whole(self, low: int, high: int) -> int:
        """From low up to, not with, high."""
        return int(self.rng.integers(low, max(high, low + 1)))

    def rows(self, low: int, high: int) -> Any:
        """One number, or one for each batch row in turn."""
        return self.whole(low, high) if self.of(0.5) else tuple(self.whole(low, high) for _ in range(3))

    def place(self, keys: int) -> tuple[str, Any]:
        """align and offset."""
        return self.pick(("end", "end", "start")), None if self.of(0.6) else self.rows(-5, keys + 3)

    def axes(self) -> str:
        return self.pick(("bhqk", "hqk", "qk", "k", "bk", "q", "bqk", "h", ""))


def mask(chance: Chance, queries: int, keys: int, depth: int) -> Tree:
    """A random tree of masks."""
    if depth and chance.of(0.75):
        kind = chance.pick(("and", "and", "or", "or", "not"))
        parts = [mask(chance, queries, keys, depth - 1) for _ in range(1 if kind == "not" else 2)]
        return (kind, *parts)
    kind = chance.pick(
        ("causal", "causal", "window", "lengths", "lengths", "prefix", "documents", "global_tokens", "random_blocks",
         "where", "where", "blocks", "dilated", "strided", "first_tokens")
    )  # fmt: skip
    if kind == "causal":
        return (kind, *chance.place(keys))
    if kind == "window":
        return (kind, chance.whole(0, keys + 2), chance.pick((0, 0, 1, 3, keys)), *chance.place(keys))
    if kind in ("lengths", "prefix"):
        return (kind, chance.rows(0, keys + 2))
    if kind == "documents":
        order, axes = chance.pick(("sorted", "mixed")), chance.pick(("", "b", "q", "bq"))
        return (kind, chance.whole(1, 5), order, axes, chance.whole(0, 10**6))
    if kind == "global_tokens":
        return (kind, tuple(chance.whole(0, keys) for _ in range(chance.whole(0, 4))), *chance.place(keys))
    if kind == "random_blocks":
        return (kind, chance.whole(1, 40), chance.whole(0, 4), chance.whole(0, 10**6))
    if kind == "blocks":
        size, axes = chance.pick((1, 2, 3, 8, 16, 32, 40)), chance.pick(("qk", "hqk", "bhqk", "k", "q", ""))
        return (kind, size, axes, chance.pick((0.0, 0.1, 0.5, 1.0)), chance.whole(0, 10**6))
    if kind == "dilated":
        steps = chance.pick((None, 0, 2, 9)), chance.pick((0, 0, 2))
        return (kind, chance.pick((1, 2, 3, 17)), *steps, *chance.place(keys))
    if kind == "strided":
        return (kind, chance.pick((1, 2, 5, 33)), *chance.place(keys))
    if kind == "first_tokens":
        return (kind, chance.whole(0, keys + 2), *chance.place(keys))
    return (kind, chance.axes(), chance.pick((0.0, 0.1, 0.5, 0.9, 1.0)), chance.whole(0, 10**6))


def bias(chance: Chance, keys: int) -> Tree:
    kind = chance.pick(("array", "array", "alibi", "relative"))
    if kind == "array":
        return (kind, chance.axes(), chance.pick(("float32", "float32", "float64")), chance.pick((0.0, 0.0, 0.3, 0.95)))
    if kind == "alibi":
        return (kind, *chance.place(keys))
    both = chance.of(0.5)
    return (kind, chance.pick((8, 32)), both, chance.pick((20, 64, 128)), *chance.place(keys))


def sizes(chance: Chance) -> dict[str, Any]:
    """Shapes: small ones, ones around tiles, and few queries over many keys; not many rows in all."""
    shape = chance.pick(("small", "small", "border", "few", "far", "far few"))
    queries, keys = chance.pick(SMALL), chance.pick(SMALL)
    if shape == "border":
        queries, keys = chance.pick((*SMALL, *BORDERS)), chance.pick(BORDERS)
    elif shape == "few":
        queries, keys = chance.whole(1, 6), chance.pick((*BORDERS, *FAR))
    elif shape == "far":
        queries, keys = chance.pick(SMALL), chance.pick(FAR)
    elif shape == "far few":
        queries, keys = chance.whole(1, 5), chance.pick((*FAR, 1023, 1025, 2047, 2049))
    if chance.of(0.02):
        queries = 0
    if chance.of(0.02):
        keys = 0
    heads, group = chance.pick((1, 1, 2, 3)), chance.pick((1, 1, 1, 2, 3, 4))
    batch: tuple[tuple[int, ...], ...] = ((), (), ())
    if chance.of(0.5):
        whole = chance.pick(((2,), (3,), (2, 2), (1,), (2, 1, 2)))
        part = tuple(n if chance.of(0.5) else 1 for n in whole)
        shared = ((part, whole, whole), (whole, part, part), (whole, (), ()), (part, part, whole))
        batch = chance.pick(((whole,) * 3, (whole,) * 3, *shared))
    few = queries * heads * group * int(np.prod(np.broadcast_shapes(*batch)))
    if few > MOST_ROWS:
        batch, group = ((), (), ()), min(group, 2)
        heads = 1 if queries * heads * group > MOST_ROWS else heads
        group = 1 if queries * group > MOST_ROWS else group
    flat = batch == ((), (), ()) and heads * group == 1 and chance.of(0.3)
    features, width = chance.pick(FEATURES), chance.pick(FEATURES)
    if chance.of(0.3):
        features = width = chance.pick((16, 32, 64))
    return {
        "queries": queries, "keys": keys, "key_heads": heads, "group": group, "batch": batch, "flat": flat,
        "features": features, "width": width,
    }  # fmt: skip


def draw(seed: int) -> Drawn:
    """The problem of a seed."""
    chance = Chance(seed)
    drawn = Drawn(numbers=seed % 10**6, **sizes(chance))
    drawn = replace(drawn, library=chance.pick(("numpy",) * 10 + ("torch",) * 12 + ("strict",) * 2))
    slow = chance.of(0.02)
    if slow:  # few of these, and small: the one compiles each step, the other interprets it
        drawn = replace(drawn, library=chance.pick(("jax", "torch", "torch", "torch")), batch=((), (), ()), key_heads=1)
        drawn = replace(drawn, queries=min(drawn.queries, 19), keys=min(drawn.keys, 33), features=5, flat=False)
    drawn = replace(drawn, **options(chance, drawn))
    drawn = replace(drawn, **verb(chance, drawn))
    drawn = replace(drawn, **kernel(chance, drawn))
    if slow and drawn.library == "torch":
        drawn = replace(drawn, kernel="triton", wants=drawn.wants.replace("b", ""), tile=chance.pick((None, (16, 16))))
    return replace(drawn, **numbers(chance, drawn))


def options(chance: Chance, drawn: Drawn) -> dict[str, Any]:
    """Everything that changes the formula."""
    found: dict[str, Any] = {}
    keys = drawn.keys
    if chance.of(0.75):
        found["mask"] = mask(chance, drawn.queries, keys, chance.pick((0, 0, 1, 2, 3, 4)))
    if chance.of(0.3):
        found["bias"] = bias(chance, keys)
    if chance.of(0.25):
        found["scale"] = chance.pick((0.0, -0.7, 0.37, 2.0))
    if chance.of(0.25):
        found["softcap"] = chance.pick((0.3, 1.5, 20.0))
    if chance.of(0.3):
        found["sinks"] = chance.pick((0.0, 0.0, 3.0, 3.0, 200.0, 200.0, -200.0, 900.0, -np.inf, np.inf))
    if chance.of(0.1):
        found["dropout"] = (chance.pick((0.1, 0.5, 0.9)), chance.pick((0, 7, 2**40 + 3, 2**63 + 5)))
    return found


def verb(chance: Chance, drawn: Drawn) -> dict[str, Any]:
    """What is asked."""
    verbs = ["attention", "observe", "gradients", "gradients", "merge"]
    if drawn.library == "torch":
        verbs += ["autograd", "autograd", "merged autograd"]
    # parts have no dropout, as its places are counted in each, and none but the whole can have an infinite sink
    if drawn.dropout is not None or drawn.sinks == np.inf:
        verbs = [verb for verb in verbs if "merge" not in verb]
    found: dict[str, Any] = {"verb": chance.pick(verbs)}
    if found["verb"] == "observe":
        rows = [i for i in (-1, 0, 2, drawn.queries // 2) if -drawn.queries <= i < drawn.queries]
        wanted = {
            "top": chance.pick((1, 3, 20)),
            "received": chance.pick((True, 1, 4)),
            "map": (chance.whole(1, 9), chance.whole(1, 12)),
            "queries": rows,
            "weights": True,
        }
        found["want"] = tuple((name, value) for name, value in wanted.items() if chance.of(0.5))
    found["through_lse"] = found["verb"] in ("gradients", "autograd") and chance.of(0.3)
    if "merge" in found["verb"]:
        found["cuts"] = tuple(sorted(chance.whole(0, drawn.keys + 1) for _ in range(chance.whole(1, 4))))
    if "autograd" in found["verb"]:
        found["wants"] = chance.pick(("qkv", "qkvs", "qkvs", "qkvsb", "q", "v"))
        if drawn.bias is not None and drawn.bias[0] != "alibi" and found["verb"] == "autograd" and chance.of(0.5):
            found["wants"] = chance.pick(("qkvb", "qkvsb", "b"))
    return found


def kernel(chance: Chance, drawn: Drawn) -> dict[str, Any]:
    """By choice, or by name: one that takes the problem."""
    able = ["dense", "tiled"]
    native = drawn.library in ("numpy", "torch") and drawn.dropout is None
    if native:
        able += ["compiled"] * 3
    if "b" in drawn.wants and "autograd" in drawn.verb and drawn.bias is not None and drawn.bias[0] != "alibi":
        able = ["dense"]
    name = None if chance.of(0.25) else chance.pick(able)
    found: dict[str, Any] = {"kernel": name}
    if name == "compiled":
        found["isa"] = chance.pick(ISAS)
    if name == "tiled" and chance.of(0.7) and drawn.library != "jax":
        found["tile"] = chance.pick(((5, 7), (4, 6), (1, 16), (64, 64)))
    return found


def numbers(chance: Chance, drawn: Drawn) -> dict[str, Any]:
    """Precision, memory, and numbers that hurt."""
    dtypes = ["float32"] * 4 + ["float64"] * (drawn.kernel != "triton")
    if drawn.library != "strict":
        dtypes += ["float16", "bfloat16"] * 2
    found: dict[str, Any] = {"dtype": chance.pick(dtypes)}
    if found["dtype"] == "float64" and drawn.queries * drawn.keys > 4096:
        found["dtype"] = "float32"  # longer than float64 is slow
    if chance.of(0.2):
        found["large"] = chance.pick((0.01, 10.0, 60.0))
    if chance.of(0.5):
        kinds = ["plain", "transposed", "sliced", "wide", "expanded"]
        kinds += ["reversed", "fortran", "read-only"] if drawn.library == "numpy" else []
        kinds += ["negative"] if drawn.library == "torch" else []
        found["layouts"] = tuple(chance.pick(kinds) for _ in range(4))
    plants: list[Tree] = []
    if drawn.mask is not None and chance.of(0.5):
        plants.append(("padding", chance.pick(("nan", "inf", "-inf"))))
    if chance.of(0.15):
        name, kind = chance.pick(("q", "k", "k", "v", "v", "dout")), chance.pick(("nan", "nan", "inf", "-inf"))
        plants.append((name, kind, chance.whole(0, 10**6)))
    if plants:
        found["planted"] = tuple(plants)
        # what is planted in one head is not in the others
        layouts = found.get("layouts", drawn.layouts)
        found["layouts"] = tuple("plain" if kind == "expanded" else kind for kind in layouts)
    return found


def smaller(drawn: Drawn) -> Iterator[Drawn]:
    """Simpler problems to try in its place, the boldest first."""
    plain = Drawn()
    options = ("mask", "bias", "dropout", "softcap", "sinks", "scale")
    for name in (*options, "planted", "layouts", "large", "batch", "flat", "through_lse"):
        if getattr(drawn, name) != getattr(plain, name):
            yield replace(drawn, **{name: getattr(plain, name)})
    for name in ("group", "key_heads", "queries", "keys", "features", "width"):
        size = getattr(drawn, name)
        if drawn.flat and name in ("group", "key_heads"):
            continue
        for less in sorted({1, 2, size // 2, size - 1}):
            if 0 < less < size:
                yield replace(drawn, **{name: less})
    if drawn.mask is not None:
        for part in subtrees(drawn.mask):
            yield replace(drawn, mask=part)
    for i in range(len(drawn.planted)):
        yield replace(drawn, planted=drawn.planted[:i] + drawn.planted[i + 1 :])
    for i, kind in enumerate(drawn.layouts):
        if kind != "plain":
            yield replace(drawn, layouts=(*drawn.layouts[:i], "plain", *drawn.layouts[i + 1 :]))
    for i in range(len(drawn.want)):
        yield replace(drawn, want=drawn.want[:i] + drawn.want[i + 1 :])
    for i in range(len(drawn.cuts)):
        yield replace(drawn, cuts=drawn.cuts[:i] + drawn.cuts[i + 1 :])
    if drawn.whole_batch and any(n > 2 for n in drawn.whole_batch):
        yield replace(drawn, batch=tuple(tuple(min(n, 2) for n in part) for part in drawn.batch))
    if len(drawn.whole_batch) > 1:
        yield replace(drawn, batch=tuple(part[-1:] for part in drawn.batch))
    for name in ("dtype", "library", "isa", "wants"):
        if getattr(drawn, name) != getattr(plain, name) and not ("autograd" in drawn.verb and name == "library"):
            yield replace(drawn, **{name: getattr(plain, name)})


def subtrees(tree: Tree) -> Iterator[Tree]:
    """Masks with one part less."""
    kind, *parts = tree
    if kind in ("and", "or", "not"):
        yield from parts
        for i, part in enumerate(parts):
            for less in subtrees(part):
                yield (kind, *parts[:i], less, *parts[i + 1 :])
