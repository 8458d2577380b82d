"""The record that readers read: calls in order, by name, by layer and by step, and what was missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Self, overload

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.watching.call import Call


@dataclass(eq=False)
class Record(Sequence[Call]):
    """Calls in the order they were made, to be had by number, by name, by layer and by step; `Seen` reads them."""

    calls: list[Call] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    @overload
    def __getitem__(self, which: int | str) -> Call: ...
    @overload
    def __getitem__(self, which: slice) -> Self: ...
    def __getitem__(self, which: int | str | slice) -> Call | Self:
        if isinstance(which, slice):
            return self._part(self.calls[which])
        if not isinstance(which, str):
            if isinstance(which, int | np.integer) and not -len(self) <= which < len(self):
                raise IndexError(self._none_there(int(which)))
            return self.calls[which]
        found = [call for call in self.calls if call.name == which]
        if not found:
            known = ", ".join(self.names[:6]) + (", …" if len(self.names) > 6 else "")
            raise KeyError(f"{which!r} made no call that was seen; these did: {known or 'none'}")
        if len(found) > 1:
            steps = f"steps {found[0].step} to {found[-1].step}: say seen.step(n)[{which!r}], or"
            if found[0].step == found[-1].step:
                steps = f"step {found[0].step}:"
            raise KeyError(f"{which!r} made {len(found)} calls, in {steps} seen.named({which!r})[i]")
        return found[0]

    @property
    def names(self) -> list[str]:
        """The modules that made calls, in the order of their first."""
        return list(dict.fromkeys(call.name for call in self.calls))

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers that made calls."""
        return sorted({call.layer for call in self.calls})

    @property
    def steps(self) -> int:
        """How many steps there were: calls of the model, one for each token that it generates."""
        return max((call.step for call in self.calls), default=-1) + 1

    def layer(self, number: int) -> Self:
        """The calls of one layer; −1 is the last. A layer's number is the first one in its module's name."""
        which = _one_of("layer", number, self.layers)
        return self._part([call for call in self.calls if call.layer == which])

    def step(self, number: int) -> Self:
        """The calls of one step; −1 is the last. A step is one call of the model."""
        which = _one_of("step", number, sorted({call.step for call in self.calls}))
        return self._part([call for call in self.calls if call.step == which])

    def named(self, pattern: str) -> Self:
        """The calls of modules with this name; * stands for anything."""
        return self._part([call for call in self.calls if fnmatchcase(call.name, pattern)])

    def _none_there(self, which: int) -> str:
        """Why there is no call of that number."""
        if self.calls:
            return f"seen[{which}] is not there: {len(self)} calls were seen, seen[0] to seen[{len(self) - 1}]"
        if not self.missed:
            return f"seen[{which}] is not there: nothing was seen; a model is seen when it runs inside watch"
        more = f", and {len(self.missed) - 1} more in seen.missed" if len(self.missed) > 1 else ""
        name, why = next(iter(self.missed.items()))
        return f"seen[{which}] is not there: nothing was seen. {name or 'The model'}: {why}{more}"

    def _part(self, calls: list[Call]) -> Self:
        return type(self)(calls, self.missed)

    def __repr__(self) -> str:
        steps = f"{self.steps} {'step' if self.steps == 1 else 'steps'}"
        lines = [f"{type(self).__name__}: {len(self)} calls by {len(self.names)} modules in {steps}"]
        lines += [f"  {call!r}" for call in self.calls[:6]] + (["  …"] if len(self) > 6 else [])
        lines += [f"  missed {name or 'the model'}: {why}" for name, why in self.missed.items()]
        return "\n".join(lines)


def _one_of(what: str, number: Any, there: list[int]) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise ArgumentError(what, f"is {number!r}, expected a whole number")
    if number < 0 and len(there) >= -number:
        return there[number]
    if number not in there:
        known = f"{there[0]} to {there[-1]}" if there else "none"
        raise ArgumentError(what, f"is {number}, and the calls that were seen have {known}")
    return int(number)
