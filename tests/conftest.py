"""What every test module shares."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

# One thread for each worker: there are as many workers as cores, and threads that wait for one another take time from
# the other worker. The compiled kernel has its own, which its tests ask for by number.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# what is not a test has no examples to run, and imports much
collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]


class OtherBuild(importlib.abc.MetaPathFinder):
    """Finds the compiled kernel at a given path: how one built with sanitizers is put under the same tests."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "clearhead._native":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["CLEARHEAD_TEST_NATIVE"])


if "CLEARHEAD_TEST_NATIVE" in os.environ:
    assert "clearhead" not in sys.modules
    sys.meta_path.insert(0, OtherBuild())

import numpy as np  # noqa: E402  # as below
import pytest  # noqa: E402  # as below
import torch  # noqa: E402  # as below
from hypothesis import settings  # noqa: E402  # after the other build is in place, as all that follows

# The same examples on every run, so that a change is judged by what it changed; HYPOTHESIS_PROFILE=search draws others
# and without a deadline: on a busy machine the first example, which imports, takes longer than any
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

import interpreted  # noqa: E402  # as above

interpreted.import_kernels()
torch.set_num_threads(1)

import libraries  # noqa: E402, F401  # sets XLA's flags before anything imports JAX


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPU kernels in Triton's interpreter, and nothing known of earlier calls."""
    from clearhead.kernels.gpu import call

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(call, "_calls", type(call._calls)())
    monkeypatch.setattr(call, "_families", type(call._families)())
    with np.errstate(all="ignore"):  # NaN and infinities are put in on purpose
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no GPU, one of each function that needs one is left, to say that it is skipped."""
    if torch.cuda.is_available():
        return
    seen: set[str] = set()
    for item in items[:]:
        if item.get_closest_marker("gpu"):
            name = item.nodeid.partition("[")[0]
            if name in seen:
                items.remove(item)
            seen.add(name)
