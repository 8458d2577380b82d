"""Sinusoidal positions on tensors: the same numbers as `clearhead.sinusoidal`, for positions as they come."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.core.errors import ArgumentError


class Sinusoids(nn.Module):
    """The Transformer paper's position encodings: even features sine, odd cosine. It has no parameters.

    >>> from clearhead import sinusoidal
    >>> x = torch.zeros(2, 5, 8)
    >>> torch.allclose(Sinusoids(8)(torch.arange(5), x), torch.tensor(sinusoidal(5, 8)).float())
    True
    """

    def __init__(self, features: int, base: float = 10000.0) -> None:
        super().__init__()
        if features % 2:
            raise ArgumentError("positions", f"are sinusoidal over {features} features, expected an even number")
        self.features, self.base = features, base

    def forward(self, positions: Tensor, like: Tensor) -> Tensor:
        """`positions` is (T,) or (batch, T); the result (…, T, features) is of the dtype of `like`."""
        # in float64 whatever the module is moved to: an angle of position 10⁵ has no digits to lose
        pairs = torch.arange(0, self.features, 2, dtype=torch.float64, device=positions.device)
        angles = positions.to(torch.float64)[..., None] * self.base ** (-pairs / self.features)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(like.dtype)

    def extra_repr(self) -> str:
        return f"{self.features}" + (f", base={self.base:g}" if self.base != 10000.0 else "")
