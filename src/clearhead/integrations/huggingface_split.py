"""SplitCache: a Hugging Face cache of which every rank holds a part, for `generate` and any other run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.distributed.current import Ranks, current, in_sight
from clearhead.distributed.entry import attention, observe
from clearhead.distributed.placement import Placement
from clearhead.nn.cache import KVCache
from clearhead.nn.places import Split
from clearhead.watching.given import Given

__all__ = ["SplitCache"]

# tokens that follow one another on a rank
BLOCK = 64


class SplitLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers says nothing of its types
    """One layer of a cache of which every rank holds a part, from the first call of attention on.

    Until then all keys are here, as they have just been computed. What is handed out later has the shape of all keys
    and none of their numbers: attention that is not clearhead's reads NaN, and not a part of the keys for the whole.
    `patient` layers stay whole where no attention of clearhead's sees them, or where gradients are wanted.
    """

    keys: Any  # None before the first update
    values: Any

    def __init__(self, mesh: Any, block: int, *, patient: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.held, self.patient = KVCache(mesh=mesh, block=block), patient
        self.here: tuple[Tensor, Tensor] | None = None  # keys and values of this rank, once they are split
        self.split: Split | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All tokens are given on every rank, and each keeps its own."""
        if self.here is not None:
            self._append(key_states, value_states)
            return self.keys, self.values
        if not self.patient and self.is_initialized:
            raise ArgumentError(
                "past_key_values",
                "is a SplitCache, and attention did not come to it: expected "
                "clearhead.integrations.huggingface.register() and model.set_attn_implementation('clearhead')",
            )
        if not self.patient:
            check_gradients(key_states, value_states)
        super().update(key_states, value_states)
        handed: Any = self.keys.view(self.keys.shape)  # an object of its own, which only attention is handed
        handed.split_over = self
        return handed, self.values

    def keep(self) -> None:
        """Attention has seen all keys: from now on this rank has its own alone."""
        learned = torch.is_grad_enabled() and (self.keys.requires_grad or self.values.requires_grad)
        if self.here is None and not learned:
            self._append(self.keys, self.values)

    def _append(self, k: Tensor, v: Tensor) -> None:
        """Some more tokens, of which this rank keeps some; keys and values are what is handed out."""
        held = self.held.append(k, v)
        assert isinstance(held.split, Split)
        self.here, self.split = (held.k, held.v), held.split
        empty = held.k.new_full((), torch.nan)  # of which an expanded one takes no memory
        handed: Any = empty.expand(*held.k.shape[:2], len(self.held), held.k.shape[3])
        handed.split_over = self
        self.keys, self.values = handed, empty.expand(*held.v.shape[:2], len(self.held), held.v.shape[3])

    def attend(self, given: Given, wanted: Mapping[str, Any] | None) -> tuple[Tensor, Observed | None]:
        """The output for all queries, on every rank the same, and what was attended to if it is wanted."""
        assert self.here is not None
        assert self.split is not None
        (k, v), keys, ranks = self.here, self.split.placement, current()
        timeout = None if ranks is None else ranks.timeout
        where: dict[str, Any] = {"mesh": self.split.mesh, "placement": Placement.on_all(given.queries, keys.world),
                 "key_placement": keys, "timeout": timeout}  # fmt: skip
        if wanted is None:
            return in_sight(attention, given.q, k, v, **given.options, **where), None
        from clearhead.distributed.gathering import of_all_keys  # needs PyTorch's distributed part

        seen = observe(given.q, k, v, **given.options, **where, **wanted)
        seen = of_all_keys(seen, keys, self.split.mesh, timeout=timeout)
        return seen.output, seen

    @property
    def ranks(self) -> Ranks:
        """Who shares the work of attention while all keys are here still."""
        found = current()
        return Ranks(self.held.mesh, None, None) if found is None else found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next queries see, on all ranks together, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens there were: the next one's position."""
        if self.here is not None:
            return len(self.held)
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys is not None else 0

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = self.here = self.split = None
        self.is_initialized = False
        self.held = KVCache(mesh=self.held.mesh, block=self.held.block)

    def crop(self, max_length: int) -> None:
        """Forget all but the first tokens; a negative number says how many of the last."""
        count = self.get_seq_length()
        if not count or not max_length:
            return
        kept = max(count + max_length, 0) if max_length < 0 else min(max_length, count)
        if self.here is None:
            self.keys, self.values = self.keys[..., :kept, :], self.values[..., :kept, :]
            return
        self.held.trim(kept)
        self._append(*(part[..., :0, :] for part in self.here))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these batch rows: the beams that live on."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each batch row several times."""
        if self.get_seq_length():
            self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take these batch rows."""
        if not self.get_seq_length():
            return
        if self.here is None:
            self.keys, self.values = (part[indices.to(part.device)] for part in (self.keys, self.values))
            return
        self.held.reorder(indices)
        shape = (len(indices), *self.here[0].shape[1:2], 0)
        self._append(*(part.new_empty((*shape, part.shape[-1])) for part in self.here))

    def offload(self) -> Never:
        """Refused: what a rank keeps stays with it."""
        raise ArgumentError("past_key_values", "is split over ranks, and stays on its device")


def check_gradients(k: Tensor, v: Tensor) -> None:
    """Refuse keys that require gradients, which what is kept does not carry."""
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ArgumentError("k, v", "require gradients, which a cache does not carry: decode under torch.no_grad()")


def layer_for_now(**_: Any) -> DynamicLayer:
    """A layer of a cache that a model makes for itself: inside of `parallel(mesh)` it is split over its ranks."""
    ranks = current()
    if ranks is None or ranks.placement is not None:
        return DynamicLayer()  # type: ignore[no-untyped-call]  # as above
    return SplitLayer(ranks.group, BLOCK, patient=True)


def split_inside() -> None:
    """From now on `DynamicCache` asks here for its layers, where transformers lets others say what they are."""
    kinds = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", None)
    if isinstance(kinds, dict) and kinds.get("full_attention") is DynamicLayer:
        kinds["full_attention"] = layer_for_now


class SplitCache(Cache):
    """A cache for Hugging Face models that is split over the ranks of a mesh, `block` tokens in turn.

    Every rank runs the model on the same whole input and keeps a part of the keys and values. For a text that is given
    at once ranks share out the queries; later each attends for all queries to the keys that it has, and what ranks find
    is merged, to the same bits on each. So a text may be as long as the memory of all ranks allows. Masks, padding,
    beams and observations are the model's own. Inside of `clearhead.distributed.parallel(mesh)` the caches that a model
    makes for itself are split so, too; this one says it by name, for other blocks or for use outside of it.

    >>> import torch.distributed as dist
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from clearhead.integrations.huggingface import register
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # here a world of one process
    >>> register()
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    ...     num_key_value_heads=1, vocab_size=11, attn_implementation="clearhead", eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> cache = SplitCache(model.config)
    >>> tokens = model.generate(torch.ones(1, 20, dtype=torch.int64), past_key_values=cache, max_new_tokens=3,
    ...     do_sample=False)
    >>> tokens.shape, cache.get_seq_length()
    (torch.Size([1, 23]), 22)
    >>> dist.destroy_process_group()

    `mesh` is that of `clearhead.distributed.parallel(mesh)` where one is inside of it, and else all processes. Layers
    of sliding windows keep their windows whole. The model's attention has to be clearhead's.
    """

    def __init__(self, config: Any, mesh: Any = None, *, block: int = BLOCK) -> None:
        from clearhead.distributed.links import group_of  # needs PyTorch's distributed part

        if not hasattr(config, "get_text_config"):
            raise ArgumentError("config", f"is a {type(config).__name__}, expected the model's, model.config")
        ranks = current()
        group = group_of(ranks.group if mesh is None and ranks is not None else mesh)
        layers = DynamicCache(config=config).layers
        if not layers:
            raise ArgumentError("config", "names no layers, expected that of a model that generates")
        plain = (DynamicLayer, SplitLayer)
        super().__init__(layers=[SplitLayer(group, block) if type(one) in plain else one for one in layers])
