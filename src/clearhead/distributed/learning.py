"""Gradients of a bias that is learned, tile by tile: the gradients of scores, handed to PyTorch for the bias's own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.core.positions import Added, Bias, Relative
from clearhead.distributed.pieces import Work
from clearhead.kernels.tally import Ended


class LearnedBias:
    """The gradient of a bias's array or table, from the queries of this rank."""

    def __init__(self, bias: Bias, dtype: torch.dtype) -> None:
        assert isinstance(bias, Added | Relative)
        self.leaf = bias.parameter.detach().to(dtype).requires_grad_()
        self.bias = replace(bias, **{"array" if isinstance(bias, Added) else "table": self.leaf})
        self.gradient = torch.zeros_like(self.leaf, requires_grad=False)

    def see(self, work: Work, columns: range, k: Tensor, v: Tensor, dout: Tensor, ended: Ended, spread: Tensor) -> None:
        """Some keys: dscore = weight · (dweight − spread)."""
        dead = (ended.lse == -torch.inf)[..., None]
        dout = torch.where(dead, 0.0, dout.to(work.dtype))
        for seen in work.tiles(columns, k, v, ended):
            slab = seen.slab
            given = slab.cut(dout[..., seen.lies, :])
            given = given if seen.tile.asked is None else torch.where(seen.tile.asked, given, 0.0)
            dweights = slab.dropped(given @ seen.tile.v.mT, seen.rows, seen.columns)
            dscores = seen.weights * (dweights - slab.cut(spread[..., seen.lies, None]))
            if seen.tile.mask is not None:
                dscores = torch.where(seen.tile.mask, dscores, 0.0)
            flat = dscores.reshape(*work.lead, len(seen.rows), len(seen.columns))
            with torch.enable_grad():
                tile = self.bias.tile(seen.queries, seen.keys, work.whole.grid)
                if tile.ndim >= 3 and tile.shape[-3] != 1:
                    tile = tile[..., work.whole.heads.start : work.whole.heads.stop, :, :]
                (gradient,) = torch.autograd.grad((tile * flat).sum(), self.leaf)
            self.gradient += gradient
