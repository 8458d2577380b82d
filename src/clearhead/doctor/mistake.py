"""What the catalogue says of a mistake: its name, what it does, how it is mended, and which formula it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A named mistake: `title` in a few words, `why` it matters, and what `mends` it.

    Where it is another formula, `knob` and `setting` say which; see `variants`. The others show in what is done, and
    are in `wrong_behaviours`.
    """

    name: str
    title: str
    why: str
    mends: str
    knob: str | None = None
    setting: str | None = None
    also: tuple[str, ...] = ()  # other settings of the knob that are the same mistake
