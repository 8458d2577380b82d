"""Adding an observation: the recipe, carried out on a copy of the package, and the files that it may name.

The copy gains the largest weight that each key received. Three files are edited for it; everything else follows.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import numpy as np
import torch

import clearhead as ch
from clearhead.core.observations import OBSERVATIONS, Observed, Want
from clearhead.kernels.collect import COLLECTORS
from clearhead.kernels.compiled import native

PACKAGE = Path(ch.__file__).parent

# file, what is there, what follows it
EDITS = [
    ("core/observations.py", "    weights: bool = False\n", "    strongest: bool = False\n"),
    ("core/observations.py", "    weights: ArrayT | None = None\n", "    strongest: ArrayT | None = None\n"),
    (
        "core/observations.py",
        "OBSERVATIONS: dict[str, Observation] = {\n",
        """    "strongest": Observation(
        lambda asked, grid: bool(asked),
        lambda strongest: _line("strongest", to_numpy(strongest)),
        (Part(("keys",)),),
        absent=False,
    ),
""",
    ),
    (
        "kernels/collect.py",
        "        return self.xp.concat(self.rows, axis=-2)\n",
        '''

class Strongest(Collector):
    """The largest weight that each key received."""

    def __init__(self, sizes: Sizes, wanted: bool) -> None:
        super().__init__(sizes, wanted)
        self.most: dict[range, Array] = {}

    def see(self, weights: Array, rows: range, columns: range) -> None:
        here = self.xp.max(weights, axis=-2)
        self.most[columns] = self.xp.maximum(here, self.most[columns]) if columns in self.most else here

    def result(self) -> Array:
        return side_by_side(self.sizes, self.most, ())
''',
    ),
    ("kernels/collect.py", "COLLECTORS: dict[str, type[Collector]] = {\n", '    "strongest": Strongest,\n'),
    ("calls.py", "    weights: bool = False,\n", "    strongest: bool = False,\n"),
    ("calls.py", "weights=weights", ", strongest=strongest"),
]

# run by a Python of its own, which imports the copy
USES = """
import sys

folder, interpreted = sys.argv[1:]
# without the finder of the editable package
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, folder)

import numpy as np
import torch

import clearhead as ch
from clearhead.kernels.compiled import native
from clearhead.kernels.tiled import Tiled

assert ch.__file__.startswith(folder), ch.__file__
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 23, 8)).astype(np.float32)
tensors = [torch.from_numpy(a) for a in (q, k, v)]
exact = ch.observe(q, k, v, mask=ch.causal(), weights=True, kernel="dense").weights.max(-2)


def found(arrays, **options):
    return ch.observe(*arrays, mask=ch.causal(), strongest=True, **options)


def close(seen):
    return np.allclose(np.asarray(seen.strongest), exact, rtol=1e-5, atol=0)


for arrays in ((q, k, v), tensors):
    for kernel in ("tiled", "dense"):
        seen = found(arrays, kernel=kernel)
        assert close(seen) and type(seen.strongest) is type(arrays[0]), kernel
        assert close(found(arrays, kernel=kernel, received=True, top=2)), kernel
    chosen = found(arrays)
    assert chosen.kernel in ("tiled", "dense") and close(chosen), chosen.kernel
    try:
        found(arrays, kernel="compiled")
    except ch.KernelRefused as refused:
        assert native is None or refused.reason == "it does not observe strongest; `tiled` does", refused.reason
    else:
        raise AssertionError("compiled does not know it")
assert not ch.observe(q, k, v).strongest
assert np.allclose(ch.observe(q[0, 0], k[0, 0], v[0, 0], mask=ch.causal(), strongest=True).strongest, exact[0, 0])
assert np.array_equal(seen[1].numpy().strongest, np.asarray(seen.strongest)[1])
assert "  strongest  " in repr(seen) and "over 23 keys" in repr(seen)
small = Tiled(rows=5, columns=7)
small.name = "tiled in small tiles"
from clearhead.core.observations import want
from clearhead.core.problem import pose
posed = pose(q, k, v, mask=ch.causal(), want=lambda grid: want(grid, strongest=True))
assert close(small.run(posed).observed)
if interpreted == "yes":
    seen = found(tensors, kernel="triton")
    assert seen.kernel == "triton" and close(seen)

learning = [t.clone().requires_grad_() for t in tensors]
seen = found(learning)
seen.output.sum().backward()
assert learning[0].grad is not None and not seen.strongest.requires_grad

model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
with torch.no_grad(), ch.watch(model, want={"strongest": True, "weights": True}) as watched:
    model(torch.randn(1, 7, 16))
for call in watched:
    assert torch.allclose(call.observed.strongest, call.weights.amax(-2))
watched.save(folder + "/seen.safetensors")
again = ch.Seen.load(folder + "/seen.safetensors")
assert np.array_equal(again[1].observed.strongest, watched[1].observed.strongest.numpy())
print("found everywhere")
"""


def test_an_observation_is_added_in_three_files(tmp_path: Path) -> None:
    copy = tmp_path / "clearhead"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "native"))
    if native is not None and hasattr(native, "__file__"):
        shutil.copy(native.__file__, copy)
    for file, before, addition in EDITS:
        text = (copy / file).read_text(encoding="utf-8")
        assert before in text, (file, before)
        (copy / file).write_text(text.replace(before, before + addition), encoding="utf-8")
    assert len({file for file, *_ in EDITS}) == 3
    interpreted = importlib.util.find_spec("triton") is not None
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), **({"TRITON_INTERPRET": "1"} if interpreted else {})}
    done = subprocess.run(
        [sys.executable, "-c", USES, str(tmp_path), "yes" if interpreted else "no"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "found everywhere"


def test_all_that_speaks_of_observations_speaks_of_the_same() -> None:
    names = list(OBSERVATIONS)
    assert [field.name for field in dataclasses.fields(Want)] == names
    assert {field.name for field in dataclasses.fields(Observed)} >= set(names)
    assert set(inspect.signature(ch.observe).parameters) >= set(names)
    assert set(COLLECTORS) == set(names)
    if native is not None:
        assert set(native.observes()) == set(names)


# Where kernels and the call itself may name an observation: the recipe's files. Not counted are those that read one
# (watching's summary and its default, plots, the command line) and words for people. A GPU family of its own, as
# Hopper or Pallas under JAX, may have a second look of its own; what that does not know is left to others.
FAMILIES = ("kernels/hopper/", "kernels/triton/in_xla.py", "kernels/triton/pallas_kernel.py")
RECIPE = {
    "core/observations.py",
    "calls.py",
    "kernels/collect.py",
    "native/observe.h",
    "kernels/gpu/second_look.py",
    "kernels/gpu/observe_kernel.py",
}


def names_in(path: Path) -> set[str]:
    """The words of a file's code: no comments, no docstrings, of strings only those of one word."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(re.findall(r"\w+", re.sub(r"//.*", "", text)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string.strip("\"'") for token in tokens if token.type in (tokenize.NAME, tokenize.STRING)}


def test_an_observation_is_named_in_six_files_at_most() -> None:
    wings = [path for wing in ("core", "kernels", "native", "torch_bridge") for path in (PACKAGE / wing).rglob("*.*")]
    counted = [path for path in [*wings, PACKAGE / "calls.py"] if path.suffix in (".py", ".h", ".cpp")]
    naming = {path.relative_to(PACKAGE).as_posix() for path in counted if "received" in names_in(path)}
    assert {name for name in naming if not name.startswith(FAMILIES)} == RECIPE
    assert len(RECIPE) <= 6


def test_a_file_keeps_the_share_of_the_keys_beside_a_sink(tmp_path: Path) -> None:
    class Sinking(torch.nn.Module):
        def forward(self, x: object) -> object:
            return ch.attention(x, x, x, sinks=torch.zeros(2))

    model = Sinking().eval()
    with ch.watch(model) as seen:
        model(torch.randn(1, 2, 5, 8))
    seen.save(tmp_path / "seen.safetensors")
    again = ch.Seen.load(tmp_path / "seen.safetensors")
    assert np.array_equal(again[0].observed.share, seen[0].observed.share.numpy())
