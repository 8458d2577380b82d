"""Rotary positions on tensors: the same turn as `clearhead.rotary`, in steps that PyTorch compiles."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.core.errors import ArgumentError
from clearhead.core.positions import Rotary


class Turn(nn.Module):
    """Turns queries and keys (…, T, features) by the angles of their positions.

    >>> from clearhead import rotary
    >>> x = torch.randn(2, 3, 5, 8)
    >>> torch.allclose(Turn(rotary(), 8)(x, torch.arange(5)), rotary()(x), atol=1e-6)
    True
    """

    def __init__(self, rotary: Rotary, features: int) -> None:
        super().__init__()
        if not isinstance(rotary, Rotary):
            raise ArgumentError("positions", f"is {rotary!r}, expected rotary(…)")
        turning = features if rotary.dimension is None else rotary.dimension
        if turning > features or turning % 2:
            raise ArgumentError("positions", f"turn {turning} features in pairs, expected at most {features}, even")
        self.rotary, self.turning = rotary, turning
        self.magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
        self.interleaved = rotary.layout == "interleaved"
        # in float64 whatever the module is moved to: an angle of position 10⁵ has no digits to lose
        self.radians = tuple(np.asarray(rotary.frequencies(turning)).tolist())

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """`positions` is (T,) or (batch, T) for x (batch, heads, T, features)."""
        radians = torch.tensor(self.radians, dtype=torch.float64, device=positions.device)
        angles = positions.to(torch.float64)[..., None] * radians  # (…, T, turning / 2)
        if positions.ndim == 2:
            angles = angles[:, None]  # the same for each head
        precise = x if x.dtype == torch.float64 else x.to(torch.float32)
        cos = (self.magnitude * angles.cos()).to(precise)
        sin = (self.magnitude * angles.sin()).to(precise)
        rotated, rest = precise[..., : self.turning], precise[..., self.turning :]
        if self.interleaved:
            one, two = rotated[..., 0::2], rotated[..., 1::2]
            turned = torch.stack([one * cos - two * sin, two * cos + one * sin], dim=-1).flatten(-2)
        else:
            one, two = rotated.chunk(2, dim=-1)
            turned = torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)
        return torch.cat([turned, rest], dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        parts = [f"base={self.rotary.base:g}", f"features={self.turning}", f"layout={self.rotary.layout!r}"]
        return ", ".join(parts + ([] if self.rotary.scaling is None else [f"scaling={self.rotary.scaling}"]))
