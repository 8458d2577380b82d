"""Recipes of DESIGN.md, followed: a mask that is nowhere in the library runs on every kernel at full speed.

And the files that name a mask or a node are counted, so that adding one takes no more of them than the recipe says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import MARKS

import clearhead as ch
from clearhead.core import lowered, masks, sparse_masks
from clearhead.core.grid import Alignment, Grid, offset_by_row
from clearhead.core.lowered import AndNode, BandNode, DocumentsNode, Node, NodeKind
from clearhead.core.problem import pose
from clearhead.kernels.compiled import NOT_BUILT
from clearhead.kernels.mask_nodes import nodes_of
from clearhead.torch_bridge.wire import pack_mask, unpack_mask

SOURCE = Path(ch.__file__).parent
BATCH, HEADS, QUERIES, KEYS = 2, 3, 19, 23
GRID = Grid((BATCH,), HEADS, QUERIES, KEYS)
END = Alignment()


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(ch.Mask):
    """The query's own position and `back` more before it, each `step` apart."""

    back: int
    step: int
    alignment: Alignment = END

    def lower(self, grid: Grid) -> Node:
        offset = offset_by_row(self.alignment, grid)
        places = np.arange(grid.queries) + np.reshape(offset, (-1, 1))
        near = BandNode(offset - self.back * self.step, offset)
        return AndNode(near, DocumentsNode(places % self.step, np.arange(grid.keys)[None, :] % self.step))

    def tile(self, rows: range, columns: range, grid: Grid) -> Any:
        far = np.asarray(rows)[:, None] + self.alignment.offset(grid) - np.asarray(columns)
        return (far >= 0) & (far <= self.back * self.step) & (far % self.step == 0)

    def check(self, grid: Grid) -> None:
        self.alignment.check(grid)

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        return f"{self!r} takes every {self.step}th key"

    def __repr__(self) -> str:
        return f"dilated({', '.join([str(self.back), str(self.step), *self.alignment.arguments()])})"


DILATED = {
    "alone": Dilated(3, 2),
    "by row": Dilated(4, 3, Alignment("start", np.array([1, 5]))),
    "composed": (Dilated(2, 5) | ch.prefix([2, 4])) & ~ch.window(1),
}
KERNELS = [
    "tiled",
    pytest.param("compiled", marks=pytest.mark.skipif(bool(NOT_BUILT), reason=NOT_BUILT)),
    pytest.param("triton", marks=MARKS[:2]),
]


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> str:
    """A kernel by name, ready to run here."""
    if request.param == "triton":
        request.getfixturevalue("interpreting")
    name: str = request.param
    return name


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn((BATCH, HEADS, n, 16), requires_grad=True) for n in (QUERIES, KEYS, KEYS)]


@pytest.mark.parametrize("name", DILATED)
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_every_kernel_gives_what_dense_gives(kernel: str, name: str) -> None:
    found = []
    for one in (kernel, "dense"):
        q, k, v = tensors()
        output = ch.attention(q, k, v, mask=DILATED[name], kernel=one)
        found.append((output, *torch.autograd.grad(output.square().sum(), (q, k, v))))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right)
    seen, right = (
        ch.observe(*(x.detach() for x in (q, k, v)), mask=DILATED[name], kernel=one, top=3) for one in (kernel, "dense")
    )
    torch.testing.assert_close(seen.lse, right.lse)
    torch.testing.assert_close(seen.entropy, right.entropy)


@pytest.mark.parametrize("kernel", KERNELS[1:], indirect=True)
def test_fast_kernels_never_ask_for_all_pairs(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in tensors())
    right = ch.attention(q, k, v, mask=DILATED["alone"], kernel="dense")
    problem = pose(q, k, v, mask=DILATED["alone"])
    monkeypatch.setattr(Dilated, "tile", None)
    torch.testing.assert_close(ch.attention(q, k, v, mask=DILATED["alone"], kernel=kernel), right)
    if kernel == "compiled":
        assert len(nodes_of(DILATED["alone"].lower(problem.grid))) == 3


def test_a_plan_takes_it() -> None:
    plan = ch.plan(*(x.detach().numpy() for x in tensors()), mask=DILATED["alone"])
    assert plan.kernel == ("tiled" if NOT_BUILT else "compiled")


@pytest.mark.parametrize("name", DILATED)
def test_it_survives_the_wire(name: str) -> None:
    arrays: list[Any] = []
    numbers: list[int] = []
    mask = DILATED[name]
    back = unpack_mask(pack_mask(mask, arrays, numbers), arrays, numbers)
    assert repr(back) == repr(mask)
    sizes = {"queries": QUERIES, "keys": KEYS, "batch": (BATCH,), "heads": HEADS}
    assert np.array_equal(back.dense(**sizes), mask.dense(**sizes))
    q, k, v = (x.detach() for x in tensors())
    compiled = torch.compile(ch.attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, mask=mask), ch.attention(q, k, v, mask=mask))


@MARKS[0]
def test_it_is_known_again_by_its_fields() -> None:
    from clearhead.kernels.gpu.cache_key import CacheKey, Unlike

    def key(mask: ch.Mask) -> Any:
        return CacheKey(pose(*(x.detach() for x in tensors()), mask=mask)).key[-1]

    assert key(Dilated(3, 2)) == key(Dilated(3, 2)) != key(Dilated(3, 4))
    places = np.array([1, 5])
    by_row = Dilated(4, 3, Alignment("start", places))
    before = key(by_row)
    places[0] = 2
    assert key(by_row) != before

    class Odd(ch.Mask):  # what is no dataclass may depend on anything
        def tile(self, rows: range, columns: range, grid: Grid) -> bool:
            return True

    with pytest.raises(Unlike):
        key(Odd())


@MARKS[0]
def test_where_it_is_one_range_of_keys_it_is_said_to_be() -> None:
    from clearhead.kernels.gpu.key_ranges import key_ranges

    found = key_ranges(Dilated(3, 1), GRID)
    assert found is not None
    seen = (np.arange(KEYS) >= found[0][..., None]) & (np.arange(KEYS) < found[1][..., None])
    assert np.array_equal(seen[0], Dilated(3, 1).dense(QUERIES, KEYS)[0])
    assert key_ranges(Dilated(3, 2), GRID) is None


def test_a_cache_of_uneven_rows_tells_it_where_queries_stand() -> None:
    from clearhead.nn.places import anchored

    held: Any = SimpleNamespace(start=[2, 4])
    assert (
        repr(anchored(Dilated(3, 2) & ~ch.causal(), held, 1)) == "dilated(3, 2, offset=[2, 4]) & ~causal(offset=[2, 4])"
    )


MASKS = {
    kind.__name__: f"core/{module.__name__.rsplit('.', 1)[-1]}.py"
    for module in (masks, sparse_masks)
    for kind in vars(module).values()
    if isinstance(kind, type) and kind.__module__ == module.__name__
}
FILES = {
    path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(SOURCE.rglob("*"))
    if path.suffix in (".py", ".h", ".cpp")
}


def naming(pattern: str) -> list[str]:
    """The files with a word in their code, prose left out."""
    return [
        name for name, text in FILES.items() if re.search(rf"\b({pattern})\b", re.sub(r'"""[\s\S]*?"""|#.*', "", text))
    ]


@pytest.mark.parametrize("name", MASKS)
def test_few_files_name_a_mask(name: str) -> None:
    files = naming(name)
    assert MASKS[name] in files
    assert len(files) <= 5, files


@pytest.mark.parametrize("kind", NodeKind, ids=str)
def test_few_files_name_a_node(kind: NodeKind) -> None:
    name = kind.name.capitalize()
    # the doctor, too, has a word FLAGS, which is no node; pieces of a call over ranks move what a node says
    others = ("doctor/", "distributed/")
    files = [file for file in naming(f"{name}Node|{kind.name}|k{name}") if not file.startswith(others)]
    assert {"core/lowered.py", "native/mask.h", "kernels/gpu/device.py"} <= set(files)
    assert len(files) <= 5, files


def test_nodes_have_the_same_numbers_in_cpp() -> None:
    listed = re.search(r"enum MaskKind : int \{([^}]*)\}", FILES["native/mask.h"])
    assert listed is not None
    names = re.findall(r"\bk([A-Z]\w+)", re.sub(r"//.*", "", listed[1]))
    assert [name.upper() for name in names] == [kind.name for kind in NodeKind]
    assert set(NodeKind) == {node.kind for node in vars(lowered).values() if _is_node(node)}


def _is_node(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Node) and value not in (Node, lowered.PairNode)


def made_in_a_function(n: int) -> ch.Mask:
    @dataclass(frozen=True, eq=False, repr=False)
    class First(ch.Mask):
        """The first n keys, n being the function's own."""

        def tile(self, rows: range, columns: range, grid: Grid) -> Any:
            return np.broadcast_to(np.asarray(columns)[None, :] < n, (len(rows), len(columns)))

    return First()


def test_two_classes_of_one_name_are_told_apart_on_the_wire() -> None:
    two, five = made_in_a_function(2), made_in_a_function(5)
    for mask in (two, five):
        again = unpack_mask(pack_mask(mask, [], []), [], [])
        np.testing.assert_array_equal(again.dense(3, 7), mask.dense(3, 7))


@dataclass(frozen=True)  # compared by its fields, which have no hash
class Either(ch.Mask):
    """Keys below a number, or below one for each query."""

    below: int | np.ndarray
    strict: bool = True

    def tile(self, rows: range, columns: range, grid: Grid) -> Any:
        below = np.broadcast_to(self.below, grid.queries)[list(rows)][:, None]
        columns = np.asarray(columns)[None, :]
        return columns < below if self.strict else columns <= below


@pytest.mark.parametrize("mask", [Either(4), Either(np.arange(3), strict=False)], ids=["a number", "an array"])
def test_fields_of_either_kind_come_back_as_they_were(mask: Either) -> None:
    arrays: list[Any] = []
    numbers = [17]  # others were there before
    again = unpack_mask(pack_mask(mask, arrays, numbers), arrays, numbers)
    np.testing.assert_array_equal(again.dense(3, 7), mask.dense(3, 7))
    assert again.strict is mask.strict  # type: ignore[attr-defined]  # which is no part of every mask


@pytest.mark.parametrize("make", [lambda: Either(np.arange(600)), lambda: ch.lengths(np.arange(600))])
def test_a_mask_with_large_arrays_is_known_by_who_it_is(make: Any) -> None:
    from clearhead.kernels.gpu.cache_key import CacheKey

    batch = torch.zeros(600, 1, 600, 4)
    first, second = make(), make()
    once, again, other = (CacheKey(pose(batch, batch, batch, mask=mask)).key for mask in (first, first, second))
    assert once == again != other
    assert hash(once) == hash(again)


def test_every_public_name_is_listed() -> None:
    assert set(ch.__all__) | {"nn"} <= set(dir(ch))
