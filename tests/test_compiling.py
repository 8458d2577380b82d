"""The kernels of a call are compiled side by side before the first of its sort runs, and nothing is launched for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import MARKS

from clearhead.core.problem import pose

pytestmark = MARKS


class Noted:
    """A kernel that notes what it is compiled for."""

    def __init__(self, fails: bool = False) -> None:
        self.compiled: list[Any] = []
        self.fails = fails

    def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
        self.compiled.append((args, grid, options))
        if self.fails:
            raise RuntimeError("no such instruction")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`compiled_ahead` on a machine that is said to have a GPU, with nothing met before."""
    from clearhead.kernels.gpu import compiling

    monkeypatch.setattr(compiling, "_met", set())
    monkeypatch.setattr(compiling, "capturing", lambda device: False)
    return compiling.compiled_ahead


def new_call(keys: int = 100) -> Any:
    from clearhead.kernels.gpu.call import Call

    call = Call(pose(*(torch.zeros((1, 2, n, 16)) for n in (70, keys, keys))))
    call.device = torch.device("cuda", 0)
    return call


def test_nothing_is_launched_and_each_sort_is_compiled_once(ahead: Any) -> None:
    kernel = Noted()
    for keys in (100, 100, 90, 300):
        call = new_call(keys)
        launch = call.launch
        ahead(call, "sort", lambda call=call: call.launch("name", kernel, (3,), 5, BLOCK=16))
        assert call.launch is launch
    assert kernel.compiled == [((5,), (3,), {"BLOCK": 16})] * 2, "100 and 90 keys are alike, 300 are not"
    ahead(new_call(), "another sort", lambda: None)
    assert len(kernel.compiled) == 2


def test_what_fails_is_left_to_the_call_in_earnest(ahead: Any) -> None:
    call = new_call()
    launch = call.launch
    ahead(call, "sort", lambda: call.launch("name", Noted(fails=True), (3,)))
    assert call.launch is launch


def test_without_threads_kernels_are_compiled_when_they_are_launched(ahead: Any, monkeypatch: Any) -> None:
    from clearhead.kernels.gpu import compiling

    monkeypatch.setattr(compiling, "TOGETHER", None)
    kernel, call = Noted(), new_call()
    ahead(call, "sort", lambda: call.launch("name", kernel, (3,)))
    assert not kernel.compiled
