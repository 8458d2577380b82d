"""Models of which all attention was seen before: their steps need not be followed again, nor every module looked at.

Following what a model computes, tensor by tensor, finds attention in steps; hooks on every module say who computes.
Both cost as much as a small model itself. Where a whole run made its calls and nothing was missed, the next runs of the
same model look at the modules that made them, and at those around them, alone; and where a module asked transformers'
registry for its attention, at what is handed to it and at nothing else that it computes. One of them that then makes no
call is missed by name, as ever, and the model is a stranger again. What was seen of a run of a part is known of that
part: a run of more than it is a stranger's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn


class Way(IntEnum):
    """How a module makes a call."""

    ITSELF = 0
    HANDED = 1  # by a function that transformers' registry handed it
    DIRECT = 2  # by one that makes its call known, and was given the module itself


# by the module that was run: those that made its calls, and how, at least
Known = dict[str, dict[str, Way]]
MOST = 1_000_000  # modules of a model


@dataclass(frozen=True)
class Friend:
    """What is known of a model, and where the modules that matter stand among all of it."""

    kind: Any
    known: Known
    direct: frozenset[str]
    matters: dict[str, int]
    scripts: dict[str, str]  # modules that are TorchScript, and their classes


_friends: WeakKeyDictionary[nn.Module, Friend] = WeakKeyDictionary()


def all_modules(model: nn.Module) -> list[nn.Module]:
    """A model and all its parts, the nearest first, and what has several places several times.

    To walk a list takes a tenth of the time of `modules()`, which is for models that have no end so.
    """
    found = [model]
    for module in found:
        parts = module._modules
        if parts:
            found += [part for part in parts.values() if part is not None]
            if len(found) > MOST:
                return list(model.modules())
    return found


def kind_of(modules: list[nn.Module]) -> Any:
    """What decides which code a model of these modules runs, as far as can be told from outside."""
    owns = [module.__dict__ for module in modules]
    # most have no config, and PyTorch takes its time to say so
    configs = {id(own["config"]): own["config"] for own in owns if "config" in own}
    ways = [getattr(config, "_attn_implementation", None) for config in configs.values()]
    # "forward" is one that somebody has put in its place; `map` takes half the time of a loop over hundreds of modules
    said = [list(map(dict.get, owns, repeat(name))) for name in ("training", "forward")]
    return list(map(type, modules)), ways, said


def recall(model: nn.Module) -> tuple[Friend, dict[str, nn.Module]] | None:
    """What is known of a model, and its modules that matter by name; None of a stranger."""
    friend = _friends.get(model)
    if friend is None:
        return None
    modules = all_modules(model)
    if friend.kind != kind_of(modules):
        return None
    return friend, {name: modules[place] for name, place in friend.matters.items()}


def known(model: nn.Module) -> Known:
    """What is known of a model: nothing of a stranger."""
    found = recall(model)
    return {} if found is None else dict(found[0].known)


def callers(model: nn.Module) -> frozenset[str] | None:
    """The modules that made the calls of a model that is known; None for a stranger."""
    found = known(model)
    return all_of(found) if found else None


def all_of(known: Known) -> frozenset[str]:
    """All modules that make calls."""
    return frozenset(name for callers in known.values() for name in callers)


def direct_of(known: Known) -> frozenset[str]:
    """Those that make all of their calls by functions which make them known."""
    others = {name for callers in known.values() for name, way in callers.items() if way is not Way.DIRECT}
    return all_of(known) - others - {""}


def remember(model: nn.Module, run: str, callers: dict[str, Way]) -> Known:
    """All attention of a part of a model was seen as it ran, and these modules computed it."""
    found = known(model) | {run: dict(callers)}
    modules = all_modules(model)
    places, direct = {id(module): place for place, module in enumerate(modules)}, direct_of(found)
    named = dict(model.named_modules())
    scripts = {name: type(one).__name__ for name, one in named.items() if isinstance(one, torch.jit.ScriptModule)}
    matters = {name: places[id(named[name])] for name in around(all_of(found), direct) if name in named}
    matters = {name: place for name, place in matters.items() if name not in scripts}
    _friends[model] = Friend(kind_of(modules), found, direct, matters, scripts)
    return found


def forget(model: nn.Module) -> None:
    """It does otherwise than before."""
    _friends.pop(model, None)


def around(names: frozenset[str], direct: frozenset[str] = frozenset()) -> set[str]:
    """Those modules, and all that they are parts of; but for layers in lists with nothing but one of `direct` in them.

    >>> sorted(around(frozenset({"layers.0.attn"})))
    ['', 'layers', 'layers.0', 'layers.0.attn']
    >>> sorted(around(frozenset({"layers.0.attn"}), frozenset({"layers.0.attn"})))
    ['', 'layers', 'layers.0.attn']
    """
    inside: dict[str, list[str]] = {"": [""]}
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:count]), []).append(name)
    return {
        name
        for name, there in inside.items()
        if name in names or not (name.rpartition(".")[2].isdigit() and len(there) == 1 and there[0] in direct)
    }
