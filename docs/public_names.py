"""The reference: a directive `{public}` that shows public names, one on each line, by their own docstrings.

A docstring is Markdown with examples as Python's prompt shows them; both become parts of the page. The properties and
methods of a class follow it, in the order of its file.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from types import ModuleType
from typing import Any

# names of a class that a reader of it does not call: what other libraries ask values for
_NOT_SHOWN = {"extra_repr", "register", "reset_parameters", "tree_flatten", "tree_unflatten", "wire"}


def found(name: str) -> Any:
    """What a dotted name stands for, imported."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError as missing:
            if missing.name is None or not name.startswith(missing.name):
                raise
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise LookupError(f"{name} is nowhere to be found")


def markdown(docstring: str) -> str:
    """A docstring as Markdown: each example, from its prompt to the next empty line, is a block of code."""
    lines: list[str] = []
    within = False
    for line in docstring.splitlines():
        if not within and line.lstrip().startswith(">>> "):
            within = True
            lines += ["", "```pycon"] if lines and lines[-1] else ["```pycon"]
        if within and not line.strip():
            within = False
            lines.append("```")
        shown = re.sub(r"\s*# doctest: .*$", "", line) if within else line
        lines.append("" if shown.strip() == "<BLANKLINE>" else shown)
    return "\n".join([*lines, "```"] if within else lines)


def signature(value: Any) -> str:
    """How it is called: names and defaults; types are in the editor's completion."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "()"
    shown = [
        each.replace(annotation=inspect.Parameter.empty) for each in parameters if each.name not in ("self", "cls")
    ]
    shown = [each for each in shown if not (each.name == "others" and each.kind is each.VAR_KEYWORD)]
    text = str(inspect.Signature([_plain(each) for each in shown]))
    return re.sub(r"\s+", " ", text)


class _Word(str):
    """A default shown as it is written here."""

    __repr__ = str.__str__


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if default is inspect.Parameter.empty or isinstance(default, bool | int | float | str | tuple | None):
        return parameter
    return parameter.replace(default=_Word("…" if "<" in repr(default) else repr(default)))


def members(cls: type) -> list[tuple[str, str, Any]]:
    """The (kind, name, value) of what a class of ours offers besides its fields: its methods and properties."""
    shown: dict[str, tuple[str, str, Any]] = {}
    for base in reversed([each for each in cls.__mro__ if each.__module__.startswith("clearhead")]):
        for name, value in vars(base).items():
            if name.startswith("_") or name in _NOT_SHOWN:
                continue
            if isinstance(value, property) or type(value).__name__ == "once":
                shown[name] = ("property", name, value)
            elif isinstance(value, classmethod | staticmethod):
                shown[name] = ("method", name, getattr(cls, name))
            elif inspect.isfunction(value):
                shown[name] = ("method", name, value)
    return [each for each in shown.values() if own_docstring(each[2])]


def own_docstring(value: Any) -> str:
    """The docstring that was written for it; a plain value, such as a dictionary, has only that of its class."""
    if not (inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, ModuleType | property)):
        if type(value).__name__ != "once" and not hasattr(value, "__wrapped__"):
            return ""
    return inspect.getdoc(value) or ""


def page(name: str) -> str:
    """One public name as MyST Markdown: how it is called, its docstring, and if it is a class, what it offers."""
    value = found(name)
    fence = ":" * 8
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        called = "" if kind == "exception" else signature(value)
        inner = "\n\n".join(
            f"{fence[:-2]}{{py:{kind_of}}} {each}{signature(member) if kind_of == 'method' else ''}\n"
            f"{markdown(own_docstring(member))}\n{fence[:-2]}"
            for kind_of, each, member in members(value)
        )
        return f"{fence}{{py:{kind}}} {name}{called}\n{markdown(own_docstring(value))}\n\n{inner}\n{fence}\n"
    if callable(value):
        return f"{fence}{{py:function}} {name}{signature(value)}\n{markdown(own_docstring(value))}\n{fence}\n"
    raise TypeError(f"{name} is neither a function nor a class: say what it is in the page's own words")


def names_in(text: str) -> list[str]:
    """The names that the `{public}` directives of a page show."""
    blocks = re.findall(r"^```\{public\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    from sphinx.util.docutils import SphinxDirective

    class Public(SphinxDirective):
        has_content = True

        def run(self) -> list[Any]:
            text = "\n".join(page(line.strip()) for line in self.content if line.strip())
            return self.parse_text_to_nodes(text)

    app.add_directive("public", Public)
    return {"parallel_read_safe": True}
