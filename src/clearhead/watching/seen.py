"""What was seen of a model, and all that can be read from it. It needs no PyTorch to be looked at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from clearhead.watching.difference import Difference, difference
from clearhead.watching.files import load, save
from clearhead.watching.flow import flow
from clearhead.watching.frames import to_pandas
from clearhead.watching.page import page
from clearhead.watching.record import Record
from clearhead.watching.rollout import rollout
from clearhead.watching.scores import Scores, duplicate_token, first_token, induction, previous_token
from clearhead.watching.summary import Summary, summary
from clearhead.watching.words import Matrix, matrix

if TYPE_CHECKING:
    import pandas


class Seen(Record):
    """What `watch` saw: calls in the order they were made.

    `seen[0]` is the first call, `seen["encoder.layer.3.attention.self"]` the call of that module. `seen.layer(3)`,
    `seen.step(0)` and `seen.named("decoder.*")` are the calls of a layer, of a step and of some modules, as another
    `Seen`. `missed` says by name what attends and could not be seen, and why.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
    >>> with ch.watch(model) as seen:
    ...     output = model(torch.zeros(1, 7, 16))
    >>> len(seen), seen[0].name, len(seen.layer(2)), seen.missed
    (3, 'layers.0.self_attn', 1, {})
    """

    def summary(self) -> Summary:
        """Entropy, share on the first token, mean distance and largest logit, by layer and head, as a table."""
        return summary(self)

    def matrix(
        self, *, heads: str | int = "mean", layers: str | int = "mean", batch: int = 0, words: bool = False
    ) -> Matrix:
        """The weights of one sequence as one array with names: heads and layers each, averaged, or the largest."""
        return matrix(self, heads=heads, layers=layers, batch=batch, words=words)

    def induction(self, tokens: Any = None) -> Scores:
        """How much each head looks at what came after the same token earlier; `tokens` where none were watched with.

        >>> import torch, clearhead as ch
        >>> model = ch.nn.GPT(ch.nn.GPTConfig(vocabulary=9, width=16, heads=2, layers=2, context=8)).eval()
        >>> with ch.watch(model, want={"keep": True}) as seen:
        ...     output = model(torch.tensor([[3, 1, 4, 3, 1, 4]]))
        >>> seen.induction(tokens=[3, 1, 4, 3, 1, 4]).array.shape
        (2, 2)
        """
        return induction(self, tokens)

    def previous_token(self) -> Scores:
        """How much each head looks at the token before."""
        return previous_token(self)

    def duplicate_token(self, tokens: Any = None) -> Scores:
        """How much each head looks at earlier tokens that are the same; `tokens` where none were watched with."""
        return duplicate_token(self, tokens)

    def first_token(self) -> Scores:
        """How much each head looks at the first token."""
        return first_token(self)

    def rollout(self, query: int | Sequence[int] | None = None, *, residual: float = 0.5) -> np.ndarray:
        """Attention followed through all layers down to the input, (…, queries, positions); Abnar and Zuidema 2020."""
        return rollout(self, query, residual=residual)

    def flow(self, query: int, *, batch: int = 0, residual: float = 0.5) -> np.ndarray:
        """The largest flow from a query to each input through all layers, (positions,); Abnar and Zuidema 2020."""
        return flow(self, query, batch=batch, residual=residual)

    def __sub__(self, other: Record) -> Difference:
        """What each head does otherwise than on another prompt; see `difference`."""
        if not isinstance(other, Record):
            return NotImplemented
        return difference(self, other)

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas table with a row for each query of each head, batch row and call."""
        return to_pandas(self)

    def html(self, *, batch: int = 0, title: str = "What a model attended to") -> str:
        """All layers and heads as one self-contained HTML file, to be opened without a network."""
        return page(self, batch=batch, title=title)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one .safetensors file, of which the header says in JSON what belongs to what."""
        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """What `save` wrote, in NumPy arrays."""
        return load(path, cls)
