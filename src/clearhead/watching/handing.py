"""What transformers' registry hands a module, run: who stands by or is near looks at it, and at nothing else."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from clearhead.watching import mode
from clearhead.watching.mode import active
from clearhead.watching.sdpa import FUNCTION


def hand_over(function: Any, direct: Any, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a function that a registry has handed out to a module: who stands by, or is near, looks at it.

    `direct` is the same function, if there is one, that makes its call known by itself. Where nobody else has to see
    what it computes it runs with no mode on, under which every size that it asks a tensor for takes microseconds.
    """
    if F.scaled_dot_product_attention is not FUNCTION:  # somebody has put another in its place meanwhile
        direct = None
    recorders = active.recorders
    before = active.given, active.direct
    near = [recorder for recorder in active.near if recorder.begin(module)]
    waiting = [recorder for recorder in (*active.standing, *near) if recorder not in recorders]
    alone = direct is not None and not recorders and len(waiting) == len(near)
    active.given, active.direct = module, False
    active.handed += 1
    if alone:
        recorders.extend(waiting)
    else:
        for recorder in waiting:
            mode.start(recorder)
    try:
        return (direct or function)(module, *args, **options)
    finally:
        active.handed -= 1
        active.given, active.direct = before
        for recorder in near:
            recorder.end(module)
        if alone:
            recorders.clear()
        else:
            for recorder in waiting:
                mode.rest(recorder)


def directly(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's attention as a function calls it that makes its call known by itself."""
    active.direct = True
    if active.mode is not None or not active.recorders:  # who follows steps has to see it, too
        result: Tensor = F.scaled_dot_product_attention(*args, **kwargs)
        return result
    # which is made contiguous by the one who calls it here, however it lies
    return mode.seen_call(F.scaled_dot_product_attention, args, kwargs, lay=False)
