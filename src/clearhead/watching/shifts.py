"""What context does to a word in a trained model: its vector before any attention, and after each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clearhead.core.arrays import to_numpy
from clearhead.core.errors import ArgumentError, first_line
from clearhead.watching.meaning import Loaded
from clearhead.watching.words import spelled, words_of


class Shift(NamedTuple):
    """A word's vector by itself (D,), and for each text its vectors (layers, D) after every layer."""

    word: str
    texts: tuple[str, ...]
    static: np.ndarray
    paths: tuple[np.ndarray, ...]


def shift_of(loaded: Loaded, texts: Sequence[str], word: str) -> Shift:
    """Follow a word through a model's layers, in each of some texts; `plot_shift` draws where it goes.

    By itself it is what enters the first layer, the mean over the texts where it stands at different places: no other
    word has been looked at yet. A word of several tokens is their mean; of several occurrences the first counts.
    """
    import torch

    static, paths = [], []
    for text in texts:
        given = loaded.tokenizer(text, return_tensors="pt", verbose=False)
        known = {name: given[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in given}
        tokens = loaded.tokenizer.convert_ids_to_tokens(given["input_ids"][0].tolist())
        found = [group for group in words_of(tokens) if spelled(tokens, group).lower().lstrip("▁") == word.lower()]
        if not found:
            raise ArgumentError("word", f"is {word!r}, which {text!r} does not have")
        try:
            with torch.no_grad():
                states = loaded.model(**known, output_hidden_states=True).hidden_states
        except Exception as error:  # one that reads pictures or sound, or more tokens than it knows places
            raise ArgumentError("model", f"{loaded.name} cannot read a text: {first_line(error)}") from None
        if states is None:
            raise ArgumentError("model", f"{loaded.name} does not give its hidden states")
        path = np.stack([to_numpy(state[0].float())[found[0]].mean(0) for state in states])  # (1 + layers, D)
        static.append(path[0])
        paths.append(path[1:])
    return Shift(word, tuple(texts), np.mean(static, axis=0), tuple(paths))
