"""PyTorch tensors of which nothing is unusual, seen at a glance: to look at all else takes as long as a short call.

Not asked while PyTorch compiles what is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_variadic

from clearhead.core.admit import lies_plainly
from clearhead.kernels.extension import native

autocasts = torch._C._is_any_autocast_enabled
modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._functorch.peek_interpreter_stack

# how tensors are looked at without Python (DLPack 1.3)
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
if native is not None and EXCHANGE is not None:
    native.meet(
        Tensor, EXCHANGE, autocasts, modes, transforms, has_torch_function_variadic, forward_ad, torch.is_grad_enabled,
        torch.get_num_threads, torch.empty_like,
    )  # fmt: skip


def at_a_glance(q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
    """The output of a call on a CPU of a kind that was seen before, where all of that is usual; else None."""
    return None if native is None else native.attend(q, k, v, mask, scale)


def usual(q: Any, k: Any, v: Any) -> bool:
    """True for three tensors whose numbers lie in memory as they are, in a call that nobody else hears of."""
    if modes() or transforms() is not None or forward_ad._current_level >= 0:
        return False
    return not has_torch_function_variadic(q, k, v) and lies_plainly(q, k, v)
