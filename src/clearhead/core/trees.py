"""Values that JAX looks into: `Observed`, `Partial`, `Trace`, masks and biases are pytrees.

Their arrays and numbers are leaves; words, whole numbers of masks and sizes belong to the tree, so that a function is
compiled once for all values that differ in arrays alone. JAX is not imported for it: it is told of the classes at the
end of its own import, whoever imports it, or where it is there before us when a call or a mask is first met.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np

from clearhead.core.errors import ArgumentError

Kind = TypeVar("Kind", bound=type)

# types of fields that belong to the tree and not to its leaves
STATIC = frozenset(
    ("int", "str", "bool", "None", "tuple", "Align", "Literal", "class", "Grid", "Library", "Want", "Dropout")
)

_waiting: list[Any] = []  # classes that JAX has not been told of


def tree(kind: Kind) -> Kind:
    """A dataclass that JAX is to look into."""
    _waiting.append(kind)
    return kind


def compiling() -> bool:
    """True for code that PyTorch's compiler is reading.

    It holds a graph to all that it has read, also to what was not there: a table that grows while the graph is made,
    as `sys.modules` does when the compiler imports something, makes it refuse its own work. What may grow is therefore
    asked after this.
    """
    torch = sys.modules.get("torch")
    # another thread may still be importing it
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


class Watch:
    """Tells JAX of the classes when somebody imports it: a mask that was made before is then a pytree as any other."""

    asking = False  # the others are being asked where JAX is, by us

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """None for all but JAX, whose own loader is asked to say when it is done."""
        if name != "jax" or self.asking:
            return None
        from importlib.util import find_spec  # not for those without JAX

        self.asking = True
        try:
            spec: Any = find_spec(name)
        finally:
            self.asking = False
        load = getattr(getattr(spec, "loader", None), "exec_module", None)
        if load is not None:

            def told(module: Any) -> None:
                with suppress(ValueError):  # another thread was quicker
                    sys.meta_path.remove(self)  # once is enough; who only asks whether JAX is there does not load it
                load(module)
                introduce()

            with suppress(AttributeError):  # a loader that does not let itself be told
                spec.loader.exec_module = told  # of this one loader, which loads JAX alone
        return spec


def watch() -> None:
    """Wait for JAX, if it is not here."""
    if "jax" not in sys.modules:
        finder: Any = Watch()
        sys.meta_path.insert(0, finder)


def introduce() -> None:
    """Tell JAX of the classes that it does not know yet, if it is here."""
    if not compiling() and _waiting and "jax" in sys.modules:
        _introduce()


def _introduce() -> None:
    trees = getattr(sys.modules["jax"], "tree_util", None)
    if trees is None:  # which is being imported
        return
    while _waiting:
        kind = _waiting.pop()
        if is_dataclass(kind):  # a mask that is more than its fields stays whole
            with suppress(ValueError):  # its author has told JAX already, and knows better
                _register(trees, kind)


def _register(trees: Any, kind: Any) -> None:
    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, rest = named(kind)
        return [_leaf(getattr(value, name)) for name in leaves], tuple([getattr(value, name) for name in rest])

    def flatten_by_name(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children, rest = flatten(value)
        return [(trees.GetAttrKey(name), child) for name, child in zip(named(kind)[0], children, strict=True)], rest

    def unflatten(rest: tuple[Any, ...], children: Any) -> Any:
        leaves, others = named(kind)
        value = object.__new__(kind)  # without its checks: JAX puts in what is no array as well
        value.__dict__.update(zip(leaves, children, strict=True))
        value.__dict__.update(zip(others, rest, strict=True))
        return value

    trees.register_pytree_with_keys(kind, flatten_by_name, unflatten, flatten)


@cache
def named(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a class that hold arrays or what is made of them, and the others.

    >>> from clearhead.core.masks import Band
    >>> named(Band)
    (('alignment',), ('back', 'ahead'))
    """
    own = [(field.name, set(re.findall(r"[A-Za-z_]+", str(field.type)))) for field in fields(kind)]
    return (
        tuple(name for name, words in own if not words <= STATIC),
        tuple(name for name, words in own if words <= STATIC),
    )


def _leaf(value: Any) -> Any:
    """A field as JAX may take it: whole numbers that it would cut to 32 bits are refused."""
    if isinstance(value, np.ndarray) and value.dtype == np.int64 and value.size:
        least, most = value.min(), value.max()
        if not -(2**31) <= least <= most < 2**31 and sys.modules["jax"].dtypes.canonicalize_dtype(np.int64) != np.int64:
            raise ArgumentError(
                "mask",
                f"has {most if most >= 2**31 else least}, which JAX would cut to 32 bits: make it a static argument",
            )
    return value


watch()
