"""How a mask may be handed over: by which parameter, meaning what, in which shape; and what its name or words say."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# What a mask may be handed over as; True and 1 mean "may attend" or "hide", additive masks are added to the scores
ENCODINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "attend": lambda allowed: allowed,
    "hide": lambda allowed: ~allowed,
    # a bias of any numbers is handed over as it is
    "additive": lambda allowed: allowed if allowed.dtype.kind == "f" else np.where(allowed, 0.0, -np.inf),
    "additive -1e9": lambda allowed: np.where(allowed, 0.0, -1e9),
    "attend 1/0": lambda allowed: allowed.astype(np.int64),
    "hide 1/0": lambda allowed: (~allowed).astype(np.int64),
    "attend 1.0/0.0": lambda allowed: allowed.astype(np.float64),
    "hide 1.0/0.0": lambda allowed: (~allowed).astype(np.float64),
    "lengths": lambda allowed: allowed.sum(-1),
}
MEANINGS = {
    "attend": "True means may attend",
    "hide": "True hides a key, as in torch.nn.MultiheadAttention; PyTorch's function, JAX and clearhead mean the"
    " opposite",
    "additive": "added to the scores, −inf where hidden",
    "additive -1e9": "added to the scores, −1e9 where hidden",
    "attend 1/0": "1 means may attend, 0 hides",
    "hide 1/0": "1 hides a key, 0 shows it",
    "attend 1.0/0.0": "1.0 means may attend, 0.0 hides",
    "hide 1.0/0.0": "1.0 hides a key, 0.0 shows it",
    "lengths": "how many keys of each batch row are real",
}
# Names of parameters that say how many keys of each row are real
LENGTHS = re.compile(
    r"^(?:(?:valid|seq|sequence|key|kv|k|src|source|memory)_?)?(?:lens|lengths)$|^valid_len$", re.IGNORECASE
)
SHAPES = ("TS", "B1TS", "BTS", "BHTS", "B11S", "BS", "B1S")


@dataclass(frozen=True)
class MaskWay:
    """How a mask is handed over: by which parameter, meaning what, in which shape."""

    parameter: str
    encoding: str
    shape: str

    def build(self, allowed: np.ndarray, heads: int) -> np.ndarray:
        """The array for (B, 1, T, S), True where a query may attend."""
        shaped = {
            "TS": allowed[0, 0],
            "B1TS": allowed,
            "BTS": allowed[:, 0],
            "BHTS": np.broadcast_to(allowed, (allowed.shape[0], heads, *allowed.shape[2:])),
            "B11S": allowed[:, :, :1],
            "BS": allowed[:, 0, 0],
            "B1S": allowed[:, 0, :1],
            "B": allowed[:, 0, 0],
        }[self.shape]
        return ENCODINGS[self.encoding](np.ascontiguousarray(shaped))

    @property
    def only_keys(self) -> bool:
        """True where the mask has no axis for queries: padding."""
        return self.shape in ("BS", "B11S", "B1S", "B")

    @property
    def by_batch(self) -> bool:
        """True where batch rows may have different masks."""
        return self.shape != "TS"

    @property
    def polarity(self) -> str:
        """What a mask's True or 1 means: attend or hide; additive where it is added."""
        return self.encoding.split()[0]

    @property
    def words(self) -> str:
        """The convention in words."""
        axes = {"T": "queries", "S": "keys", "B": "batch", "H": "heads", "1": "1"}
        shape = ", ".join(axes[letter] for letter in self.shape)
        return f"{self.parameter}: {MEANINGS[self.encoding]}; shape ({shape})"


def stated_polarity(documentation: str, parameter: str) -> str | None:
    """Whether a mask's name or the documentation says that True attends or hides; None where neither says."""
    name = parameter.lower()
    if name == "key_padding_mask" or re.search(r"hid|ignor|block|exclud", name):
        return "hide"
    if re.search(r"attend|allow|valid|keep|visib", name):
        return "attend"
    words = " ".join(documentation.lower().split())
    said = set()
    for clause in re.findall(r"\b(?:true|1|1s|ones|nonzero)\b[^.;,]{0,60}", words):
        if re.search(r"\bnot\b|hid|ignor|mask(ed|s)? (out|away)|exclud|block|pad|cannot", clause):
            said.add("hide")
        elif re.search(r"attend|keep|kept|allow|visib|valid|real|take part|see|through|tokens?\b|shown?\b", clause):
            said.add("attend")
    return said.pop() if len(said) == 1 else None
