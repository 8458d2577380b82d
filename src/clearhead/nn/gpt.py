"""GPT: a small decoder, complete enough to be trained and to generate."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.approximations.method import Method
from clearhead.core.errors import ArgumentError
from clearhead.core.positions import Bias, Rotary, rotary
from clearhead.nn.attend import size
from clearhead.nn.block import Activation, TransformerBlock
from clearhead.nn.cache import KVCache, all_or_nothing, whole
from clearhead.nn.cached import begun
from clearhead.nn.eviction import Policy
from clearhead.nn.places import query_places
from clearhead.nn.sinusoids import Sinusoids


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a `GPT`. `positions` is "learned", "sinusoidal", or what `MultiHeadAttention` takes.

    `method` is an approximation in place of attention, such as `performer(256)`, without dropout of the weights.
    Sinusoidal positions are added as in the Transformer paper, to embeddings times √width, and end at no `context`.

    >>> from clearhead import rotary
    >>> GPT(GPTConfig(vocabulary=65, layers=2, heads=4, kv_heads=2, width=32, positions=rotary())).config.context
    1024
    """

    vocabulary: int
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    kv_heads: int | None = None
    hidden: int | None = None
    activation: Activation = "gelu"
    positions: Rotary | Bias | str | None = field(default_factory=rotary)
    rms: bool = False
    bias: bool = True
    dropout: float = 0.0
    tied: bool = True
    qk_norm: bool = False
    window: int | None = None
    method: Method | None = None


class GPT(nn.Module):
    """Tokens in, the logits of the next token out.

    >>> model = GPT(GPTConfig(vocabulary=65, context=32, layers=2, heads=4, width=32))
    >>> model(torch.zeros(3, 10, dtype=torch.int64)).shape     # batch, positions, vocabulary
    torch.Size([3, 10, 65])
    >>> model.generate(torch.tensor([1, 2, 3]), 5, seed=0).shape
    torch.Size([8])
    """

    def __init__(self, config: GPTConfig, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.config = config
        made = {"device": device, "dtype": dtype}
        for name in ("vocabulary", "context", "layers", "heads", "width"):
            size(name, getattr(config, name))
        given = config.positions if isinstance(config.positions, str) else None
        added = given if given in ("learned", "sinusoidal") else None
        self.tokens = nn.Embedding(config.vocabulary, config.width, **made)
        self.places = nn.Embedding(config.context, config.width, **made) if added == "learned" else None
        self.sinusoids = Sinusoids(config.width) if added == "sinusoidal" else None
        self.blocks = nn.ModuleList(
            TransformerBlock(
                config.width,
                config.heads,
                kv_heads=config.kv_heads,
                hidden=config.hidden,
                activation=config.activation,
                rms=config.rms,
                bias=config.bias,
                dropout=config.dropout,
                attention_dropout=0.0 if config.method is not None else config.dropout,
                positions=config.positions if added is None else None,
                qk_norm=config.qk_norm,
                window=config.window,
                method=config.method,
                causal=True,
                **made,
            )
            for _ in range(config.layers)
        )
        self.norm: nn.Module = nn.RMSNorm(config.width, eps=1e-5, **made)
        if not config.rms:
            self.norm = nn.LayerNorm(config.width, bias=config.bias, **made)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False, **made)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As GPT-2: small weights, smaller where a layer adds to the stream, so that depth does not swell it."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2 or name.endswith("relative_table"):
                continue
            adds = name.endswith(("out_proj.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5 if adds else 0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def caches(
        self,
        max_length: int | None = None,
        *,
        window: int | None = None,
        sinks: int = 0,
        keep: Policy | None = None,
        mesh: Any = None,
    ) -> list[KVCache]:
        """An empty cache for each layer, of the kind that `KVCache` makes from the same arguments."""
        return [KVCache(max_length, window=window, sinks=sinks, keep=keep, mesh=mesh) for _ in self.blocks]

    @all_or_nothing
    def forward(self, tokens: Tensor, *, caches: list[KVCache] | None = None, lengths: Any = None) -> Tensor:
        """The logits (batch, T, vocabulary) after each of the tokens (batch, T); with caches, after those before too.

        `lengths` says how many tokens of each row are real; the rest is padding, at the end.
        """
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ArgumentError("tokens", f"has shape {tuple(tokens.shape)}, expected whole numbers (batch, positions)")
        if caches is not None and len(caches) != len(self.blocks):
            raise ArgumentError("caches", f"are {len(caches)}, expected one for each of {len(self.blocks)} layers")
        start = begun(None if caches is None else caches[0])
        x = self.tokens(tokens)
        if self.places is not None:
            end = max(start) + tokens.shape[1]
            if end > self.config.context:
                raise ArgumentError(
                    "tokens", f"come to {end} positions, expected at most context, {self.config.context}"
                )
            x = x + self.places(query_places(start, tokens.shape[1], tokens))
        if self.sinusoids is not None:
            # embeddings are drawn small; times √width they are of the size that sines have
            x = x * self.config.width**0.5 + self.sinusoids(query_places(start, tokens.shape[1], tokens), x)
        x = F.dropout(x, self.config.dropout, self.training)
        for place, block in enumerate(self.blocks):
            x = block(x, cache=None if caches is None else caches[place], lengths=lengths)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """How badly each next token is foretold, in nats, on average."""
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise ArgumentError("tokens", f"has shape {tuple(tokens.shape)}, expected (batch, at least 2 positions)")
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten().long())

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        new: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        stop: int | Collection[int] | None = None,
        lengths: Any = None,
        cache: bool | Callable[[], list[KVCache]] = True,
    ) -> Tensor:
        """The prompt (batch, T) or (T,), and up to `new` tokens more.

        - temperature: 0 takes the likeliest token each time. top_k: only among the k likeliest. top_p: only among the
          likeliest that together have this probability.
        - seed, or a generator: the same draws the same.
        - stop: a token, or several, at which a row ends; what follows in that row repeats it.
        - lengths: how long each prompt really is; each row goes on where its own prompt ends, in the place of padding.
          A row that ends before the longest one is filled up with its last token.
        - cache: False reads everything again for each token; a function makes caches of another kind.

        Dropout is left out while it generates.
        """
        check_sampling(temperature, top_k, top_p)
        flat = prompt.ndim == 1
        tokens = prompt[None] if flat else prompt
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            shape = f"shape {tuple(prompt.shape)} and dtype {prompt.dtype}"
            raise ArgumentError("prompt", f"has {shape}, expected whole numbers (batch, positions), at least one each")
        size("new", new, least=0)
        if seed is not None and generator is not None:
            raise ArgumentError("seed", "is given together with generator, expected one of them")
        if seed is not None:
            generator = torch.Generator(device=tokens.device).manual_seed(seed)
        given = [] if stop is None else whole("stop", stop)
        stops = {given} if isinstance(given, int) else set(given)
        ends = prompt_ends(lengths, *tokens.shape)
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            caches = None if cache is False else self.caches() if cache is True else cache()
            tokens = self._continued(
                tokens, ends, new, caches, stops, lambda logits: sample(logits, temperature, top_k, top_p, generator)
            )
        finally:
            for module, training in modes:
                module.training = training
        return tokens[0] if flat else tokens

    def _continued(
        self,
        tokens: Tensor,
        ends: list[int],
        new: int,
        caches: list[KVCache] | None,
        stops: set[int],
        choose: Callable[[Tensor], Tensor],
    ) -> Tensor:
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        end = torch.tensor(ends, device=tokens.device)
        room = tokens.new_zeros(tokens.shape[0], max(0, max(ends) + new - tokens.shape[1]))
        tokens = torch.cat([tokens, room], dim=1)
        done = torch.zeros_like(end, dtype=torch.bool)
        last = tokens[rows, end - 1]
        for step in range(new):
            if caches is None:
                longest = int(end.max())
                logits = self(tokens[:, :longest])[rows, end - 1]
            elif step == 0:
                longest = max(ends)
                logits = self(tokens[:, :longest], caches=caches, lengths=ends)[rows, end - 1]
            else:
                logits = self(last[:, None], caches=caches)[:, 0]
            drawn = choose(logits).to(tokens.dtype)
            last = torch.where(done, last, drawn)
            tokens[rows, end] = last
            end = end + 1
            if stops:
                done = done | torch.isin(last, torch.tensor(sorted(stops), device=last.device))
                if done.all():
                    break
        longest = int(end.max())
        after = torch.arange(longest, device=tokens.device) >= end[:, None]
        return torch.where(after, last[:, None], tokens[:, :longest])

    def extra_repr(self) -> str:
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


def prompt_ends(lengths: Any, rows: int, most: int) -> list[int]:
    """How long the prompt of each row is, checked."""
    ends = most if lengths is None else whole("lengths", lengths)
    ends = [ends] * rows if isinstance(ends, int) else ends
    if len(ends) != rows or not all(1 <= n <= most for n in ends):
        raise ArgumentError("lengths", f"is {ends}, expected {rows} numbers from 1 to {most}")
    return ends


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse what cannot be sampled by."""
    if not 0 <= temperature < math.inf:
        raise ArgumentError("temperature", f"is {temperature!r}, expected a finite number of at least 0")
    if top_k is not None:
        size("top_k", top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentError("top_p", f"is {top_p!r}, expected a number above 0 and up to 1")


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token for each row of logits (batch, vocabulary).

    >>> sample(torch.tensor([[0.0, 5.0, 1.0]]), temperature=0).tolist()
    [1]
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    ahead = logits - logits.amax(dim=-1, keepdim=True)  # so that a low temperature overflows to 0 and not to NaN
    weights = torch.softmax(ahead / temperature, dim=-1)
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = 0
    if top_p is not None:
        before = ordered.cumsum(dim=-1) - ordered  # of the likelier ones
        ordered = torch.where(before < top_p, ordered, 0)
    picked = torch.multinomial(ordered, 1, generator=generator)
    return order.gather(1, picked)[:, 0]
