"""The reference of the site: every public name is in it once, and has an example in its docstring."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import clearhead as ch

DOCS = Path(__file__).parent.parent / "docs"
# what makes the pages, and lies beside them
SPEC = spec_from_file_location("public_names", DOCS / "public_names.py")
assert SPEC is not None
assert SPEC.loader is not None
reference = module_from_spec(SPEC)
SPEC.loader.exec_module(reference)

# what is public: the names that these list, or where a module lists none, those that it defines itself
PACKAGES = (
    "clearhead",
    "clearhead.nn",
    "clearhead.nn.functional",
    "clearhead.nn.eviction",
    "clearhead.distributed",
    "clearhead.textbook",
    "clearhead.measure.costs",
    "clearhead.integrations.flax",
    "clearhead.integrations.huggingface",
    "clearhead.integrations.huggingface_cache",
    "clearhead.integrations.huggingface_split",
    "clearhead.integrations.keras",
    "clearhead.integrations.local_models",
)
TEXTS = tuple(f"clearhead.textbook.{name}" for name in ch.textbook._LATER)
# data and modules, which pages show in their own words
NOT_CALLED = {
    "clearhead.nn.eviction",
    "clearhead.nn.functional",
    "clearhead.textbook.CONVENTIONS",
    "clearhead.textbook.EXAMPLES",
}


def public(module: str) -> list[str]:
    """The public names of a module, dotted."""
    found = import_module(module)
    names = getattr(found, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(found).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module
        ]
    return [f"{module}.{name}" for name in names]


def listed() -> list[str]:
    """What the pages of the reference show."""
    pages = sorted((DOCS / "look_up").glob("api*.md"))
    return [name for page in pages for name in reference.names_in(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("module", [*PACKAGES, *TEXTS])
def test_every_public_name_is_in_the_reference_with_an_example(module: str) -> None:
    shown = listed()
    # a name that another module lends is shown where it is defined for readers: once
    same = {id(reference.found(name)) for name in shown}
    for name in public(module):
        if name in NOT_CALLED:
            continue
        value = reference.found(name)
        assert id(value) in same, f"{name} is on no page: add it to one of docs/look_up/api*.md"
        assert ">>> " in reference.own_docstring(value), f"{name} has no example"


def test_what_is_listed_is_there_once() -> None:
    shown = listed()
    assert len(shown) > 150
    assert sorted(shown) == sorted(set(shown))
    for name in shown:
        assert reference.page(name).startswith("::::::::{py:"), name


def test_data_is_named_on_the_pages() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "look_up").glob("api*.md"))
    for name in sorted(NOT_CALLED):
        assert name in text, name


def test_no_module_of_an_integration_is_forgotten() -> None:
    package = import_module("clearhead.integrations")
    for found in pkgutil.iter_modules(package.__path__):
        name = f"clearhead.integrations.{found.name}"
        inner = found.name == "promised"  # what stands between transformers' masks and ours
        assert (name in PACKAGES) != inner, name


def test_examples_become_blocks_of_code() -> None:
    made = reference.markdown("One.\n\n>>> 1 + 1\n2\n>>> 3  # doctest: +SKIP\n3\n\nTwo, `three`.\n>>> 4\n4")
    assert made == "One.\n\n```pycon\n>>> 1 + 1\n2\n>>> 3\n3\n```\n\nTwo, `three`.\n\n```pycon\n>>> 4\n4\n```"
