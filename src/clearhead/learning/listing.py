"""The list of exercises with what is solved, and one exercise as a task with a file to start from."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass

from clearhead.explain.render.sheet import rows, sheet
from clearhead.learning.exercise import Exercise, Function
from clearhead.learning.progress import Progress
from clearhead.learning.showing import Shown

MARKS = {"solved": "✓", "tried": "·", "new": " "}
STYLES = {"solved": "green", "tried": "yellow", "new": ""}


@dataclass(frozen=True, eq=False, repr=False)
class Contents(Shown):
    """All exercises, and which are solved. Print it."""

    exercises: tuple[Exercise, ...]
    progress: Progress

    def state(self, number: int) -> str:
        """solved, tried or new."""
        return "solved" if number in self.progress.solved else "tried" if number in self.progress.tries else "new"

    @property
    def verdict(self) -> str:
        """How far it has come, in one line."""
        solved = sum(one.number in self.progress.solved for one in self.exercises)
        return f"{solved} of {len(self.exercises)} exercises solved"

    @property
    def following(self) -> int | None:
        """The first that is not solved."""
        return next((one.number for one in self.exercises if one.number not in self.progress.solved), None)

    def lines(self, width: int) -> list[tuple[str, str]]:
        """The list as (style, line): in two columns where there is room."""
        room = max(width, 16)
        cells = [self._cell(one, room) for one in self.exercises]
        wide = max((len(line) for _, cell in cells for line in cell), default=0)
        found = [("bold", line) for line in textwrap.wrap(self.verdict, room)]
        found.append(("", ""))
        if room >= 2 * wide + 4:
            half = (len(cells) + 1) // 2
            for i in range(half):
                left = cells[i][1][0]
                right = cells[i + half][1][0] if i + half < len(cells) else ""
                found.append(("", f"{left:<{wide}}    {right}".rstrip()))
        else:
            found += [(style, line) for style, cell in cells for line in cell]
        found.append(("", ""))
        following = self.following
        words = "All of them are solved." if following is None else f"Next: clearhead learn {following}"
        found += [("", line) for line in textwrap.wrap(words, room)]
        if self.progress.broken:
            found += [("", ""), *(("yellow", line) for line in textwrap.wrap(self.progress.broken, room))]
        return found

    def _cell(self, one: Exercise, room: int) -> tuple[str, list[str]]:
        state = self.state(one.number)
        start = f"{MARKS[state]} {one.number:>2}  "
        body = textwrap.wrap(one.title, max(room - len(start), 10))
        lines = [f"{start if not i else ' ' * len(start)}{line}" for i, line in enumerate(body)]
        return STYLES[state], lines

    def __repr__(self) -> str:
        return f"Contents({self.verdict!r})"

    def _repr_html_(self) -> str:
        cells = [
            (MARKS[self.state(one.number)], str(one.number), one.title, "typed" if one.typed else _names(one))
            for one in self.exercises
        ]
        table = rows(cells, headings=("", "", "exercise", "asks for"), numbers=(1,))
        return sheet(self.verdict, [self.progress.broken] if self.progress.broken else [], table)

    def json(self) -> str:
        """The list as JSON."""
        known = self.progress
        return json.dumps(
            {
                "solved": sum(one.number in known.solved for one in self.exercises),
                "note": known.broken,
                "exercises": [
                    {
                        "number": one.number,
                        "title": one.title,
                        "lesson": one.lesson,
                        "typed": one.typed,
                        "functions": [function.signature for function in one.functions],
                        "solved": known.solved.get(one.number),
                        "tries": known.tries.get(one.number, 0),
                    }
                    for one in self.exercises
                ],
            },
            ensure_ascii=False,
        )


@dataclass(frozen=True, eq=False, repr=False)
class Assignment(Shown):
    """One exercise: the task, how it is answered, and the text of a file to start from. Print it."""

    exercise: Exercise
    solved: bool

    @property
    def verdict(self) -> str:
        """Its number and title."""
        return f"Exercise {self.exercise.number}, {self.exercise.title}" + (" (solved)" if self.solved else "")

    @property
    def start(self) -> str:
        """The text of a file to start from; nothing where answers are typed."""
        one = self.exercise
        if one.typed:
            return ""
        task = "\n".join(line for _, line in reflowed(one.task, 110))
        head = f'"""Exercise {one.number} of clearhead: {one.title}.\n\n{task}\n\n    {self.command}\n"""\n'
        stubs = "".join(f"\n\n{_stub(one, function, 116)}\n" for function in one.functions)
        return f"{head}\nimport numpy as np\n{stubs}"

    @property
    def command(self) -> str:
        """How it is answered on the command line."""
        one = self.exercise
        if one.typed:
            return f"clearhead learn {one.number} {' '.join('…' for _ in one.blanks)}"
        return f"clearhead learn {one.number} my_solution.py"

    @property
    def call(self) -> str:
        """How it is answered in a notebook."""
        one = self.exercise
        if one.typed:
            return f"ch.learn({one.number}, [{', '.join('…' for _ in one.blanks)}])"
        return f"ch.learn({one.number}, {', '.join(function.name for function in one.functions)})"

    def lines(self, width: int) -> list[tuple[str, str]]:
        """The task as (style, line)."""
        room = max(width, 24)
        one = self.exercise
        found = [("bold", line) for line in textwrap.wrap(self.verdict, room)] + [("", "")]
        found += [("", line) for _, line in reflowed(one.task, room)]
        found.append(("", ""))
        if one.typed:
            names = ", ".join(blank.name for blank in one.blanks)
            found += [("", line) for line in textwrap.wrap(f"Asked for, in this order: {names}.", room)]
        else:
            code = "\n\n".join(_stub(one, function, room - 8) for function in one.functions)
            found += [("cyan", f"    {line}".rstrip()) for line in code.splitlines()]
            found.append(("", ""))
            words = f"A file to start from: clearhead learn {one.number} --start my_solution.py"
            found += [("", line) for line in textwrap.wrap(words, room)]
        for words in (f"Check it: {self.command}", f"In a notebook: {self.call}", f"Lesson: {one.lesson}"):
            found += [("", line) for line in textwrap.wrap(words, room, subsequent_indent="    ")]
        return found

    def __repr__(self) -> str:
        return f"Assignment({self.verdict!r})"

    def _repr_html_(self) -> str:
        one = self.exercise
        facts = [line for _, line in reflowed(one.task, 10_000)]
        answer = [("answer", self.call)]
        if not one.typed:
            answer.insert(0, ("write", "\n".join(function.signature for function in one.functions)))
        return sheet(self.verdict, facts, rows([*answer, ("lesson", one.lesson)]))

    def json(self) -> str:
        """The exercise as JSON; what is right is not among it."""
        one = self.exercise
        return json.dumps(
            {
                "number": one.number,
                "title": one.title,
                "lesson": one.lesson,
                "task": one.task,
                "typed": [blank.name for blank in one.blanks],
                "functions": [function.signature for function in one.functions],
                "start": self.start,
                "solved": self.solved,
            },
            ensure_ascii=False,
        )


def reflowed(text: str, width: int) -> list[tuple[str, str]]:
    """A task in lines of at most a width: numbered items and what is indented keep their own lines."""
    paragraphs: list[str] = []
    for line in text.splitlines():
        fresh = line.startswith("    ") or re.match(r"\d\. |Type ", line) is not None
        if not paragraphs or fresh or paragraphs[-1].startswith("    "):
            paragraphs.append(line)
        else:
            paragraphs[-1] += f" {line}"
    found = []
    for paragraph in paragraphs:
        indent = "    " if paragraph.startswith("    ") else ""
        inner = indent or ("   " if re.match(r"\d\. ", paragraph) else "")
        if len(paragraph) <= width:
            found.append(("", paragraph))
            continue
        # columns that do not fit stand below one another
        parts = re.split(r"(?<=\S) {3,}", paragraph.strip()) if indent else [paragraph]
        for i, part in enumerate(parts):
            first = indent if not i else inner
            found += [("", line) for line in textwrap.wrap(part, width, initial_indent=first, subsequent_indent=inner)]
    return found


def _names(one: Exercise) -> str:
    return ", ".join(function.name for function in one.functions)


def _stub(one: Exercise, function: Function, room: int) -> str:
    """The function as it is before it is written; its docstring goes on in more lines where there is no room."""
    note = one.notes.get(function.name, "")
    words = textwrap.wrap(f'"""{note}"""', max(room, 16)) if note else []
    return "\n".join(
        [f"def {function.signature}:", *(f"    {line}" for line in words), "    raise NotImplementedError"]
    )
