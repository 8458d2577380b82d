"""SplitCache: a Hugging Face cache of which every rank holds a part, for `generate` and any other run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.distributed.current import current
from clearhead.distributed.entry import attention, observe
from clearhead.distributed.placement import Placement
from clearhead.nn.cache import KVCache
from clearhead.nn.places import Split
from clearhead.watching.given import Given

__all__ = ["SplitCache"]


class SplitLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers says nothing of its types
    """One layer of a `SplitCache`. What it hands out has the shape of all keys and none of their numbers."""

    def __init__(self, mesh: Any, block: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.held = KVCache(mesh=mesh, block=block)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All tokens are given on every rank, and each keeps its own."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.held.append(key_states, value_states)
        self.keys, self.values, self.split = held.k, held.v, held.split
        # no memory; attention that is not clearhead's reads NaN, and not a part of the keys for the whole
        empty = held.k.new_full((), torch.nan)
        handed: Any = empty.expand(*held.k.shape[:2], len(self.held), held.k.shape[3])
        handed.split_over = self
        return handed, empty.expand(*held.v.shape[:2], len(self.held), held.v.shape[3])

    def attend(self, given: Given, wanted: Mapping[str, Any] | None) -> tuple[Tensor, Observed | None]:
        """The output for all queries, on every rank the same, and what was attended to if it is wanted."""
        assert isinstance(self.split, Split)
        keys, ranks = self.split.placement, current()
        where = {"mesh": self.split.mesh, "placement": Placement.on_all(given.queries, keys.world),
                 "key_placement": keys, "timeout": None if ranks is None else ranks.timeout}  # fmt: skip
        if wanted is None:
            return attention(given.q, self.keys, self.values, **given.options, **where), None
        seen = observe(given.q, self.keys, self.values, **given.options, **where, **wanted)
        return seen.output, seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next queries see, on all ranks together, and the position of the first."""
        return len(self.held) + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens there were: the next one's position."""
        return len(self.held)

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False
        self.held = KVCache(mesh=self.held.mesh, block=self.held.block)

    def crop(self, max_length: int) -> None:
        """Forget all but the first tokens; a negative number says how many of the last."""
        self.held.trim(max(len(self.held) + max_length, 0) if max_length < 0 else max_length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these batch rows: the beams that live on."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each batch row several times."""
        self.batch_select_indices(torch.arange(len(self.held.seen)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take these batch rows."""
        if len(self.held):
            self.held.reorder(indices)

    def offload(self) -> Never:
        """Refused: what a rank keeps stays with it."""
        raise ArgumentError("past_key_values", "is a SplitCache, which stays on its device")


class SplitCache(Cache):
    """A cache for Hugging Face models that is split over the ranks of a mesh, `block` tokens in turn.

    Every rank runs the model on the same whole input, keeps a part of the keys and values, and attends for all queries
    to those; what ranks find is merged, to the same bits on each. So a text may be as long as the memory of all ranks
    allows. Masks, padding, beams and observations are the model's own.

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

    def __init__(self, config: Any, mesh: Any = None, *, block: int = 64) -> None:
        from clearhead.distributed.links import group_of  # needs PyTorch's distributed part

        if not hasattr(config, "get_text_config"):
            raise ArgumentError("config", f"is a {type(config).__name__}, expected the model's, model.config")
        ranks = current()
        group = group_of(ranks.group if mesh is None and ranks is not None else mesh)
        layers = DynamicCache(config=config).layers
        if not layers:
            raise ArgumentError("config", "names no layers, expected that of a model that generates")
        super().__init__(layers=[SplitLayer(group, block) if type(one) is DynamicLayer else one for one in layers])
