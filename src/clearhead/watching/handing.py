"""What transformers' registry hands a module, run: who stands by or is near looks at it, and at nothing else."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from clearhead.watching import again, mode, shortcut
from clearhead.watching.mode import active
from clearhead.watching.recorder import Recorder
from clearhead.watching.sdpa import FUNCTION
from clearhead.watching.shortcut import Direct


def hand_over(function: Any, direct: Direct | None, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a function that a registry has handed out to a module: who stands by, or is near, looks at it.

    `direct` is the same function, if there is one, that makes its call known by itself. Where nobody else has to see
    what it computes it runs with no mode on, under which every size that it asks a tensor for takes microseconds.
    """
    if F.scaled_dot_product_attention is not FUNCTION:  # somebody has put another in its place meanwhile
        direct = None
    recorders, near = active.recorders, active.near
    if direct is not None and len(near) == 1 and not recorders and not active.standing and near[0].begin(module):
        return for_one(near[0], direct, module, args, options)
    before = active.given, active.query, active.direct
    near = [recorder for recorder in active.near if recorder.begin(module)]
    waiting = [recorder for recorder in (*active.standing, *near) if recorder not in recorders]
    alone = direct is not None and not recorders and len(waiting) == len(near)
    active.given, active.query, active.direct = module, query_of(args), False
    active.handed += 1
    if alone:
        recorders.extend(waiting)
    else:
        for recorder in waiting:
            mode.start(recorder)
    try:
        return (function if direct is None else direct.run)(module, *args, **options)
    finally:
        active.handed -= 1
        active.given, active.query, active.direct = before
        for recorder in near:
            recorder.end(module)
        if alone:
            recorders.clear()
        else:
            for recorder in waiting:
                mode.rest(recorder)


def for_one(recorder: Recorder, direct: Direct, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The same for the one watch that looks, where nobody else does: a call of a kind that it has met is played."""
    recorders, played = active.recorders, recorder.played
    before = active.given, active.query, active.direct
    active.given, active.query, active.direct = module, query_of(args), True
    active.handed += 1
    try:
        kind = None if played is None else direct.kind(module, args, options)
        known = None if played is None or kind is None else played.get(kind)
        if known is not None:
            output = mode.play(recorder, known, *args[:3])
            if output is not None:
                return shortcut.laid_out(output)
        active.direct, active.made = False, []
        recorders.append(recorder)
        result = direct.run(module, *args, **options)
        if played is not None and kind is not None and len(active.made) == 1:
            known, *made = active.made[0]
            if shortcut.same(made, args, result):
                again.add(played, kind, known)
        return result
    finally:
        active.made = None
        active.handed -= 1
        active.given, active.query, active.direct = before
        recorder.end(module)
        recorders.clear()


def query_of(args: tuple[Any, ...]) -> Tensor | None:
    """The queries among what a function was given, if it was given any."""
    return args[0] if args and isinstance(args[0], Tensor) else None


def directly(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's attention as a function calls it that makes its call known by itself."""
    active.direct = True
    if active.mode is not None or not active.recorders:  # who follows steps has to see it, too
        result: Tensor = F.scaled_dot_product_attention(*args, **kwargs)
        return result
    # which is made contiguous by the one who calls it here, however it lies
    return mode.seen_call(F.scaled_dot_product_attention, args, kwargs, lay=False)
