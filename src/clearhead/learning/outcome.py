"""What came of a solution: right, or the mistake by its name, with an example and a hint; as text, HTML and JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from clearhead.explain.render.sheet import rows, sheet
from clearhead.learning.showing import Shown


@dataclass(frozen=True, eq=False, repr=False)
class Outcome(Shown):
    """Whether an exercise is solved: `right` says so, `name` is the mistake's. Print it, or ask for `json()`.

    `example` has a line for each input, then what was expected and what came; typed answers have none. `explained` is
    the answer in words, once it is right.
    """

    number: int
    title: str
    right: bool
    name: str = ""
    mistake: str = ""
    seen: str = ""
    why: str = ""
    hint: str = ""
    example: tuple[str, ...] = ()
    data: dict[str, Any] | None = None
    explained: str = ""
    following: str = ""
    note: str = ""  # what there is to know beside it, such as progress that could not be kept

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        return f"Exercise {self.number}, {self.title}: {'right' if self.right else 'not yet'}"

    def lines(self, width: int) -> list[tuple[str, str]]:
        """The outcome as (style, line)."""
        room = max(width, 24)
        head = "bold green" if self.right else "bold red"
        found = [(head, line) for line in textwrap.wrap(self.verdict, room)]
        if self.right:
            for words in (self.explained, self.following, self.note):
                if words:
                    found.append(("", ""))
                    found += [("", line) for line in textwrap.wrap(words, room)]
            return found
        found += [("", ""), *(("bold", line) for line in textwrap.wrap(f"{self.name}: {self.mistake}", room))]
        for label, words in (("seen", self.seen), ("why", self.why), ("hint", self.hint)):
            body = textwrap.wrap(words, max(room - 8, 16))
            found += [("", f"  {label if not i else '':<5} {line}") for i, line in enumerate(body)]
        if self.example:
            found.append(("dim", "  the smallest example found:"))
        for line in self.example:
            style = {"expected": "green", "got": "red"}.get(line.split()[0], "")
            body = textwrap.wrap(line, max(room - 4, 20), subsequent_indent=" " * 9)
            found += [(style, f"    {part}") for part in body]
        if self.note:
            found += [("", ""), *(("", line) for line in textwrap.wrap(self.note, room))]
        return found

    def __repr__(self) -> str:
        return f"Outcome({self.verdict!r})" if self.right else f"Outcome({f'{self.verdict}, {self.name}'!r})"

    def _repr_html_(self) -> str:
        if self.right:
            facts = [one for one in (self.explained, self.following, self.note) if one]
            return sheet(self.verdict, facts, grade="good")
        said = [("seen", self.seen), ("why", self.why), ("hint", self.hint)]
        if self.example:
            said.append(("smallest example", "\n".join(self.example)))
        table = rows([row for row in said if row[1]], words=f"{self.name}: {self.mistake}")
        return sheet(self.verdict, [self.note] if self.note else [], table, grade="bad")

    def json(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, text: str) -> Outcome:
        """The outcome that `json` wrote."""
        told = json.loads(text)
        return cls(**told | {"example": tuple(told["example"])})
