"""What a Flax model attended to: every call of its modules' `attention_fn`, observed beside what it computes."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import wraps
from types import TracebackType
from typing import Any

try:
    import flax.linen
    import flax.nnx
    import jax
    import jax.numpy as jnp
except ImportError:
    from clearhead.core.installing import brings

    raise ImportError(f"Flax models need Flax and JAX: {brings('flax')}") from None

import numpy as np

from clearhead.calls import observe
from clearhead.core.arrays import Array, is_traced, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.watching.call import Call, layer_of
from clearhead.watching.chosen import heads_of, layers_of
from clearhead.watching.distance import mean_distance
from clearhead.watching.given import Given
from clearhead.watching.seen import Seen
from clearhead.watching.wants import wanted

# which have types for some of their functions only
frame: Any = flax
nnx, linen = frame.nnx, frame.linen
effects: Any = jax
# functions of Flax that compute the formula, whatever they are given; others are held to it
KNOWN = (nnx.dot_product_attention, linen.dot_product_attention)


class FlaxWatch:
    """One watch of a Flax model: opened by `with`, it gives the `Seen` that calls are put into."""

    def __init__(
        self,
        model: Any,
        *,
        layers: Iterable[int | str] | int | str | None = None,
        heads: Iterable[int] | int | None = None,
        want: Mapping[str, Any] | None = None,
        tokens: Any = None,
        on_device: bool = False,
    ) -> None:
        if not isinstance(model, nnx.Module | linen.Module):
            raise ArgumentError("model", f"is a {type(model).__name__}, expected a module of flax.nnx or flax.linen")
        self.model, self.wanted, self.on_device = model, wanted(want), on_device
        self.layers, self.heads, self.tokens = layers_of(layers), heads_of(heads), _tokens(tokens)
        self.seen, self.lock, self.open = Seen(), threading.Lock(), False
        self.replaced: list[tuple[Any, Any]] = []
        self.context: Any = None
        self.order: dict[str, int] = {}  # modules without a number in their name
        self.made: dict[str, int] = {}  # how many calls each module has made
        self.missed: dict[str, str] = {}

    def __enter__(self) -> Seen:
        if self.open or self.seen.calls:
            raise ArgumentError("watch", "has been opened before; another call of watch makes a new one")
        self.open = True
        if isinstance(self.model, linen.Module):
            self.context = linen.intercept_methods(self._intercept)
            self.context.__enter__()
        else:
            for path, module in nnx.iter_modules(self.model):
                if isinstance(module, nnx.MultiHeadAttention):
                    self.replaced.append((module, module.attention_fn))
                    name = ".".join(map(str, path))
                    self.missed[name] = f"{type(module).__name__} was not called while watch was open"
                    module.attention_fn = self._seeing(name, type(module).__name__, module.attention_fn)
        return self.seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.context is not None:
            self.context.__exit__(kind, error, trace)
        for module, own in self.replaced:
            module.attention_fn = own
        effects.effects_barrier()  # what compiled programs tell comes when they run
        self.open = False
        self.seen.calls.sort(key=lambda call: (call.step, call.index))
        if not self.made and not self.missed:
            self.missed[""] = (
                f"{type(self.model).__name__} called no MultiHeadAttention of Flax, whose attention_fn is what is seen"
            )
        self.seen.missed.update(self.missed)

    def _intercept(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """A method of a Linen module is called: of its attention, with an `attention_fn` that looks on."""
        module = context.module
        if not isinstance(module, linen.MultiHeadDotProductAttention) or context.method_name != "__call__":
            return call(*args, **kwargs)
        own = module.attention_fn
        seeing = self._seeing(".".join(module.path), type(module).__name__, own)
        object.__setattr__(module, "attention_fn", seeing)  # a frozen dataclass, put right again below
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(module, "attention_fn", own)

    def _seeing(self, name: str, kind: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """The module's own function, of which each call is observed."""

        @wraps(own)
        def attention_fn(query: Array, key: Array, value: Array, *args: Any, **kwargs: Any) -> Array:
            output = own(query, key, value, *args, **kwargs)
            if self.open and self._selects(name):
                bound = inspect.signature(own).bind_partial(query, key, value, *args, **kwargs).arguments
                self._look(name, kind, own, query, key, value, {**bound, **kwargs}, output)
            return output

        return attention_fn

    def _selects(self, name: str) -> bool:
        number = self._layer(name)
        self.made.setdefault(name, 0)
        self.missed.pop(name, None)
        chosen = self.layers
        return chosen is None or any(
            fnmatchcase(name, one) if isinstance(one, str) else one == number for one in chosen
        )

    def _layer(self, name: str) -> int:
        """The first number in a module's name, as `layers.3` or Linen's `Block_3`; else its place among the others."""
        found = layer_of(name)
        numbered = re.search(r"_(\d+)(?:\.|$)", name) if found is None else None
        if numbered is not None:
            return int(numbered.group(1))
        return self.order.setdefault(name, len(self.order)) if found is None else found

    def _look(
        self, name: str, kind: str, own: Any, q: Array, k: Array, v: Array, bound: Mapping[str, Any], output: Array
    ) -> None:
        """Observe a call, now or when the program that it is traced into runs."""
        mask, bias = bound.get("mask"), bound.get("bias")
        q, k, v, bias = (None if a is None else jax.lax.stop_gradient(a) for a in (q, k, v, bias))
        q, k, v = (jnp.swapaxes(a, -2, -3) for a in (q, k, v))  # heads before positions
        given = Given(
            q,
            k,
            v,
            causal=bool(bound.get("is_causal", False)),
            mask=None if mask is None else jnp.asarray(mask) != 0,
            bias=bias,
        )
        whole = observe(given.q, given.k, given.v, **given.options)
        drops = not bound.get("deterministic", True) and bound.get("dropout_rate", 0.0) > 0
        if own not in KNOWN and not drops and not self._agrees(name, whole.output, output):
            return
        some = given if self.heads is None else given.of_heads(self.heads)
        observed = observe(some.q, some.k, some.v, **some.options, **self.wanted.for_length(some.queries))
        told = {"observed": observed, "distance": mean_distance(some) if self.wanted.distance else None}
        told["kept"] = (
            {name: getattr(some, name) for name in ("q", "k", "v", "mask", "bias")} if self.wanted.keep else None
        )

        def tell(told: dict[str, Any]) -> None:
            self._add(name, kind, some, **told)

        if any(map(is_traced, (q, k, v, mask, bias))):
            jax.debug.callback(tell, told)
        else:
            tell(told)

    def _agrees(self, name: str, ours: Array, theirs: Array) -> bool:
        """Whether a function of somebody's own computes the formula; what is traced cannot be compared."""
        if is_traced(theirs) or is_traced(ours):
            self.missed[name] = "its attention_fn is not Flax's, and under jit it cannot be held to the formula"
            return False
        finfo: Any = jnp.finfo
        rounding = 64 * float(finfo(theirs.dtype).eps)
        ours, theirs = (np.asarray(a, dtype=np.float64) for a in (jnp.swapaxes(ours, -2, -3), theirs))
        if ours.shape == theirs.shape:
            if np.abs(ours - theirs).max(initial=0) <= rounding * np.abs(theirs).max(initial=1):
                return True
        self.missed[name] = "its attention_fn gives another output than the formula"
        return False

    def _add(self, name: str, kind: str, given: Given, *, observed: Observed, distance: Any, kept: Any) -> None:
        """Hold on to what was observed."""
        if not self.open:
            return
        if not self.wanted.output:
            observed = observed.each(lambda a: a)  # a value of its own
            object.__setattr__(observed, "output", observed.output[..., :0])
        if not self.on_device:
            observed = observed.each(to_numpy)
            distance = None if distance is None else to_numpy(distance)
            kept = kept and {name: None if a is None else to_numpy(a) for name, a in kept.items()}
        with self.lock:
            step = self.made[name]
            self.made[name] += 1
            rows = int(np.prod(observed.lse.shape[:-2]))
            self.seen.calls.append(
                Call(
                    name=name,
                    kind=kind,
                    index=len(self.seen.calls),
                    step=step,
                    layer=self._layer(name),
                    keys=given.keys,
                    observed=observed,
                    heads=self.heads,
                    distance=distance,
                    kept=None if kept is None else Given(**kept, causal=given.causal),
                    queries_named=self._named(rows, given.queries),
                    keys_named=self._named(rows, given.keys),
                    counted=self.wanted.counted(given.queries),
                )
            )

    def _named(self, rows: int, count: int) -> tuple[tuple[str, ...], ...] | None:
        fits = self.tokens is not None and len(self.tokens) in (1, rows) and len(self.tokens[0]) == count
        return self.tokens if fits else None


def _tokens(given: Any) -> tuple[tuple[str, ...], ...] | None:
    """Tokens of each batch row, as they were given."""
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, list | tuple) or not given:
        raise ArgumentError("tokens", f"is a {type(given).__name__}, expected a list of tokens, or one for each row")
    rows = given if isinstance(given[0], list | tuple) else [given]
    return tuple(tuple(map(str, row)) for row in rows)
