"""Models of which all attention was seen before: their steps need not be followed again, nor every module looked at.

Following what a model computes, tensor by tensor, finds attention in steps; hooks on every module say who computes.
Both cost as much as a small model itself. Where a whole run made its calls and nothing was missed, the next runs of the
same model look at the modules that made them, and at those around them, alone; and where a module asked transformers'
registry for its attention, at what is handed to it and at nothing else that it computes. One of them that then makes no
call is missed by name, as ever, and the model is a stranger again. What was seen of a run of a part is known of that
part: a run of more than it is a stranger's.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

# by the module that was run: those that made its calls, and whether all of them by what the registry handed them
Known = dict[str, dict[str, bool]]
_known: WeakKeyDictionary[nn.Module, tuple[Any, Known]] = WeakKeyDictionary()


def kind_of(model: nn.Module) -> Any:
    """What decides which code a model runs, as far as can be told from outside."""
    modules = list(model.modules())
    # most have no config, and PyTorch takes its time to say so
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    ways = tuple(getattr(config, "_attn_implementation", None) for config in configs.values())
    own = tuple(vars(module).get("forward") for module in modules)  # a forward that somebody has put in its place
    return tuple(map(type, modules)), ways, tuple(module.training for module in modules), own


def known(model: nn.Module) -> Known:
    """What is known of a model: nothing of a stranger."""
    found = _known.get(model)
    return dict(found[1]) if found is not None and found[0] == kind_of(model) else {}


def callers(model: nn.Module) -> frozenset[str] | None:
    """The modules that made the calls of a model that is known; None for a stranger."""
    found = known(model)
    return all_of(found) if found else None


def all_of(known: Known) -> frozenset[str]:
    """All modules that make calls."""
    return frozenset(name for callers in known.values() for name in callers)


def remember(model: nn.Module, run: str, callers: dict[str, bool]) -> Known:
    """All attention of a part of a model was seen as it ran, and these modules computed it."""
    found = known(model) | {run: dict(callers)}
    _known[model] = (kind_of(model), found)
    return found


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
