"""A multi-head module's own projections, found by their names or their order, and read into float64."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.core.arrays import is_array, to_numpy
from clearhead.doctor.roles import HEADS, KEY_HEADS

Matrix = tuple[np.ndarray, np.ndarray | None]

_AROUND = (
    r"^(?:w|wei|to|fc|lin|linear|proj|c|in|weight|weights|dense|b|bias)?({})"
    r"(?:s|proj|projection|projector|linear|lin|layer|weight|w|fc|map|net|bias|b)?$"
)
ROLES = {
    "q": re.compile(_AROUND.format("q|query|queries|qproj")),
    "k": re.compile(_AROUND.format("k|key|keys")),
    "v": re.compile(_AROUND.format("v|value|values|val")),
    "kv": re.compile(_AROUND.format("kv|keyvalue|keysvalues")),
    "qkv": re.compile(_AROUND.format("qkv|kqv|qvk|kvq|vkq|vqk|attn|inproj|in|queryskeysvalues|querykeyvalue")),
    "o": re.compile(
        _AROUND.format("o|out|output|proj|projection|final|dense|resid|concat|fc|fcout|unifyheads|combine")
    ),
}


@dataclass(frozen=True, eq=False)
class Projections:
    """Matrices (in, out) and biases by role, q, k, v and o; a role that is missing leaves its input as it is."""

    matrices: dict[str, Matrix]
    heads: int
    embed: int
    key_heads: int
    others: tuple[str, ...] = ()  # parts with numbers of their own that are no projections

    @property
    def features(self) -> int:
        """The features of one head."""
        return self.matrices["q"][0].shape[1] // self.heads

    @property
    def width(self) -> int:
        """The features of the output."""
        if "o" in self.matrices:
            return self.matrices["o"][0].shape[1]
        return self.matrices["v"][0].shape[1] // self.key_heads * self.heads

    def project(self, role: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The input times its matrix, and how far that may be off, for an eps of one."""
        if role not in self.matrices:
            return x, np.zeros_like(x)
        matrix, bias = self.matrices[role]
        found, size = x @ matrix, np.abs(x) @ np.abs(matrix)
        if bias is not None:
            found, size = found + bias, size + np.abs(bias)
        return found, (matrix.shape[0] + 2) * size

    def magnify(self, errors: np.ndarray) -> np.ndarray:
        """What errors become on their way through the last projection."""
        return errors @ np.abs(self.matrices["o"][0]) if "o" in self.matrices else errors


def projections_of(subject: Any) -> list[Projections]:
    """The projections of a module or object, empty where it has not those of q, k and v.

    A matrix for all three at once may have its columns in the order of (3, heads, features) or of (heads, 3, features),
    and a plain matrix may be (in, out) or (out, in): all are given, the usual one first.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(subject, torch.nn.Module):
        held = {n: m for n, m in subject.named_modules() if isinstance(m, torch.nn.MultiheadAttention)}
        if len(held) == 1:
            return [replace(one, others=_beside(subject, *held)) for one in _of_torch(*held.values())]
    heads_apart = _one_by_one(subject)
    if heads_apart:
        return heads_apart
    layers = list(_layers(subject))
    found, unnamed = _by_name(layers)
    if not found:
        found, unnamed = _by_order(layers), []
    if not found:
        return []
    if "o" not in found and len(unnamed) == 1:
        found["o"] = unnamed.pop()[1:]
    counts = _counts(subject, found)
    if counts is None:
        return []
    heads, key_heads = counts
    choices = list(_laid_out(found, heads, key_heads))
    if any(plain for _, _, _, plain in layers):
        choices += [_other_way_round(choice) for choice in choices]
    others = tuple(name for name, *_ in unnamed) + tuple(_parts(subject))
    return [
        Projections(one, heads, one["q"][0].shape[0], key_heads, others)
        for one in choices
        if _whole(one, heads, key_heads)
    ]


def given_projections(embed: int, width: int, output: bool, draw: Any) -> Projections:
    """Projections for a function that takes them as arguments: (embed, width) each, one head."""
    names = "qkvo" if output else "qkv"
    found: dict[str, Matrix] = {}
    for name in names:
        shape = (width, embed) if name == "o" else (embed, width)
        found[name] = (draw(shape).astype(np.float16).astype(np.float64), None)
    return Projections(found, 1, embed, 1)


def _by_name(layers: list[tuple[str, np.ndarray, np.ndarray | None, bool]]) -> tuple[dict[str, Any], list[Any]]:
    found: dict[str, Any] = {}
    unnamed = []
    for name, matrix, bias, plain in layers:
        role = _role(name)
        if role is None or role in found:
            unnamed.append((name, matrix, bias))
        elif role == "qkv":
            found[role] = (_upright(matrix, plain), bias)
            found["order"] = next(
                (o for o in map("".join, itertools.permutations("qkv")) if o in _letters(name)), "qkv"
            )
        else:
            found[role] = (matrix, bias)
    known = {"q", "k", "v"} <= found.keys() or "qkv" in found or {"q", "kv"} <= found.keys()
    return (found, unnamed) if known else ({}, [])


def _by_order(layers: list[tuple[str, np.ndarray, np.ndarray | None, bool]]) -> dict[str, Any]:
    """Layers whose names say nothing, in the order in which they were made: q, k, v and o, or all three and o."""
    pairs = [(matrix, bias) for _, matrix, bias, _ in layers]
    if pairs and pairs[0][0].shape[1] == 3 * pairs[0][0].shape[0] and len(pairs) <= 2:
        return dict(zip(("qkv", "o"), pairs, strict=False))
    return dict(zip("qkvo", pairs, strict=False)) if len(pairs) in (3, 4) else {}


def _upright(matrix: np.ndarray, plain: bool) -> np.ndarray:
    """A matrix for several roles as (in, out): it is longer on the side that goes out."""
    return matrix.T if plain and matrix.shape[0] > matrix.shape[1] else matrix


def _counts(subject: Any, found: dict[str, Any]) -> tuple[int, int] | None:
    """Heads of the queries and of the keys, from attributes or from the shapes that attributes leave."""
    heads, key_heads = _number(subject, HEADS), _number(subject, KEY_HEADS)
    size = _number(subject, ("head_dim", "d_head", "dim_head", "d_k", "head_size", "depth"))
    if heads is None and size and "q" in found and found["q"][0].shape[1] % size == 0:
        heads = found["q"][0].shape[1] // size
    heads = heads or 1
    if key_heads is None and "k" in found and "q" in found:
        each = max(found["q"][0].shape[1] // heads, 1)
        key_heads = max(found["k"][0].shape[1] // each, 1)
    key_heads = key_heads or heads
    return (heads, key_heads) if heads >= 1 and heads % key_heads == 0 else None


def _number(subject: Any, names: tuple[str, ...]) -> int | None:
    for place in (
        subject,
        getattr(subject, "config", None),
        getattr(subject, "cfg", None),
        getattr(subject, "args", None),
    ):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _laid_out(found: dict[str, Any], heads: int, key_heads: int) -> Iterator[dict[str, Matrix]]:
    """Each role with a matrix of its own: of a fused one, its columns in either order."""
    single = {role: found[role] for role in "qkvo" if role in found}
    if "qkv" in found:
        matrix, bias = found["qkv"]
        each = matrix.shape[1] // (heads + 2 * key_heads)
        if each * (heads + 2 * key_heads) != matrix.shape[1]:
            return
        counts = {"q": heads * each, "k": key_heads * each, "v": key_heads * each}
        order = found.get("order", "qkv")
        ends = np.cumsum([counts[role] for role in order])
        columns = dict(zip(order, np.split(np.arange(matrix.shape[1]), ends[:-1]), strict=True))
        yield single | {role: _cut(matrix, bias, part) for role, part in columns.items()}
        if heads == key_heads:
            together = np.arange(matrix.shape[1]).reshape(heads, 3, -1).swapaxes(0, 1).reshape(3, -1)
            yield single | {role: _cut(matrix, bias, part) for role, part in zip(order, together, strict=True)}
    elif "kv" in found:
        matrix, bias = found["kv"]
        halves = np.split(np.arange(matrix.shape[1] // 2 * 2), 2)
        yield single | {role: _cut(matrix, bias, part) for role, part in zip("kv", halves, strict=True)}
    else:
        yield single


def _cut(matrix: np.ndarray, bias: np.ndarray | None, part: np.ndarray) -> Matrix:
    return matrix[:, part], None if bias is None else bias[part]


def _other_way_round(found: dict[str, Matrix]) -> dict[str, Matrix]:
    return {role: (matrix.T, bias) for role, (matrix, bias) in found.items()}


def _whole(found: dict[str, Matrix], heads: int, key_heads: int) -> bool:
    if not {"q", "k", "v"} <= found.keys():
        return False
    q, k, v = (found[role][0].shape for role in "qkv")
    return not q[1] % heads and k[1] * heads == q[1] * key_heads and not v[1] % key_heads


def _one_by_one(subject: Any) -> list[Projections]:
    """A list of heads, each with projections of its own: theirs side by side."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(subject, torch.nn.Module):
        return []
    for child in subject.children():
        if isinstance(child, torch.nn.ModuleList) and len(child) and not isinstance(child[0], torch.nn.Linear):
            parts = [_by_name(list(_layers(head)))[0] for head in child]
            if all({"q", "k", "v"} <= part.keys() for part in parts):
                joined: dict[str, Matrix] = {}
                for role in "qkv":
                    bias = parts[0][role][1]
                    joined[role] = (
                        np.concatenate([part[role][0] for part in parts], axis=1),
                        None if bias is None else np.concatenate([part[role][1] for part in parts]),
                    )
                own = [layer for layer in subject.children() if isinstance(layer, torch.nn.Linear)]
                if len(own) == 1:
                    joined["o"] = (_numbers(own[0].weight).T, None if own[0].bias is None else _numbers(own[0].bias))
                return [Projections(joined, len(parts), joined["q"][0].shape[0], len(parts))]
    return []


def _of_torch(module: Any) -> list[Projections]:
    if module.bias_k is not None or module.add_zero_attn or module.in_proj_weight is None:
        return []
    parts = np.split(_numbers(module.in_proj_weight).T, 3, axis=1)
    bias = module.in_proj_bias
    biases = [None] * 3 if bias is None else np.split(_numbers(bias), 3)
    out = module.out_proj
    found = dict(zip("qkv", zip(parts, biases, strict=True), strict=True))
    found["o"] = (_numbers(out.weight).T, None if out.bias is None else _numbers(out.bias))
    return [Projections(found, module.num_heads, module.embed_dim, module.num_heads)]


def _beside(subject: Any, held: str) -> tuple[str, ...]:
    """The parts of a module that have numbers and do not belong to the one it holds."""
    names = (name for name, _ in subject.named_parameters() if held and not name.startswith(f"{held}."))
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def _layers(subject: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray | None, bool]]:
    """Layers as (name, matrix (in, out), bias, False); with True where it is not known which side is which."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(subject, torch.nn.Module):
        for name, layer in subject.named_modules():
            weight = getattr(layer, "weight", None)
            if name and isinstance(weight, torch.Tensor) and weight.ndim == 2:
                upright = weight.T if isinstance(layer, torch.nn.Linear) else weight  # GPT-2's Conv1D is (in, out)
                bias = getattr(layer, "bias", None)
                yield name, _numbers(upright), None if bias is None else _numbers(bias), upright is weight
        yield from _plain(dict(subject.named_parameters(recurse=False)))
        return
    attributes = getattr(subject, "__dict__", {})
    for name, value in attributes.items():
        weight = next(
            (getattr(value, one) for one in ("weight", "W", "w") if is_array(getattr(value, one, None))), None
        )
        if weight is not None and weight.ndim == 2 and not is_array(value):
            bias = next((getattr(value, one) for one in ("bias", "b") if is_array(getattr(value, one, None))), None)
            yield name, _numbers(weight), None if bias is None else _numbers(bias).reshape(-1), True
    yield from _plain(attributes)


def _plain(attributes: dict[str, Any]) -> Iterator[tuple[str, np.ndarray, np.ndarray | None, bool]]:
    arrays = {name: value for name, value in attributes.items() if is_array(value)}
    biases = {_role(name): value for name, value in arrays.items() if value.ndim == 1 and _role(name)}
    for name, value in arrays.items():
        if value.ndim == 2 and _role(name):
            bias = biases.get(_role(name))
            yield name, _numbers(value), None if bias is None else _numbers(bias), True


def _parts(subject: Any) -> Iterator[str]:
    """Layers that have numbers and are no matrices: norms, tables."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(subject, torch.nn.Module):
        for name, layer in subject.named_modules():
            weight = getattr(layer, "weight", None)
            if name and isinstance(weight, torch.Tensor) and weight.ndim == 1:
                yield name


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def _role(name: str) -> str | None:
    """The role that a name says; of a nested one its last part that says any."""
    for part in reversed(name.split(".")):
        plain = _letters(part)
        role = next((role for role, pattern in ROLES.items() if pattern.match(plain)), None)
        if role is not None:
            return role
    return None


def _numbers(array: Any) -> np.ndarray:
    return to_numpy(array).astype(np.float64)
