"""Ranks agree on a call before anything is sent: what has to be the same is compared, field by field.

Each rank tells all others a few whole numbers: which call it makes, a digest of its mask, of its bias, … and how many
queries and keys it holds. Who finds its own arguments wrong says so, too, so that nobody waits for it.
"""

from __future__ import annotations

import hashlib
import types
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from clearhead.core.arrays import dtype_name, is_array, is_torch, to_numpy
from clearhead.distributed.links import DistributedError, Links

FINE, WRONG = 1, 0
# numbers that each rank tells, whatever it calls: gloo ends a process that is told more than it waits for
ROOM = 24


def digest(value: Any) -> int:
    """63 bits that are the same in every process for values that say the same, and for nobody else.

    >>> from clearhead.core.masks import causal, lengths
    >>> digest(causal() & lengths([3, 1])) == digest(causal() & lengths(np.array([3, 1])))
    True
    >>> digest(causal()) == digest(causal(align="start"))
    False
    """
    found = hashlib.blake2b(digest_size=8)
    _say(value, found)
    return int.from_bytes(found.digest(), "little") >> 1


def _say(value: Any, to: Any) -> None:
    if is_array(value):
        raw = value.detach() if is_torch(value) else value
        numbers = np.ascontiguousarray(to_numpy(raw))
        to.update(f"{dtype_name(value)}{numbers.shape}".encode() + numbers.tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        to.update(f"{type(value).__module__}.{type(value).__qualname__}(".encode())
        for field in fields(value):
            to.update(field.name.encode())
            _say(getattr(value, field.name), to)
        to.update(b")")
    elif isinstance(value, tuple | list):
        to.update(f"[{len(value)}".encode())
        for part in value:
            _say(part, to)
    elif isinstance(value, set | frozenset):  # whose order is another in every process
        _say(sorted(map(digest, value)), to)
    elif isinstance(value, types.FunctionType | types.MethodType | partial):
        _say_function(value, to)
    elif isinstance(value, types.ModuleType):
        to.update(value.__name__.encode())
    elif isinstance(value, types.CodeType):
        # not where it is written, which may be another place on another machine
        _say((value.co_name, value.co_code, value.co_names, value.co_varnames, value.co_consts), to)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        to.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
        _say(sorted(vars(value).items()), to)
    else:
        to.update(f"{type(value).__name__}:{value!r};".encode())


def _say_function(function: Any, to: Any) -> None:
    """What a function does and what it knows: its name alone is not enough, and where it lies differs."""
    if isinstance(function, partial):
        _say(("partial", function.func, function.args, sorted(function.keywords.items())), to)
    elif isinstance(function, types.MethodType):
        _say(("method", function.__func__, function.__self__), to)
    else:
        known = [cell.cell_contents for cell in function.__closure__ or ()]
        _say((function.__code__, function.__defaults__, function.__kwdefaults__, known), to)


def agree(
    links: Links, call: str, same: dict[str, Any], own: dict[str, int], wrong: Exception | None = None
) -> dict[str, list[int]]:
    """The numbers that each rank has of its own, by name, once all that must be the same is.

    `call` says what is called. `wrong` is what this rank found wrong with its own arguments: it raises that, and the
    others hear of it.
    """
    same = {"call": call, **same}
    numbers = [WRONG if wrong else FINE, digest(call)]
    numbers += [0] * (len(same) + len(own) - 1) if wrong else [*map(digest, [*same.values()][1:]), *own.values()]
    assert len(numbers) <= ROOM
    table = links.table(torch.tensor(numbers + [0] * (ROOM - len(numbers)), dtype=torch.int64)).tolist()
    if wrong is not None:
        raise wrong
    refused = [rank for rank, row in enumerate(table) if row[0] != FINE]
    if refused:
        its, says = ("its", "says") if len(refused) == 1 else ("their", "say")
        raise DistributedError(f"{_ranks(refused)} refused {its} arguments, and {says} why; nothing was computed")
    for place, name in enumerate(same, 1):
        values = [row[place] for row in table]
        if len(set(values)) > 1:
            usual = max(set(values), key=values.count)
            others = [rank for rank, value in enumerate(values) if value != usual]
            rest = [rank for rank in range(links.world) if rank not in others]
            has = "has" if len(others) == 1 else "have"
            raise DistributedError(
                f"{name}: is not the same on every rank: {_ranks(others)} {has} another than {_ranks(rest)}"
            )
    start = 1 + len(same)
    return {name: [row[start + place] for row in table] for place, name in enumerate(own)}


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", …" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
