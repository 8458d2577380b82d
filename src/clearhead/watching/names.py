"""What positions are called while a model runs: tokens as given, or by a tokenizer from the ids the model is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.core.errors import ArgumentError

Names = tuple[str, ...]
IDS = ("input_ids", "decoder_input_ids")


class Tokens:
    """The tokens of every step. With a list, those; with a tokenizer, the ids of each step, one after the other."""

    def __init__(self, given: Any) -> None:
        self.fixed: tuple[Names, ...] | None = None
        self.tokenizer: Any = None
        self.ids: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in IDS}
        self.known: dict[tuple[Any, ...], tuple[Names, ...] | None] = {}  # layers of a step share their names
        if given is None:
            return
        if hasattr(given, "convert_ids_to_tokens"):
            self.tokenizer = given
            return
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ArgumentError("tokens", f"is a {type(given).__name__}, expected a list of tokens, or a tokenizer")
        if not given:
            raise ArgumentError("tokens", "is empty, expected a list of tokens, or a tokenizer")
        rows = given if isinstance(given[0], list | tuple) else [given]
        self.fixed = tuple(tuple(map(str, row)) for row in rows)
        lengths = sorted({len(row) for row in self.fixed})
        if len(lengths) > 1:
            raise ArgumentError("tokens", f"has rows of {lengths[0]} and of {lengths[-1]} tokens, expected one length")

    @property
    def known_of(self) -> bool:
        """Were any given?"""
        return self.fixed is not None or self.tokenizer is not None

    def begin(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool = True) -> None:
        """The model, or a part of it by itself, is called: remember the ids that it is given."""
        if self.tokenizer is None:
            return
        given = {name: kwargs.get(name) for name in IDS}
        if whole and given["input_ids"] is None and args:
            given["input_ids"] = args[0]
        for name, ids in given.items():
            if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point() and ids.dtype != torch.bool:
                self.ids[name].append((step, ids.detach().cpu()))
        self.known = {}

    def of(
        self, name: str, step: int, batch: int, queries: int, keys: int, *, crossing: bool
    ) -> tuple[tuple[Names, ...] | None, ...]:
        """What queries and keys of a call are called; None where their number fits no tokens that are known."""
        if self.fixed is not None:
            fits = len(self.fixed) in (1, batch)
            return tuple(self.fixed if fits and len(self.fixed[0]) == count else None for count in (queries, keys))
        if self.tokenizer is None:
            return None, None
        apart = bool(self.ids["decoder_input_ids"])
        decoding = apart and (name.startswith("decoder") or ".decoder." in name)
        kind = IDS[1] if decoding else IDS[0]
        named = self._named(kind, step, queries, self._latest)
        if crossing:  # to the other sequence, which a decoder has read at its first step
            return named, self._named(IDS[0], step, keys, self._read) if decoding else None
        return named, self._named(kind, step, keys, self._cached)

    def _named(
        self, kind: str, step: int, count: int, find: Callable[[list[tuple[int, Tensor]], int, int], Tensor | None]
    ) -> tuple[Names, ...] | None:
        key = (kind, step, count, find.__name__)
        if key not in self.known:
            ids = find([entry for entry in self.ids[kind] if entry[0] <= step], step, count)
            rows = None if ids is None else ids.tolist()
            self.known[key] = (
                None if rows is None else tuple(tuple(self.tokenizer.convert_ids_to_tokens(row)) for row in rows)
            )
        return self.known[key]

    @staticmethod
    def _latest(past: list[tuple[int, Tensor]], step: int, count: int) -> Tensor | None:
        """The last positions of what a step was given."""
        if not past or past[-1][0] != step or past[-1][1].shape[1] < count:
            return None
        return past[-1][1][:, past[-1][1].shape[1] - count :]

    @staticmethod
    def _cached(past: list[tuple[int, Tensor]], step: int, count: int) -> Tensor | None:
        """What a step was given, after as many of the steps before it as a cache holds."""
        if not past or past[-1][0] != step:
            return None
        parts: list[Tensor] = []
        for _, ids in reversed(past):
            if parts and ids.shape[0] != parts[0].shape[0]:
                return None
            parts.insert(0, ids)
            total = sum(part.shape[1] for part in parts)
            if total >= count:
                return torch.cat(parts, dim=1) if total == count else None
        return None

    @staticmethod
    def _read(past: list[tuple[int, Tensor]], step: int, count: int) -> Tensor | None:
        """The latest sequence of this length."""
        return next((ids for _, ids in reversed(past) if ids.shape[1] == count), None)
