"""The house, as DESIGN.md draws it and as the tree has it: one picture, and imports that point downwards in it.

`python tests/test_architecture.py` counts wings, floors and arrows; with `--draw` it draws the files of each wing anew.
The order of wings is written by hand, in DESIGN.md and nowhere else.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import clearhead

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "clearhead"
DESIGN = ROOT / "DESIGN.md"
COLUMN, WIDTH = 28, 120
MOST_LINES = 400

# Kernels, which never import one another; what they share lies beside them
KERNELS = ("dense.py", "tiled.py", "compiled.py", "vendor.py", "triton/", "hopper/")


def test_the_picture_names_every_file_once() -> None:
    drawn = [name for name, _ in picture()]
    assert sorted(drawn) == sorted(tree()), "python tests/test_architecture.py --draw draws it anew"


def test_the_picture_says_what_each_file_says_of_itself() -> None:
    for name, sentence in picture():
        assert sentence, f"{name} has no sentence"
        assert sentence == (first_sentence(name) or sentence), f"{name}: --draw draws it anew"


def test_imports_point_downwards() -> None:
    line = {name: number for number, (name, _) in enumerate(picture())}
    upwards = {(importer, imported) for importer, imported in imports() if line[importer] >= line[imported]}
    assert upwards == set()


def test_no_circle_of_imports() -> None:
    assert circles(imports()) == []


def test_a_circle_would_be_noticed() -> None:
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [["a", "b", "c"]]


def test_kernels_never_import_one_another() -> None:
    def kernel(name: str) -> str | None:
        return next((one for one in KERNELS if name.startswith(f"kernels/{one}")), None)

    assert all(any(name.startswith(f"kernels/{one}") for name in tree()) for one in KERNELS)
    between = {
        (importer, imported)
        for importer, imported in imports()
        if None not in (kernel(importer), kernel(imported)) and kernel(importer) != kernel(imported)
    }
    assert between == set()


def test_no_module_has_the_name_of_a_public_function() -> None:
    public = {name for name in clearhead.__all__ if name[0].islower() and callable(getattr(clearhead, name))}
    assert {"attention", "observe", "gradients", "plan", "trace", "watch", "check", "profile"} <= public
    assert not [name for name in modules() if name.rsplit(".", 1)[-1] in public]


def test_importing_a_module_gives_a_module() -> None:
    for name in modules():
        if name.startswith(("clearhead.kernels.gpu", "clearhead.kernels.triton", "clearhead.kernels.hopper")):
            continue  # not all of them can be imported where there is no GPU
        if "flax" in name and find_spec("flax") is None:
            continue
        import_module(name)
        found = clearhead
        for part in name.split(".")[1:]:  # as `import a.b.c as m` does
            found = getattr(found, part)
            assert isinstance(found, ModuleType), name


def test_no_package_hides_a_module_of_its_own() -> None:
    for package in (name for name in modules() if path_of(name).name == "__init__.py"):
        own = {name.rsplit(".", 1)[-1] for name in modules() if name.rpartition(".")[0] == package}
        for node in ast.walk(ast.parse(path_of(package).read_text())):
            for bound in names_bound(node, package):
                assert bound not in own, f"{package} binds {bound}, which is also a module of its own"


def test_every_file_says_its_job_and_is_short() -> None:
    for name in tree():
        path = SOURCE / name / "__init__.py" if name.endswith("/") else SOURCE / name
        if path.suffix in (".py", ".h", ".cpp", ".js") and path.exists():
            assert first_sentence(name), f"{name} does not open with a sentence"
            assert len(path.read_text().splitlines()) < MOST_LINES, f"{name} is too long"


def test_files_that_are_named_are_there() -> None:
    documents = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
    gone = set()
    for path in [*documents, *(SOURCE / name for name in tree() if not name.endswith("/"))]:
        text = path.read_text().replace(block(), "")  # which is held to the tree above
        for name in re.findall(r"`([\w/]*\w\.(?:py|h|cpp|json))`", text):
            if not any((place / name).exists() for place in (ROOT, SOURCE, path.parent)):
                gone.add((path.name if path in documents else path.relative_to(SOURCE).as_posix(), name))
    assert gone == set()


def test_design_has_the_figures() -> None:
    assert figures() in " ".join(DESIGN.read_text().split())


@cache
def tree() -> tuple[str, ...]:
    """Every file and folder, as `core/` and `core/arrays.py`; a folder stands for its `__init__.py`."""
    found = []
    for path in sorted(SOURCE.rglob("*")):
        name = path.relative_to(SOURCE).as_posix()
        if "__pycache__" in name or path.suffix in (".so", ".pyc", ".pyd") or name.startswith("."):
            continue
        if path.is_dir():
            found.append(f"{name}/")
        elif path.name != "__init__.py" or path.parent == SOURCE:
            found.append(name)
    return tuple(found)


@cache
def picture() -> tuple[tuple[str, str], ...]:
    """The lines of DESIGN.md's picture: what stands there, and its sentence."""
    found: list[tuple[str, str]] = []
    folders: list[str] = []
    for line in block().splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, sentence = line.strip().partition(" ")
        del folders[depth - 1 :]
        found.append(("".join([*folders, name]), sentence.strip()))
        if name.endswith("/"):
            folders.append(name)
    return tuple(found)


def block() -> str:
    text = DESIGN.read_text()
    found = re.search(r"```text\n(src/clearhead/\n.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


@cache
def modules() -> tuple[str, ...]:
    files = (path.relative_to(SOURCE.parent).with_suffix("").parts for path in sorted(SOURCE.rglob("*.py")))
    return tuple(".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in files)


def path_of(module: str) -> Path:
    path = SOURCE.parent / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def named(module: str) -> str:
    """A module as the picture calls it."""
    if module == "clearhead._native":
        return "native/"
    path = path_of(module).relative_to(SOURCE)
    if path.name == "__init__.py" and path.parent != Path():
        return f"{path.parent.as_posix()}/"
    return path.as_posix()


@cache
def imports() -> frozenset[tuple[str, str]]:
    """(importer, imported): at the top, in functions and for types alike; in C++ and JavaScript too."""
    found = set()
    for module in modules():
        for node in ast.walk(ast.parse(path_of(module).read_text())):
            found |= {(named(module), named(other)) for other in imported(node)}
    for path in sorted((SOURCE / "native").iterdir()):
        for other in re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE):
            found.add((f"native/{path.name}", f"native/{other}"))
    for path in sorted((SOURCE / "explorer" / "web").rglob("*.js")):
        for other in re.findall(r'^import .* from "(.*)";', path.read_text(), re.MULTILINE):
            target = (path.parent / other).resolve().relative_to(SOURCE).as_posix()
            found.add((path.relative_to(SOURCE).as_posix(), target))
    return frozenset((one, other) for one, other in found if one != other)


def imported(node: ast.AST) -> Iterable[str]:
    """The modules of ours that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        names = []
        for alias in node.names:
            deeper = f"{node.module}.{alias.name}"
            names.append(deeper if deeper in (*modules(), "clearhead._native") else node.module or "")
    else:
        return []
    return [name for name in names if name.split(".")[0] == "clearhead"]


def names_bound(node: ast.AST, package: str) -> list[str]:
    """Names that a statement of a package binds to anything but a module of that name."""
    if isinstance(node, ast.ImportFrom):
        ours = node.module == package
        return [alias.asname or alias.name for alias in node.names if not (ours and alias.asname in (None, alias.name))]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return []


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Sets of names that reach one another, each sorted."""
    follow: dict[str, set[str]] = {}
    for one, other in arrows:
        follow.setdefault(one, set()).add(other)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(follow.get(start, ()))
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += follow.get(name, ())
        return seen

    beyond = {name: reached(name) for name in follow}
    found = {tuple(sorted(o for o in beyond[n] if n in beyond.get(o, ()))) for n in follow if n in beyond[n]}
    return [list(circle) for circle in sorted(found)]


def first_sentence(name: str) -> str:
    """What a file says of itself before anything else, as much as a line has room for; nothing where it holds data."""
    path = SOURCE / name / "__init__.py" if name.endswith("/") else SOURCE / name
    if not path.exists():
        return ""
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
    elif path.suffix in (".h", ".cpp", ".js"):
        lines = path.read_text().splitlines()
        ends = next(number for number, line in enumerate(lines) if not line.startswith("//"))
        text = " ".join(line.removeprefix("//").strip() for line in lines[:ends])
    else:
        return ""
    sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
    room = WIDTH - COLUMN
    if len(sentence) <= room:
        return sentence
    part = re.match(r"(.*)[,;:] ", sentence[:room])
    if part is not None and len(part[1]) > room // 3:
        return part[1]
    return f"{sentence[: room - 1].rpartition(' ')[0]} …"


def figures() -> str:
    """How many wings there are, how deep the longest chain of imports is, and how many arrows there are between."""

    def wing(name: str) -> str:
        top, slash, _ = name.partition("/")
        return top + slash

    arrows = {(wing(one), wing(other)) for one, other in imports() if wing(one) != wing(other)}
    rooms = sorted({one for arrow in arrows for one in arrow})

    @cache
    def floors(room: str) -> int:
        return 1 + max((floors(other) for one, other in arrows if one == room), default=0)

    return f"{len(rooms)} wings on {max(map(floors, rooms))} floors, {len(arrows)} arrows between them"


def draw() -> str:
    """The picture anew: wings in the order they have, the files of each so that imports point downwards."""
    known = {name: (number, sentence) for number, (name, sentence) in enumerate(picture())}
    lines = ["src/clearhead/"]

    def put(folder: str) -> None:
        inside = [n for n in tree() if n.startswith(folder) and n != folder and "/" not in n[len(folder) : -1]]
        inside.sort(key=lambda name: known.get(name, (len(known),))[0])
        if not folder:
            assert all(name in known for name in inside), "a new wing is put into the picture by hand"
        while inside:
            name = next((n for n in inside if not folder or not imported_by(inside, n)), inside[0])
            inside.remove(name)
            depth = name.rstrip("/").count("/") + 1
            start = f"{'  ' * depth}{name[len(folder) :]}"
            sentence = first_sentence(name) or known.get(name, (0, ""))[1]
            lines.append(f"{start:<{COLUMN - 1}} {sentence}".rstrip())
            if name.endswith("/"):
                put(name)

    def imported_by(others: list[str], name: str) -> bool:
        """True where another of the same folder imports it, and so stands above it."""
        return any(
            imported.startswith(name) and any(importer.startswith(other) for other in others if other != name)
            for importer, imported in imports()
        )

    put("")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    if "--draw" in sys.argv[1:]:
        drawn = DESIGN.read_text().replace(block(), draw())
        DESIGN.write_text(re.sub(r"\d+ wings on \d+ floors, \d+ arrows between them", figures(), drawn))
    print(figures())
