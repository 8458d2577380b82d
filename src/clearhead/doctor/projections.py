"""A multi-head module's own projections, found by their names and read into float64."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.arrays import is_array, to_numpy

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "h", "nheads")

_AROUND = r"^(?:w|wei|to|fc|lin|linear|proj|c|in|weight|dense)?({})(?:s|proj|projection|linear|lin|layer|weight|w|fc)?$"
ROLES = {
    "q": re.compile(_AROUND.format("q|query|queries")),
    "k": re.compile(_AROUND.format("k|key|keys")),
    "v": re.compile(_AROUND.format("v|value|values")),
    "o": re.compile(_AROUND.format("o|out|output|proj|projection|final|dense|resid|concat")),
    "qkv": re.compile(_AROUND.format("qkv|attn|inproj|in")),
}


@dataclass(frozen=True, eq=False)
class Projections:
    """Matrices (in, out) and biases by role, q, k, v and o; a role that is missing leaves its input as it is."""

    matrices: dict[str, tuple[np.ndarray, np.ndarray | None]]
    heads: int
    embed: int

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

    A matrix for all three at once may have its columns in the order of (3, heads, features) or of (heads, 3, features):
    both are given, the usual one first.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(subject, torch.nn.MultiheadAttention):
        return _of_torch(subject)
    found: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    for name, matrix, bias in _matrices(subject):
        role = _role(name)
        if role is not None and role not in found:
            found[role] = (matrix, bias)
    heads = next((int(getattr(subject, name)) for name in HEADS if isinstance(getattr(subject, name, None), int)), 1)
    choices = [found]
    if "qkv" in found:
        matrix, bias = found.pop("qkv")
        if matrix.shape[1] % (3 * max(heads, 1)):
            return []
        columns = np.arange(matrix.shape[1])
        apart = columns.reshape(3, -1)
        together = columns.reshape(max(heads, 1), 3, -1).swapaxes(0, 1).reshape(3, -1)
        choices = [
            found
            | {
                role: (matrix[:, part], None if bias is None else bias[part])
                for role, part in zip("qkv", order, strict=True)
            }
            for order in (apart, together)
        ]
    return [Projections(one, heads, one["q"][0].shape[0]) for one in choices if _whole(one, heads)]


def _whole(found: dict[str, tuple[np.ndarray, np.ndarray | None]], heads: int) -> bool:
    if not {"q", "k", "v"} <= found.keys() or heads < 1:
        return False
    shape = found["q"][0].shape
    return found["k"][0].shape == shape and shape[1] % heads == 0 and found["v"][0].shape[1] % heads == 0


def _of_torch(module: Any) -> list[Projections]:
    if module.bias_k is not None or module.add_zero_attn or module.in_proj_weight is None:
        return []
    parts = np.split(_numbers(module.in_proj_weight).T, 3, axis=1)
    bias = module.in_proj_bias
    biases = [None] * 3 if bias is None else np.split(_numbers(bias), 3)
    out = module.out_proj
    found = dict(zip("qkv", zip(parts, biases, strict=True), strict=True))
    found["o"] = (_numbers(out.weight).T, None if out.bias is None else _numbers(out.bias))
    return [Projections(found, module.num_heads, module.embed_dim)]


def _matrices(subject: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """Linear layers, (out, in) turned round, and plain matrices that are attributes."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(subject, torch.nn.Module):
        for name, child in subject.named_children():
            layers = child.children() if isinstance(child, torch.nn.Sequential) else (child,)
            linear = next((layer for layer in layers if isinstance(layer, torch.nn.Linear)), None)
            if linear is not None:
                yield name, _numbers(linear.weight).T, None if linear.bias is None else _numbers(linear.bias)
        for name, parameter in subject.named_parameters(recurse=False):
            if parameter.ndim == 2:
                yield name, _numbers(parameter), None
        return
    for name, value in getattr(subject, "__dict__", {}).items():
        if is_array(value) and value.ndim == 2:
            yield name, _numbers(value), None


def _role(name: str) -> str | None:
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((role for role, pattern in ROLES.items() if pattern.match(plain)), None)


def _numbers(array: Any) -> np.ndarray:
    return to_numpy(array).astype(np.float64)
