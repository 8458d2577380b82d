"""Which heads settle what a word means: how much one word of a text attends to the word that tells its sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from clearhead.core.errors import ArgumentError, first_line
from clearhead.watching.seen import Seen
from clearhead.watching.words import merge_subwords, words_of


class Loaded(Protocol):
    """A model in evaluation mode, its tokenizer, and what it is called."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def model(self) -> Any:
        """The model."""

    @property
    def tokenizer(self) -> Any:
        """What makes tokens of a text, as transformers does."""


@dataclass(frozen=True, eq=False)
class Text:
    """A text as a model read it: its words, how rare each is, and what each head attended to, by word."""

    text: str
    words: tuple[str, ...]
    rarity: tuple[int, ...]
    special: tuple[bool, ...]
    layers: tuple[int, ...]
    weights: np.ndarray  # (layers, heads, words, words)

    def candidates(self) -> dict[str, int]:
        """Words that are no marks of the tokenizer, each with its first place."""
        places: dict[str, int] = {}
        for place, (word, special) in enumerate(zip(self.words, self.special, strict=True)):
            if not special and any(map(str.isalnum, word)):
                places.setdefault(word.lower(), place)
        return places

    def rarest(self, words: Sequence[str]) -> str:
        """The rarest of some words: a tokenizer numbers what it has learnt by how common it is."""
        places = self.candidates()
        return max(words, key=lambda word: self.rarity[places[word]])


class Look(NamedTuple):
    """How one word of a text attends to another: (layers, heads), and to all words (layers, heads, words)."""

    text: Text
    word: str
    settles: str
    weights: np.ndarray
    rows: np.ndarray


class Head(NamedTuple):
    """One head, and the weight that it gives in each text."""

    layer: int
    head: int
    weights: tuple[float, ...]


def watched(loaded: Loaded, text: str, want: dict[str, Any]) -> tuple[Seen, list[int]]:
    """Run a model over a text and see what is wanted; and the ids of its tokens."""
    import torch

    from clearhead.watching.opening import watch

    if not text.strip():
        raise ArgumentError("--text", "is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError("--text", "has bytes that are no UTF-8") from None
    tokenizer = loaded.tokenizer
    longest = min(tokenizer.model_max_length, getattr(loaded.model.config, "max_position_embeddings", None) or 10**6)
    given = tokenizer(text, return_tensors="pt", verbose=False)
    length = given["input_ids"].shape[1]
    if longest < length:
        raise ArgumentError("--text", f"has {length} tokens, and {loaded.name} reads {longest}: {text[:40]!r}…")
    known = {name: given[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in given}
    try:
        with torch.no_grad(), watch(loaded.model, want=want, tokens=tokenizer) as seen:
            loaded.model(**known)
    except Exception as error:  # one that reads pictures or sound, or has fewer tokens than its tokenizer
        raise ArgumentError("--model", f"{loaded.name} cannot read a text: {first_line(error)}") from None
    if not len(seen):
        why = next(iter(seen.missed.values()), "nothing attends in it")
        raise ArgumentError("--model", f"{loaded.name}: no attention could be seen: {why}")
    return seen, given["input_ids"][0].tolist()


def read(loaded: Loaded, text: str) -> tuple[Text, Seen]:
    """Run a model over a text, and keep what every head attended to, by word."""
    seen, ids = watched(loaded, text, {"weights": True, "received": True, "distance": True})
    tokenizer = loaded.tokenizer
    tokens = tokenizer.convert_ids_to_tokens(ids)
    weights = seen.matrix(heads="each", layers="each").weights
    groups = words_of(tokens)
    merged = merge_subwords(weights, tokens)
    marks = set(tokenizer.all_special_ids)
    return Text(
        text,
        merged.keys,
        tuple(max(ids[i] for i in group) for group in groups),
        tuple(all(ids[i] in marks for i in group) for group in groups),
        tuple(call.layer for call in seen),
        merged.weights,
    ), seen


def looks(texts: Sequence[Text], word: str | None = None, to: Sequence[str] = ()) -> list[Look]:
    """How a word that all texts have attends, in each, to the word that settles what it means.

    The word is the rarest that they share. What settles it is the rarest word that a text has to itself, or the one
    given for it in `to`.
    """
    if to and len(to) != len(texts):
        raise ArgumentError("--to", f"is given {len(to)} times, expected one for each of {len(texts)} texts")
    there = [text.candidates() for text in texts]
    shared = [one for one in there[0] if all(one in other for other in there[1:])]
    chosen = (word or "").lower()
    if word is None:
        if len(texts) == 1:
            raise ArgumentError(
                "--word", "is not given, and one text shares no word with another: say which word to look at"
            )
        if not shared:
            raise ArgumentError("--text", "have no word in common: say which word to look at by --word")
        chosen = texts[0].rarest(shared)
    missing = [text.text for text, places in zip(texts, there, strict=True) if chosen not in places]
    if missing:
        words = ", ".join(texts[0].candidates() if len(texts) == 1 else shared) or "none"
        raise ArgumentError("--word", f"is {word!r}, which {missing[0]!r} does not have; there is {words}")
    found = []
    for number, (text, places) in enumerate(zip(texts, there, strict=True)):
        own = [one for one in places if one != chosen and (len(texts) == 1 or one not in shared)]
        if to:
            settles = to[number].lower()
            if settles not in places:
                raise ArgumentError("--to", f"is {to[number]!r}, which {text.text!r} does not have")
        elif own:
            settles = text.rarest(own)
        else:
            lacks = "no other word" if len(texts) == 1 else "no word that the others do not have"
            raise ArgumentError("--text", f"{text.text!r} has {lacks}")
        rows = text.weights[:, :, places[chosen]]
        found.append(Look(text, chosen, settles, rows[..., places[settles]], rows))
    return found


def best_heads(found: Sequence[Look], count: int) -> list[Head]:
    """The heads that give most to the word that settles it, over all texts."""
    weights = np.stack([look.weights for look in found])  # (texts, layers, heads)
    order = np.argsort(-weights.mean(0), axis=None, kind="stable")[:count]
    layers = found[0].text.layers
    chosen = []
    for place in order.tolist():
        layer, head = divmod(place, weights.shape[-1])
        chosen.append(Head(layers[layer], head, tuple(float(w) for w in weights[:, layer, head])))
    return chosen
