"""Models of which all attention was seen before: their steps need not be followed again, nor every module looked at.

Following what a model computes, tensor by tensor, finds attention in steps; hooks on every module say who computes.
Both cost as much as a small model itself. Where a whole run made its calls and nothing was missed, the next runs of the
same model look at the modules that made them, and at those around them, alone. One of them that then makes no call is
missed by name, as ever, and the model is a stranger again.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_known: WeakKeyDictionary[nn.Module, tuple[Any, frozenset[str]]] = WeakKeyDictionary()


def kind_of(model: nn.Module) -> Any:
    """What decides which code a model runs, as far as can be told from outside."""
    modules = list(model.modules())
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    ways = tuple(getattr(config, "_attn_implementation", None) for config in configs.values())
    own = tuple(vars(module).get("forward") for module in modules)  # a forward that somebody has put in its place
    return tuple(map(type, modules)), ways, tuple(module.training for module in modules), own


def callers(model: nn.Module) -> frozenset[str] | None:
    """The modules that made the calls of a model that is known; None for a stranger."""
    found = _known.get(model)
    return found[1] if found is not None and found[0] == kind_of(model) else None


def remember(model: nn.Module, callers: set[str]) -> None:
    """All attention of a model was seen, and these modules computed it."""
    _known[model] = (kind_of(model), frozenset(callers))


def forget(model: nn.Module) -> None:
    """It does otherwise than before."""
    _known.pop(model, None)


def around(names: frozenset[str]) -> set[str]:
    """Those modules, and all that they are parts of.

    >>> sorted(around(frozenset({"layers.0.attn"})))
    ['', 'layers', 'layers.0', 'layers.0.attn']
    """
    found = {""}
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return found
