"""What positions are called while a model runs: tokens as given, or by a tokenizer from the ids the model is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ArgumentError

Names = tuple[str, ...]
IDS = ("input_ids", "decoder_input_ids")


class Tokens:
    """The tokens of every step. With a list, those; with a tokenizer, the ids of each step, one after the other."""

    def __init__(self, given: Any) -> None:
        self.fixed: tuple[Names, ...] | None = None
        self.tokenizer: Any = None
        self.ids: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in IDS}
        if given is None:
            return
        if hasattr(given, "convert_ids_to_tokens"):
            self.tokenizer = given
            return
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ArgumentError("tokens", f"is a {type(given).__name__}, expected a list of tokens, or a tokenizer")
        rows = given if isinstance(given[0], list | tuple) else [given]
        self.fixed = tuple(tuple(map(str, row)) for row in rows)

    def begin(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: remember the ids that it is given."""
        if self.tokenizer is None:
            return
        given = {name: kwargs.get(name) for name in IDS}
        if given["input_ids"] is None and args:
            given["input_ids"] = args[0]
        for name, ids in given.items():
            if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point() and ids.dtype != torch.bool:
                self.ids[name].append((step, ids.detach().cpu()))

    def of(self, name: str, step: int, queries: int, keys: int) -> tuple[tuple[Names, ...] | None, ...]:
        """What queries and keys of a call are called; None where their number fits no tokens that are known."""
        if self.fixed is not None:
            return tuple(self.fixed if len(self.fixed[0]) == count else None for count in (queries, keys))
        if self.tokenizer is None:
            return None, None
        decoding = name.startswith("decoder") or ".decoder." in name
        kinds = IDS[::-1] if decoding and self.ids["decoder_input_ids"] else IDS
        return self._named(kinds, step, queries, last=True), self._named(kinds, step, keys, last=False)

    def _named(self, kinds: tuple[str, ...], step: int, count: int, *, last: bool) -> tuple[Names, ...] | None:
        for kind in kinds:
            past = [ids for at, ids in self.ids[kind] if at <= step]
            whole = torch.cat(past, dim=1) if past and len({ids.shape[0] for ids in past}) == 1 else None
            if whole is None:
                continue
            if last and count <= whole.shape[1]:
                whole = whole[:, whole.shape[1] - count :]
            if whole.shape[1] == count:
                return tuple(tuple(self.tokenizer.convert_ids_to_tokens(row.tolist())) for row in whole)
        return None
