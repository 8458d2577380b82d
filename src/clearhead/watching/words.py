"""Tokens back to words, and many heads and layers to one: reductions of weights that say what they reduce."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clearhead.core.arrays import Array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.explain.tokens import names_for
from clearhead.watching.call import of_batch
from clearhead.watching.record import Record

# how tokenizers mark a token that goes on with the word before it, or one that starts a word
GOES_ON = "##"  # WordPiece
STARTS = ("Ġ", "▁", "Ċ")  # byte-level BPE: a space, a new line; SentencePiece: a space


class Matrix(NamedTuple):
    """Weights (…, queries, keys) and what the queries and keys are called."""

    weights: np.ndarray
    queries: tuple[str, ...]
    keys: tuple[str, ...]


def words_of(tokens: Sequence[str]) -> list[list[int]]:
    """The positions that make up each word, by the marks of the tokenizer; tokens without any stay as they are.

    >>> words_of(["[CLS]", "un", "##believ", "##able", "!"])
    [[0], [1, 2, 3], [4]]
    >>> words_of(["The", "Ġbank", "rupt", "Ġfirm"]), words_of(["▁bank", "rupt", "▁firm", "</s>"])
    ([[0], [1, 2], [3]], [[0, 1], [2], [3]])

    Punctuation stands alone, as WordPiece has it, also where a mark of its own is missing: `bank` and `,` are two.
    """
    marked = any(token.startswith(STARTS) for token in tokens)
    groups: list[list[int]] = []
    for place, token in enumerate(tokens):
        if marked:
            goes_on = place > 0 and not (token.startswith(STARTS) or _apart(token) or _apart(tokens[place - 1]))
        else:
            goes_on = token.startswith(GOES_ON) and len(token) > len(GOES_ON) and place > 0
        if goes_on:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _apart(token: str) -> bool:
    """Is a token no part of a word: a mark of the tokenizer, a new line, or punctuation?"""
    bare = token.lstrip("".join(STARTS))
    return _special(token) or token.startswith("Ċ") or bool(bare and all(map(string.punctuation.__contains__, bare)))


def _special(token: str) -> bool:
    return len(token) > 2 and (token[0], token[-1]) in (("<", ">"), ("[", "]"))


def spelled(tokens: Sequence[str], group: list[int]) -> str:
    """A word without the tokenizer's marks."""
    word = "".join(tokens[i].removeprefix(GOES_ON) if i != group[0] else tokens[i] for i in group)
    bare = word.lstrip("".join(STARTS[:2]))
    return bare or word


def merge_subwords(weights: Array, tokens: Sequence[str], *, query_tokens: Sequence[str] | None = None) -> Matrix:
    """Weights of tokens as weights of words: summed over the keys of a word, averaged over its queries.

    >>> import numpy as np
    >>> merged = merge_subwords(np.full((3, 3), 1 / 3), ["the", "token", "##izer"])
    >>> merged.keys, merged.weights.round(2).tolist()
    (('the', 'tokenizer'), [[0.33, 0.67], [0.33, 0.67]])

    A word attends to another with the mean of what its pieces give all pieces of the other, so that rows still sum to
    one. Pieces are known by their marks: `##` of WordPiece, `Ġ` of byte-level BPE, `▁` of SentencePiece.
    """
    array = to_numpy(weights)
    keys = names_for("tokens", tokens, array.shape[-1], "keys")
    if query_tokens is None and array.shape[-2] != array.shape[-1]:
        raise ArgumentError(
            "query_tokens", f"is not given, and there are {array.shape[-2]} queries for {len(keys)} keys"
        )
    queries = keys if query_tokens is None else names_for("query_tokens", query_tokens, array.shape[-2], "queries")
    across, down = words_of(keys), words_of(queries)
    array = np.stack([array[..., group].sum(-1) for group in across], axis=-1)
    array = np.stack([array[..., group, :].mean(-2) for group in down], axis=-2)
    return Matrix(
        array, tuple(spelled(queries, group) for group in down), tuple(spelled(keys, group) for group in across)
    )


def matrix(seen: Record, *, heads: str | int, layers: str | int, batch: int, words: bool) -> Matrix:
    """The weights of one sequence over heads and layers.

    `heads` and `layers` are "each", which keeps the axis, "mean", "max", or a number.
    """
    if not len(seen):
        raise ArgumentError("seen", "has no calls")
    first = seen[0]
    if any(call.shape[-2:] != first.shape[-2:] for call in seen):
        raise ArgumentError("seen", "has calls of different lengths: choose a step(), a layer() or some by named()")
    if len({call.step for call in seen}) > 1:
        raise ArgumentError("seen", "has more than one step: choose one by step()")
    if isinstance(layers, int):
        seen = seen.layer(layers)
        layers = "mean"
    stacked = []
    for call in seen:
        rows = of_batch(call.rows(range(call.shape[-2])), batch)
        stacked.append(_reduced("heads", rows, heads))
    if layers == "each" or heads == "each":
        if len({one.shape for one in stacked}) > 1:
            raise ArgumentError("heads", "cannot be 'each' where layers have different numbers of heads")
    whole = _reduced("layers", np.stack(stacked), layers)
    keys = None if first.keys_named is None else first.keys_named[batch % len(first.keys_named)]
    queries = None if first.queries_named is None else first.queries_named[batch % len(first.queries_named)]
    if words:
        if keys is None or queries is None:
            raise ArgumentError("words", "needs tokens: watch(model, tokens=…) takes a list or a tokenizer")
        return merge_subwords(whole, keys, query_tokens=queries)
    shape = whole.shape
    return Matrix(
        whole, names_for("tokens", queries, shape[-2], "queries"), names_for("tokens", keys, shape[-1], "keys")
    )


def _reduced(argument: str, array: np.ndarray, how: str | int) -> np.ndarray:
    if how == "each":
        return array
    if how == "mean":
        return array.mean(0)
    if how == "max":
        return array.max(0)
    if isinstance(how, int) and not isinstance(how, bool) and -len(array) <= how < len(array):
        return array[how]
    raise ArgumentError(argument, f"is {how!r}, expected 'each', 'mean', 'max' or a number below {len(array)}")
