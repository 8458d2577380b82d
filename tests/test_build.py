"""How the compiled kernel is built: by Clang as by GCC, by nothing else, and what is said where it was not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from elsewhere import python

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src" / "clearhead" / "native"
KINDS = {"aarch64": ("neon", ()), "arm64": ("neon", ()), "x86_64": ("avx2", ("-mavx2", "-mfma", "-mf16c"))}
# enough of the suite to have every part of the kernel run
SOME = "plain- or wide or longer or grouped or negated or array or softcap or sinks or strided"


@pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang++; `make test-clang` installs it")
@pytest.mark.skipif(platform.machine() not in KINDS, reason="this machine has no instruction set of its own here")
@pytest.mark.skipif("CLEARHEAD_TEST_NATIVE" in os.environ, reason="another build is being tested")
def test_clang_builds_a_kernel_that_conforms(tmp_path: Path) -> None:
    isa, flags = KINDS[platform.machine()]
    wide = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c")
    sets = {"portable": (), isa: flags} | ({"avx512": wide} if isa == "avx2" else {})
    clang = ["clang++", "-std=gnu++17", "-O0", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    objects = []
    for name, more in sets.items():
        objects.append(str(tmp_path / f"{name}.o"))
        named = [f"-DCLEARHEAD_ISA={name}", f"-DCLEARHEAD_{name.upper()}"]
        run([*clang, *more, *named, "-c", str(NATIVE / "kernel.cpp"), "-o", objects[-1]])
    conforms([*clang, *objects], tmp_path, f"(compiled and numpy and not NaN and ({SOME})) or ({isa} and 513)")


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
@pytest.mark.skipif("CLEARHEAD_TEST_NATIVE" in os.environ, reason="another build is being tested")
@pytest.mark.parametrize("isa", ["amx", "avx512_bf16", "neon_bf16"])
def test_tiles_by_hand_give_what_instructions_must(isa: str, tmp_path: Path) -> None:
    # all but the instructions themselves, on any CPU: how keys, values, queries and weights lie in tiles
    compiler = ["c++", "-std=gnu++17", "-O1", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]
    named = ["-DCLEARHEAD_TILES_BY_HAND", f"-DCLEARHEAD_ISA={isa}", f"-DCLEARHEAD_{isa.upper()}"]
    run([*compiler, *named, "-c", str(NATIVE / "kernel.cpp"), "-o", str(tmp_path / "kernel.o")])
    near = "15 or 17 or 31 or 33 or 48 or 65 or 97 or 129 or 511 or 513"
    cases = f"(compiled and numpy and bfloat16) or ({isa} and ({near}))"
    conforms([*compiler, *named, str(tmp_path / "kernel.o")], tmp_path, cases)


def conforms(build: list[str], folder: Path, cases: str) -> None:
    """Cases of the suite, run by a program that `build` makes, with the kernel's objects among its arguments."""
    replay = str(folder / "replay")
    source = str(ROOT / "tests" / "native" / "replay.cpp")
    run([*build, f"-I{NATIVE}", source, str(NATIVE / "pool.cpp"), "-o", replay, "-lpthread"])
    environment = {
        "CLEARHEAD_EMULATE": f"'{replay}'",
        "CLEARHEAD_TEST_NATIVE": str(ROOT / "tests" / "native" / "emulated.py"),
    }
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:xdist", "-p", "no:cacheprovider"]
    said = run([*command, "-k", cases, "tests/test_conformance.py", "tests/test_borders.py"], **environment)
    assert int(said.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1]) > 50, said


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    shutil.which("cmake") is None, reason="there is no cmake beside the one that an installation brings"
)
def test_other_compilers_are_refused_in_words(tmp_path: Path) -> None:
    # what the file says of compilers, with a project that has one of another name
    text = (ROOT / "CMakeLists.txt").read_text()
    start = text.index("if(NOT CMAKE_CXX_COMPILER_ID")
    refusal = text[start : text.index("endif()", start)] + "endif()\n"
    (tmp_path / "CMakeLists.txt").write_text(
        f'cmake_minimum_required(VERSION 3.20)\nproject(x NONE)\nset(CMAKE_CXX_COMPILER_ID "MSVC")\n{refusal}'
    )
    done = subprocess.run(["cmake", "-S", tmp_path, "-B", tmp_path / "b"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "clearhead's compiled kernel needs GCC or Clang" in " ".join(done.stderr.split())


def test_an_installation_without_the_kernel_says_so() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    (failed,) = (override for override in settings["overrides"] if override["if"].get("failed"))
    assert failed["wheel"]["cmake"] is False
    assert "installed WITHOUT its compiled CPU kernel" in failed["messages"]["after-success"]


PLAN = """
import numpy as np, clearhead as ch
x = np.zeros((1, 4, 8), np.float32)
plan = ch.plan(x, x, x)
print(plan.kernel, "|", plan.others["compiled"])
assert plan.others["compiled"] in str(plan), plan
"""
MISSING = """
import sys
class Without:
    def __init__(self, own):
        self.own = own
    def find_spec(self, name, path=None, target=None):
        return None if name == "clearhead._native" else self.own.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""
BROKEN = """
import importlib.abc, sys
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "clearhead._native":
            raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.99' not found")
sys.meta_path.insert(0, Broken())
"""


def test_plan_says_that_the_kernel_was_not_built_and_what_to_do() -> None:
    done = python("-c", MISSING + PLAN)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "dense | refused: it was not built when clearhead was installed: it needs GCC or Clang with C++17; where there "
        "is one, `pip install --verbose --force-reinstall --no-deps` of the same source builds it, or shows why not\n"
    )


def test_plan_says_that_the_kernel_cannot_be_loaded() -> None:
    done = python("-c", BROKEN + PLAN)
    assert done.returncode == 0, done.stderr
    assert "| refused: it was built, but cannot be loaded: libstdc++.so.6: version" in done.stdout
