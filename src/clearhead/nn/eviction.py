"""Which keys a cache keeps: policies as values, over what keys received of the queries so far.

    score:  by key and key head, of what was observed            (batch, key heads, keys)
    keep:   those with the largest scores, and those protected    as many as `keep` for each key head

`KVCache(keep=policy)` and `clearhead.integrations.huggingface_cache.EvictingCache(policy)` take one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.nn.attend import size

__all__ = ["H2O", "TOVA", "DropKV", "ObservedAttention", "Policy", "SnapKV", "StreamingLLM"]

INFINITE = float("inf")


@dataclass(frozen=True)
class Policy:
    """Keeps `keep` keys for each key head.

    `wants` is what is observed of every call. `carries` says that scores of earlier calls are added to, and `decodes`
    that keys are dropped after every token too, and not after prompts alone.

    Another one is a subclass that says what to observe, and how keys are ranked by it:

    >>> class Newest(Policy):
    ...     wants = {"received": 1}
    ...     def ranks(self, scores, positions, last):
    ...         return positions.double()
    >>> from clearhead.nn import KVCache, MultiHeadAttention
    >>> cache = KVCache(keep=Newest(keep=8))
    >>> with torch.no_grad():
    ...     output = MultiHeadAttention(16, 2, causal=True)(torch.randn(1, 30, 16), cache=cache)
    >>> cache.positions[0, 0].tolist()
    [22, 23, 24, 25, 26, 27, 28, 29]
    """

    keep: int
    wants: ClassVar[dict[str, Any]] = {}
    carries: ClassVar[bool] = False
    decodes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        size("keep", self.keep)

    def asked(self, queries: int) -> dict[str, Any]:
        """The options of `observe` for a call of so many queries."""
        return dict(self.wants)

    def found(self, observed: Observed, key_heads: int) -> Tensor:
        """What this call says of each key, (batch, key heads, keys): summed over the query heads that share it."""
        (name,) = self.wants
        by_query_head: Any = getattr(observed, name)
        return by_query_head.unflatten(1, (key_heads, -1)).sum(2)

    def ranks(self, scores: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """The order in which keys are kept, the largest first, from scores and positions; `last` (batch, 1, 1).

        Keys are in the order of positions, which count from a row's first token on; those of padding are below 0.
        """
        return scores

    @property
    def protected(self) -> int:
        """How many of the last tokens are always kept."""
        return 0


@dataclass(frozen=True)
class H2O(Policy):
    """Heavy hitters: the keys that received most of all queries so far, and the last `recent` tokens (H2O, 2023).

    >>> from clearhead.nn import KVCache, MultiHeadAttention
    >>> cache = KVCache(keep=H2O(keep=8, recent=4))
    >>> with torch.no_grad():
    ...     output = MultiHeadAttention(16, 2, causal=True)(torch.randn(1, 30, 16), cache=cache)
    >>> cache.positions.shape
    torch.Size([1, 2, 8])
    """

    recent: int = 1
    wants: ClassVar[dict[str, Any]] = {"received": True}
    carries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        within("recent", self.recent, self.keep)

    @property
    def protected(self) -> int:
        """How many of the last tokens are always kept."""
        return self.recent


@dataclass(frozen=True)
class ObservedAttention(Policy):
    """The keys that received most of each query that could see them, on average; prompts only (as kvpress has it).

    >>> from clearhead.nn import KVCache, MultiHeadAttention
    >>> cache = KVCache(keep=ObservedAttention(keep=8))
    >>> with torch.no_grad():
    ...     output = MultiHeadAttention(16, 2, causal=True)(torch.randn(1, 30, 16), cache=cache)
    >>> cache.positions.shape
    torch.Size([1, 2, 8])
    """

    wants: ClassVar[dict[str, Any]] = {"received": True}
    carries: ClassVar[bool] = True
    decodes: ClassVar[bool] = False

    def ranks(self, scores: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Sums over queries, divided by how many there were."""
        return scores / (last - positions + 1).clamp(min=1)


@dataclass(frozen=True)
class SnapKV(Policy):
    """The keys that the last `window` queries of a prompt looked at, evened out over `pool` neighbours (SnapKV, 2024).

    The window itself is kept, and so is every token after the prompt.

    >>> from clearhead.nn import KVCache, MultiHeadAttention
    >>> cache = KVCache(keep=SnapKV(keep=8, window=4))
    >>> with torch.no_grad():
    ...     output = MultiHeadAttention(16, 2, causal=True)(torch.randn(1, 30, 16), cache=cache)
    >>> cache.positions.shape
    torch.Size([1, 2, 8])
    """

    window: int = 32
    pool: int = 5
    decodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        within("window", self.window, self.keep, least=1)
        if size("pool", self.pool) % 2 == 0:
            raise ArgumentError("pool", f"is {self.pool}, expected an odd number, so that a key stands in the middle")

    def asked(self, queries: int) -> dict[str, Any]:
        """What the last queries of a prompt looked at."""
        return {"received": self.window}

    def found(self, observed: Observed, key_heads: int) -> Tensor:
        """The mean over the query heads that share a key."""
        received: Any = observed.received
        return received.unflatten(1, (key_heads, -1)).mean(2)

    def ranks(self, scores: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """A key's score is the mean over its neighbours before the window; beyond the first and the last there is 0."""
        before = torch.where(positions <= last - self.window, scores, 0.0)
        return torch.nn.functional.avg_pool1d(before, self.pool, stride=1, padding=self.pool // 2)

    @property
    def protected(self) -> int:
        """How many of the last tokens are always kept."""
        return self.window


@dataclass(frozen=True)
class TOVA(Policy):
    """What the last query looks at, on average over all heads, which keep the same keys (TOVA, 2024).

    >>> from clearhead.nn import KVCache, MultiHeadAttention
    >>> cache = KVCache(keep=TOVA(keep=8))
    >>> with torch.no_grad():
    ...     output = MultiHeadAttention(16, 2, causal=True)(torch.randn(1, 30, 16), cache=cache)
    >>> cache.positions.shape
    torch.Size([1, 2, 8])
    """

    wants: ClassVar[dict[str, Any]] = {"received": 1}

    def found(self, observed: Observed, key_heads: int) -> Tensor:
        """The mean over all heads."""
        received: Any = observed.received
        return received.mean(1, keepdim=True).expand(-1, key_heads, -1)

    @property
    def protected(self) -> int:
        """How many of the last tokens are always kept."""
        return 1


@dataclass(frozen=True)
class DropKV(H2O):
    """The keys without which outputs so far would change most (`observe(removal=True)`), and the last `recent`.

    >>> from clearhead.nn import KVCache, MultiHeadAttention
    >>> cache = KVCache(keep=DropKV(keep=8, recent=4))
    >>> with torch.no_grad():
    ...     output = MultiHeadAttention(16, 2, causal=True)(torch.randn(1, 30, 16), cache=cache)
    >>> cache.positions.shape
    torch.Size([1, 2, 8])
    """

    wants: ClassVar[dict[str, Any]] = {"removal": True}


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """The first `sinks` tokens and the last ones (StreamingLLM, 2023); positions stay those of the whole text.

    >>> from clearhead.nn import KVCache, MultiHeadAttention
    >>> cache = KVCache(keep=StreamingLLM(keep=8, sinks=2))
    >>> with torch.no_grad():
    ...     output = MultiHeadAttention(16, 2, causal=True)(torch.randn(1, 30, 16), cache=cache)
    >>> sorted(cache.positions[0, 0].tolist())
    [0, 1, 24, 25, 26, 27, 28, 29]
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        within("sinks", self.sinks, self.keep)

    def found(self, observed: Observed, key_heads: int) -> Tensor:
        """Nothing is asked of the weights."""
        raise NotImplementedError

    def ranks(self, scores: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """The first ones, then the last ones."""
        return torch.where(positions < self.sinks, INFINITE, positions.to(torch.float64))


def within(argument: str, value: Any, keep: int, least: int = 0) -> None:
    """Refuse what is no number of tokens among those that are kept."""
    if size(argument, value, least=least) > keep:
        raise ArgumentError(argument, f"is {value}, expected at most keep, {keep}")


def check_policy(policy: Any) -> None:
    """Refuse what is no policy."""
    if not isinstance(policy, Policy):
        raise ArgumentError(
            "keep", f"is {policy!r}, expected a policy of clearhead.nn.eviction, such as H2O(keep=256, recent=64)"
        )
