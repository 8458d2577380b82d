"""What every module does last: dropout that follows training, and attention, observed or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.approximations.method import Method
from clearhead.calls import attention
from clearhead.calls import observe as observed
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.core.positions import Rotary
from clearhead.distributed import entry as distributed
from clearhead.distributed.current import current, in_sight
from clearhead.distributed.placement import Placement
from clearhead.nn.places import Split

# arguments of other libraries' layers: when one is made, and when it is called
LAYER = {
    "batch_first": "leave it out, for batch always comes first",
    "is_causal": "give causal=True",
    "num_kv_heads": "give kv_heads=",
    "num_key_value_heads": "give kv_heads=",
    "dropout_p": "give dropout=",
    "window_size": "give window=, which counts the keys before a query's own",
    "sliding_window": "give window=, which counts the keys before a query's own",
}
FORWARD = {
    "is_causal": "give causal=True where the layer is made, or mask=causal()",
    "causal": "give causal=True where the layer is made, or mask=causal()",
    "attn_mask": "give mask=, True where a query may attend",
    "attention_mask": "give mask=padding(attention_mask), 1 where a token is real",
    "need_weights": "give return_weights=True",
    "output_attentions": "give return_weights=True",
    "average_attn_weights": "return_weights=True gives the weights by head, and weights.mean(1) their average",
    "dropout_p": "give dropout= where the layer is made",
    "past_key_values": "give cache=KVCache()",
    "past_key_value": "give cache=KVCache()",
}

# for layers that give no pair but by observe
OBSERVED = FORWARD | dict.fromkeys(
    ("need_weights", "return_weights", "output_attentions", "average_attn_weights"),
    "observe={'weights': True} gives the weights",
)


def draw() -> Tensor:
    """A seed from PyTorch's generator, so that `torch.manual_seed` reproduces what is dropped."""
    return torch.randint(2**62, (), dtype=torch.int64)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: float,
    observe: Mapping[str, Any] | None,
    method: Method | None = None,
    split: Split | None = None,
    **options: Any,
) -> tuple[Tensor, Observed | None]:
    """Attention with dropout of that probability, and what was attended to if `observe` asks for it.

    Of keys that are `split` over ranks k and v are those that lie here; every rank has all queries.
    """
    if method is not None:
        if observe is not None:
            raise ArgumentError(
                "observe", f"is given, and {method!r} is not observed: audit(method, …) says what it does"
            )
        scale = {} if options["scale"] is None else {"scale": options["scale"]}
        return method(q, k, v, mask=options["mask"], **scale), None
    options["dropout"] = (dropout, draw()) if dropout else None
    if split is not None:
        return _over_ranks(q, k, v, split, observe, options)
    ranks = current()
    if observe is None:
        return (attention if ranks is None else ranks.attend)(q, k, v, **options), None
    if ranks is not None and ranks.placement is not None:
        raise ArgumentError(
            "observe", "is given where sequences are split over ranks: distributed.observe(…) sees that"
        )
    seen = observed(q, k, v, **options, **observe)
    return seen.output, seen


def _over_ranks(
    q: Tensor, k: Tensor, v: Tensor, split: Split, observe: Mapping[str, Any] | None, options: dict[str, Any]
) -> tuple[Tensor, Observed | None]:
    """The same where each rank holds some of the keys."""
    keys = split.placement
    options |= {"mesh": split.mesh, "placement": Placement.on_all(q.shape[-2], keys.world), "key_placement": keys}
    if observe is None:
        return in_sight(distributed.attention, q, k, v, **options), None
    from clearhead.distributed.gathering import of_all_keys  # needs PyTorch's distributed part

    seen = of_all_keys(distributed.observe(q, k, v, **options, **observe), keys, split.mesh)
    return seen.output, seen


def check_method(method: Any, given: Mapping[str, Any], positions: Any, causal: bool) -> None:
    """Refuse what an approximation has not, where the module is made and not when it first runs."""
    if not isinstance(method, Method):
        raise ArgumentError("method", f"is {method!r}, expected a method, such as performer(256) or linear()")
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(name, f"is given together with method={method!r}, which has it not")
    if positions is not None and not isinstance(positions, Rotary):
        raise ArgumentError("positions", f"are added to scores, which {method!r} has not; rotary(…) turns q and k")
    if causal and method.acausal is not None:
        raise ArgumentError("causal", f"is True, and {method!r} has no causal form: {method.acausal}")


def what_to_observe(observe: Mapping[str, Any] | None, return_weights: bool) -> Mapping[str, Any] | None:
    """What a module observes: what the caller says, or the weights alone where a pair with them is wanted."""
    if not isinstance(return_weights, bool):
        raise ArgumentError("return_weights", f"is {return_weights!r}, expected True or False")
    if return_weights and observe is not None:
        raise ArgumentError(
            "return_weights", "is given together with observe, expected one: observe={'weights': True} has both"
        )
    return {"weights": True} if return_weights else observe


def probability(argument: str, value: Any) -> float:
    """A dropout probability, checked."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ArgumentError(argument, f"is {value!r}, expected a number from 0 up to, not with, 1")
    return float(value)


def grouped(kv_heads: int | None, num_heads: int) -> int:
    """The heads of keys, checked: as many as of queries unless given."""
    heads = size("kv_heads", num_heads if kv_heads is None else kv_heads)
    if num_heads % heads:
        raise ArgumentError("kv_heads", f"is {kv_heads}, expected a number that divides num_heads, {num_heads}")
    return heads


def check_sequence(x: Tensor, embed_dim: int) -> None:
    """Refuse what is not (batch, positions, embed_dim)."""
    if x.ndim != 3 or x.shape[-1] != embed_dim:
        raise ArgumentError("x", f"has shape {tuple(x.shape)}, expected (batch, positions, {embed_dim})")


def size(argument: str, value: Any, least: int = 1) -> int:
    """A size, checked."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(argument, f"is {value!r}, expected a whole number of at least {least}")
    return value
