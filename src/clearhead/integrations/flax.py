"""Flax: an `attention_fn` for `nnx` and Linen, and what a model attended to, by `watch`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

try:
    import jax
    import jax.numpy as jnp
    from flax import nnx
except ImportError:
    from clearhead.core.installing import brings

    raise ImportError(f"Flax models need Flax and JAX: {brings('flax')}") from None

from clearhead.calls import attention as attend
from clearhead.calls import observe
from clearhead.core.array_masks import lets
from clearhead.core.arrays import Array
from clearhead.core.mask import Mask
from clearhead.core.masks import causal
from clearhead.watching.flax_modules import FlaxWatch

__all__ = ["attention", "watch"]


def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    *,
    kernel: str | None = None,
) -> Array:
    """`clearhead.attention` as Flax's modules call it: (…, positions, heads, features), and the same arguments.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> layer = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attention, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 8)), mask=nnx.make_causal_mask(jnp.ones((1, 5)))).shape
    (1, 5, 8)

    Linen's `MultiHeadDotProductAttention` takes it likewise. The mask may also be one of ours, as `causal()`, which is
    never built. Two things differ from Flax's own function: a query that may attend to nothing gives 0 and not the mean
    of all values, and dropout drops weights of each batch row for itself. Weights that are sown are those before
    dropout. `precision` is the kernel's own.
    """
    if dtype is not None:
        query, key, value = (jnp.asarray(a, dtype) for a in (query, key, value))
    q, k, v = (jnp.swapaxes(a, -2, -3) for a in (query, key, value))
    allowed = None if mask is None else lets(mask if isinstance(mask, Mask) else jnp.asarray(mask) != 0)
    if is_causal:
        allowed = causal(align="start") if allowed is None else allowed & causal(align="start")
    drop = None
    if not deterministic and dropout_rate > 0.0:
        drop = (float(dropout_rate), jax.random.bits(dropout_rng, dtype=jnp.uint32))
    options: dict[str, Any] = {"mask": allowed, "bias": bias, "dropout": drop, "kernel": kernel}
    if module is not None:
        seen = observe(q, k, v, weights=True, **options)
        kind = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
        module.sow(kind, "attention_weights", seen.weights)
        return jnp.swapaxes(seen.output, -2, -3)
    return jnp.swapaxes(attend(q, k, v, **options), -2, -3)


def watch(
    model: Any,
    *,
    layers: Iterable[int | str] | int | str | None = None,
    heads: Iterable[int] | int | None = None,
    want: Mapping[str, Any] | None = None,
    tokens: Any = None,
    on_device: bool = False,
) -> FlaxWatch:
    """Watch the attention of a Flax model, of `nnx` or Linen, without changing what it computes.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> layers = [nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)) for _ in range(2)]
    >>> model = nnx.Sequential(*layers)
    >>> with watch(model) as seen:
    ...     output = model(jnp.ones((1, 5, 8)))
    >>> [call.name for call in seen], seen[0].entropy.shape
    (['layers.0', 'layers.1'], (1, 2, 5))

    The arguments, and the `Seen` that it gives, are those of `clearhead.watch`; `tokens` is a list. Seen is what calls
    the `attention_fn` of Flax's own MultiHeadAttention, eagerly or under `jit`: the function computes the output, and
    is observed beside it. One that is not Flax's own is held to the formula first, which needs numbers: under `jit` it
    is missed. Programs of Linen modules that were compiled before tell nothing; `nnx` compiles them anew. What was not
    seen is said in `seen.missed`. A call's `step` counts the calls of its module.
    """
    return FlaxWatch(model, layers=layers, heads=heads, want=want, tokens=tokens, on_device=on_device)
