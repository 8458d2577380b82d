"""contributions(): what each head adds to a logit by itself, along the residual stream and through nothing else.

A head gives x_h, the out projection makes W_h x_h of it, which is added to the residual stream, normed at the end and
multiplied with the token's row u of the unembedding. With the norm's scale r as it was in the run all that is linear:

    contribution = u · (γ r (W_h x_h − mean))        the mean only where the norm is a LayerNorm

That holds where projections are added to the stream as they are, and the stream is normed once, at the end. Whether it
does is seen by following tensors through the run; where it does not, it is said which layer is otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

try:
    import torch
    from torch import Tensor, nn
except ImportError:
    from clearhead.core.installing import brings

    raise ImportError(f"contributions needs PyTorch: {brings('torch')}") from None

from clearhead.core.errors import ArgumentError
from clearhead.watching.opening import watch
from clearhead.watching.residual import Stream
from clearhead.watching.tables import columns, plain

SHOWN = 12


@dataclass(frozen=True)
class Contribution:
    """What one head of one module adds to the logit."""

    name: str
    layer: int
    head: int
    logit: float


@dataclass(frozen=True)
class Contributions:
    """One line for each head; `logit` is the whole, and `rest` what did not come from a head directly."""

    lines: tuple[Contribution, ...]
    logit: float

    @property
    def rest(self) -> float:
        """What embeddings, feed-forward parts and biases add, and heads through later layers."""
        return self.logit - math.fsum(line.logit for line in self.lines)

    def best(self, count: int = SHOWN) -> list[Contribution]:
        """The heads that add or take away most, the most first."""
        return sorted(self.lines, key=lambda line: -abs(line.logit))[:count]

    def rows(self) -> list[dict[str, Any]]:
        """The contributions as a list of dicts."""
        return [dict(vars(line)) for line in self.lines]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        table = columns("layer", "head", "adds")
        for line in self.best():
            table.add_row(str(line.layer), str(line.head), f"{line.logit:+.4f}")
        yield table
        heads = "all" if len(self.lines) <= SHOWN else f"{SHOWN} of {len(self.lines)}"
        yield Text(f"logit {self.logit:.4f}, of which {self.rest:+.4f} is not from heads directly; {heads} heads shown")

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__


class _Heads(watch):
    """A watch that tells a stream of what heads give."""

    def __init__(self, model: nn.Module, stream: Stream) -> None:
        super().__init__(model, want={})
        self.stream = stream
        self.recorder.edit = self._tell

    def _tell(self, output: Tensor) -> Tensor:
        name = self.recorder.running
        self.stream.attended(name, self.recorder.number(name), output)
        return output


def contributions(
    model: nn.Module,
    *args: Any,
    token: SupportsIndex | Sequence[SupportsIndex],
    position: int = -1,
    batch: int = 0,
    unembedding: nn.Module | None = None,
    **kwargs: Any,
) -> Contributions:
    """Run a model once, and say what each head adds directly to the logit of a token at a position.

    >>> import torch, clearhead as ch
    >>> model = ch.nn.GPT(ch.nn.GPTConfig(vocabulary=9, width=16, heads=2, layers=2, context=8)).eval()
    >>> found = ch.contributions(model, torch.tensor([[3, 1, 4]]), token=5)
    >>> [(line.layer, line.head) for line in found.lines]
    [(0, 0), (0, 1), (1, 0), (1, 1)]

    `token` is the number of a token, or two, whose difference is looked at. `unembedding` is the last linear layer;
    Hugging Face models say theirs, and of others it is the last linear layer that runs. The logit is what it gives,
    before a model caps or scales it. All other arguments are the model's own.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", f"is a {type(model).__name__}, expected a torch.nn.Module")
    last = unembedding if unembedding is not None else _said(model)
    stream = Stream(model, last)
    # what is written over is told by a count that inference mode does not keep
    with torch.inference_mode(False), torch.no_grad(), stream, _Heads(model, stream):
        model(*args, **kwargs)
        end = stream.end()
    count = len(end.weight)
    tokens = _numbers(token)
    if not 1 <= len(tokens) <= 2 or not all(0 <= one < count for one in tokens):
        raise ArgumentError("token", f"is {token!r}, expected a number below {count}, or two")
    rows, length = end.given.shape[0], end.given.shape[1]
    if isinstance(position, bool) or not isinstance(position, int) or not -length <= position < length:
        raise ArgumentError("position", f"is {position!r}, expected {-length} to {length - 1}")
    if isinstance(batch, bool) or not isinstance(batch, int) or not 0 <= batch < rows:
        raise ArgumentError("batch", f"is {batch!r}, expected 0 to {rows - 1}")
    place = batch, position % length
    weight = end.weight.detach()
    row = weight[tokens[0]].double() - (weight[tokens[1]].double() if len(tokens) > 1 else 0.0)
    linear = end.norm.at(end.given[place].double())
    lines = [
        Contribution(one.name, one.layer, head, float(row @ linear(part)))
        for one in stream.projections()
        for head, part in enumerate(one.parts(place))
    ]
    logits = end.logits[place].double()
    logit = float(logits[tokens[0]] - (logits[tokens[1]] if len(tokens) > 1 else 0.0))
    return Contributions(tuple(lines), logit)


def _said(model: nn.Module) -> nn.Module | None:
    ask = getattr(model, "get_output_embeddings", None)
    return ask() if callable(ask) else None


def _numbers(token: Any) -> list[int]:
    """One number or several, of Python's, NumPy's or PyTorch's; none where any is no whole number."""
    plain = token.tolist() if isinstance(token, Tensor | np.ndarray | np.generic) else token
    given = [*plain] if isinstance(plain, list | tuple) else [plain]
    given = [one.item() if isinstance(one, Tensor | np.generic) and one.ndim == 0 else one for one in given]
    return given if all(isinstance(one, int) and not isinstance(one, bool) for one in given) else []
