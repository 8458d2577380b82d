"""Small PyTorch models as people write them, and what a watched one is held to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from budget import Expected, check
from torch import Tensor, nn

import clearhead as ch


class CausalSelfAttention(nn.Module):
    """As nanoGPT has it."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A plain nanoGPT."""

    def __init__(self, layers: int = 3, width: int = 24, heads: int = 3, vocabulary: int = 31, dropout: float = 0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.h = nn.ModuleList([GptBlock(width, heads, dropout) for _ in range(layers)])
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class VitAttention(nn.Module):
    """As timm has it."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Vit(nn.Module):
    """A vision transformer over patches."""

    def __init__(self, dim: int = 20, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(nn.ModuleDict({"norm1": nn.LayerNorm(dim), "attn": VitAttention(dim, heads)}))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = x + block["attn"](block["norm1"](x))
        return x


def ids(batch: int = 2, length: int = 13, vocabulary: int = 31) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def doubled(value: Any) -> Any:
    """Arguments in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return value


def held(got: Tensor, plain: Tensor, exact: Tensor, keys: int, what: str) -> None:
    """A watched result against the unwatched one and the one in float64, by the error budget."""
    eps = torch.finfo(got.dtype).eps
    as_numpy = [t.detach().double().numpy() for t in (got, plain, exact)]
    check(as_numpy[0], Expected(as_numpy[2], as_numpy[1], eps), keys, what)


def watched(
    model: nn.Module, *args: Any, keys: int, of: Callable[[Any], Tensor] = lambda output: output, **kwargs: Any
) -> ch.Seen:
    """Run a model unwatched, in float64 and watched; hold the last to the others, and give what was seen.

    `kwargs` that start with watch_ go to watch.
    """
    options = {name.removeprefix("watch_"): kwargs.pop(name) for name in list(kwargs) if name.startswith("watch_")}
    plain = of(model(*args, **kwargs))
    precise = copy.deepcopy(model).double()
    exact = of(precise(*map(doubled, args), **{name: doubled(value) for name, value in kwargs.items()}))
    with ch.watch(model, **options) as seen:
        got = of(model(*args, **kwargs))
    held(got, plain, exact, keys, type(model).__name__)
    return seen


def left_behind(model: nn.Module) -> list[str]:
    """What a closed watch may not leave: hooks, a mode, a stance of the compiler."""
    found = []
    for name, module in model.named_modules():
        hooks = [key for key, value in vars(module).items() if "hooks" in key and value and key != "_non_persistent"]
        found += [f"{name}: {key}" for key in hooks]
    if torch._C._len_torch_function_stack():
        found.append("a mode")
    import sys

    if "torch._dynamo" in sys.modules and sys.modules["torch._dynamo"].eval_frame._stance.stance != "default":
        found.append("a stance")
    return found
