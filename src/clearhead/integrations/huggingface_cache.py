"""EvictingCache: a Hugging Face cache that keeps tokens by what was attended to, for `generate` and any other run."""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from clearhead.calls import observe
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.integrations.huggingface_split import SplitLayer
from clearhead.nn.eviction import Policy, check_policy
from clearhead.nn.kept import Kept
from clearhead.nn.places import Held
from clearhead.watching.given import Given

__all__ = ["EvictingCache"]


class EvictingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers says nothing of its types
    """One layer of an `EvictingCache`. Its keys know it: so clearhead's attention can tell it what was attended to."""

    is_croppable = False

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.kept, self.seen = Kept(policy), 0
        self.before: tuple[Any, ...] = ()
        self.beside: list[EvictingLayer] = [self]  # all layers of the cache that do so

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the new queries see."""
        if self.kept.awaited:
            raise ArgumentError(
                "past_key_values",
                "is an EvictingCache, and attention did not tell it what was attended to: expected "
                "clearhead.integrations.huggingface.register() and model.set_attn_implementation('clearhead')",
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.before = (self.kept.state, self.seen, self.keys, self.values)
        new = torch.arange(self.seen, self.seen + key_states.shape[2], device=key_states.device)
        self.keys, self.values = self.kept.add(key_states, value_states, new.expand(len(key_states), -1), padded=False)
        self.seen += key_states.shape[2]
        handed: Any = self.keys.view(self.keys.shape)  # an object of its own, which only attention is handed
        handed.evicting = self
        return handed, self.values

    def attend(self, given: Given, asked: bool) -> Tensor:
        """The output of a call with the keys of this layer, after which it keeps what its policy does.

        Where that fails all layers are as they were before the model ran. `asked` where it is to give its weights.
        """
        try:
            found = self._observe(given, asked)
        except BaseException:
            for layer in self.beside:
                if layer is not self and layer.seen == self.seen:
                    layer.take_back()
            self.take_back()
            raise
        self.kept.settle(found)
        self.keys, self.values = self.kept.k, self.kept.v
        return found.output

    def take_back(self) -> None:
        """Be as before the last update."""
        self.kept.state, self.seen, self.keys, self.values = self.before

    def _observe(self, given: Given, asked: bool) -> Observed:
        kept, queries = self.kept, given.queries
        if asked:
            raise ArgumentError(
                "output_attentions", "is True together with an EvictingCache, of whose keys some are gone"
            )
        if given.bias is not None:
            raise ArgumentError(
                "attention_mask", "is added to scores, expected 1 and 0 for tokens with an EvictingCache"
            )
        self._follow(given)
        start = [self.seen - queries] * len(given.q)
        group = given.q.shape[1] // given.k.shape[1]
        held = Held(given.k, given.v, start, kept.positions, group=group, by_order=not kept.padded, real=kept.real)
        return observe(given.q, given.k, given.v, **given.unmasked, mask=held.mask(queries), **kept.asked())

    def _follow(self, given: Given) -> None:
        """Tell padding from what the model's mask says of the new tokens, and refuse what is not causal.

        Where each of the tokens before stands is known here, and not to the mask.
        """
        queries = given.queries
        refused = "lets tokens see later ones, or hides earlier ones: an EvictingCache is for causal attention"
        if given.mask is None:
            if queries > 1 and not given.causal:
                raise ArgumentError("attention_mask", refused)
            return
        new = given.mask[..., -queries:]
        # a token that not even its own query sees is padding
        real = new.any(-2).expand(len(given.q), *given.mask.shape[1:-2], -1)[:, 0]
        seen = torch.ones(queries, queries, dtype=torch.bool, device=new.device).tril() & real[:, None, None, :]
        if bool(((new != seen) & real[:, None, :, None]).any()):
            raise ArgumentError("attention_mask", refused)
        if not bool(real.all()):
            self.kept.pad(real)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next queries see, and the position from which on transformers is to count them."""
        held = 0 if self.kept.positions is None else self.kept.positions.shape[-1]
        return held + query_length, self.seen - held

    def get_seq_length(self) -> int:
        """How many tokens there were, kept or not: the next one's position."""
        return self.seen

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False
        self.kept, self.seen = Kept(self.kept.policy), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was dropped does not come back."""
        if tokens_to_remove:
            raise ArgumentError("past_key_values", "is an EvictingCache, which cannot take tokens back")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these batch rows: the beams that live on."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each batch row several times."""
        if self.kept.k is not None:
            self.batch_select_indices(torch.arange(len(self.kept.k)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take these batch rows."""
        if self.kept.k is not None:
            self.kept.select(indices.to(self.kept.k.device))
            self.keys, self.values = self.kept.k, self.kept.v

    def offload(self) -> Never:
        """Refused: what is kept stays small, and where it is."""
        raise ArgumentError("past_key_values", "is an EvictingCache, which stays on its device")


class EvictingCache(Cache):
    """A cache for Hugging Face models that keeps the tokens that a policy of `clearhead.nn.eviction` chooses.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from clearhead.integrations.huggingface import register
    >>> from clearhead.nn.eviction import H2O
    >>> register()
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    ...     num_key_value_heads=1, vocab_size=11, attn_implementation="clearhead", eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> cache = EvictingCache(H2O(keep=8, recent=4), model.config)
    >>> tokens = model.generate(torch.ones(1, 20, dtype=torch.int64), past_key_values=cache, max_new_tokens=3,
    ...     do_sample=False)
    >>> tokens.shape, cache.positions[0].shape                          # one layer: (batch, key heads, keep)
    (torch.Size([1, 23]), torch.Size([1, 1, 8]))

    Rotary angles and other positions stay those of the whole text. Padding is dropped first. Layers of sliding windows
    keep their windows. The model's attention has to be clearhead's.
    """

    def __init__(self, policy: Policy, config: Any) -> None:
        check_policy(policy)
        if not hasattr(config, "get_text_config"):
            raise ArgumentError("config", f"is a {type(config).__name__}, expected the model's, model.config")
        layers = DynamicCache(config=config).layers
        if not layers:
            raise ArgumentError("config", "names no layers, expected that of a model that generates")
        plain = (DynamicLayer, SplitLayer)  # inside of parallel(mesh) it would be the other one
        super().__init__(layers=[EvictingLayer(policy) if type(one) in plain else one for one in layers])
        mine = [one for one in self.layers if isinstance(one, EvictingLayer)]
        for one in mine:
            one.beside = mine

    @property
    def positions(self) -> list[Tensor | None]:
        """The positions that each layer holds, (batch, key heads, slots), −1 for padding; None where it keeps all."""
        return [one.kept.positions if isinstance(one, EvictingLayer) else None for one in self.layers]
