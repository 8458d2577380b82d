"""Types as a user's checker sees them: the marker is there, and what comes out is typed as what went in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import typed_user

import clearhead as ch

ROOT = Path(__file__).parents[1]
USER = ROOT / "tests" / "typed_user.py"


def test_the_package_says_that_it_is_typed() -> None:
    assert files("clearhead").joinpath("py.typed").is_file()


@pytest.fixture(scope="module")
def said() -> dict[int, str]:
    """What mypy says of the user's file, by line; the settings and the cache are those of `make lint`."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", USER.relative_to(ROOT)],
        cwd=ROOT, env={**os.environ, "MYPYPATH": "src"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    found = re.findall(r"^(\S+):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {Path(path).name for path, _, _ in found} == {USER.name}, done.stdout
    return {int(line): message for _, line, message in found}


def test_mypy_infers_the_library_of_the_arrays(said: dict[int, str]) -> None:
    refused = marked()
    assert {line: message for line, message in said.items() if line not in refused} == {}


def test_mypy_names_every_mistake(said: dict[int, str]) -> None:
    refused = marked()
    assert len(refused) > 10
    assert {line: text for line, text in refused.items() if line not in said} == {}


def marked() -> dict[int, str]:
    """The lines that mypy must not take."""
    lines = USER.read_text().splitlines()
    return {number: line.strip() for number, line in enumerate(lines, 1) if line.endswith("# refused")}


def test_what_is_typed_is_there() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 4)).astype(np.float32)
    typed_user.with_numpy(q, k, v)
    typed_user.with_numpy_that_says_more(q)
    typed_user.with_torch(*map(torch.from_numpy, (q, k, v)))
    typed_user.with_jax(*map(jnp.asarray, (q, k, v)))
    typed_user.values(q)
    seen = ch.observe(q, k, v)
    typed_user.left_open(seen, seen.partial)
    typed_user.imported_later(ch.nn.MultiHeadAttention(4, 2), torch.from_numpy(q))


@pytest.mark.parametrize("part", ["top", "map", "queries"])
def test_parts_of_an_observation_stay_tuples(part: str) -> None:
    # a library that maps over trees asks for these
    q = np.random.default_rng(0).standard_normal((2, 3, 4))
    found = getattr(ch.observe(q, q, q, top=2, map=(2, 2), queries=[0]), part)
    assert isinstance(found, tuple)
    first, second = found
    assert type(found)._make((first, second))._fields == type(found)._fields
    assert torch.utils._pytree.tree_map(type, found) == type(found)(np.ndarray, np.ndarray)
