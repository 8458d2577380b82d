"""The fastest kernel, chosen by measurement: the table that ships, what is measured and kept, and what `plan` says."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.problem import Problem, pose
from clearhead.kernels import choose as chooser
from clearhead.kernels import fastest as module
from clearhead.kernels import speeds
from clearhead.kernels.contract import Kernel, Ran
from clearhead.kernels.dense import dense
from clearhead.kernels.speeds import Sizes, Speeds

LONG = Sizes("forward", True, 128, 128, 1, 16, 16384, 16384)


def test_every_row_that_ships_is_of_this_kind_and_names_ways_that_there_are() -> None:
    rows = speeds.shipped()
    assert len(rows) > 20
    for sizes, rates in rows.items():
        assert sizes.passes in ("forward", "training")
        assert set(rates) <= {"cudnn", "flash", "efficient", "hopper", "triton"}
        assert all(0 < rate < 1000 for rate in rates.values()), "TFLOP/s"
        assert sizes.distance(sizes) == 0


def test_sizes_near_a_row_are_answered_by_it() -> None:
    known = Speeds("NVIDIA H200")
    row = max((row for row in known.shipped if row.passes == "forward"), key=lambda row: row.queries)
    ways = tuple(known.shipped[row])
    found = known.known(row._replace(rows=row.rows + 3, queries=row.queries * 4, keys=row.keys * 4), ways)
    assert found is not None
    assert found.rates == known.shipped[row]
    assert found.source == "measured on an NVIDIA H200"
    assert known.known(row, ("nobody",)) is None
    assert Speeds("NVIDIA A100").known(row, ways) is None, "another device"


def test_the_nearest_row_decides_and_other_kinds_never() -> None:
    full, causal = LONG._replace(causal=False), LONG
    rows = {full: {"a": 1.0, "b": 2.0}, causal: {"a": 2.0, "b": 1.0}, full._replace(head_dim=64): {"a": 5.0, "b": 6.0}}
    assert speeds.nearest(rows, full._replace(rows=64), ("a", "b"), math.inf) == {"a": 1.0, "b": 2.0}
    assert speeds.nearest(rows, causal._replace(head_dim=96), ("a", "b"), math.inf) == {"a": 2.0, "b": 1.0}
    assert speeds.nearest(rows, causal._replace(passes="training"), ("a", "b"), math.inf) is None
    assert speeds.nearest(rows, full._replace(queries=1), ("a", "b"), math.inf) is None, "few queries"
    assert speeds.nearest(rows, full._replace(rows=1), ("a", "b"), 1.5) is None, "too far"


def test_work_counts_products() -> None:
    sizes = Sizes("forward", False, 3, 5, 1, 2, 7, 11)
    assert sizes.work == 2 * 2 * 7 * 11 * (3 + 5)
    assert sizes._replace(causal=True).work == sizes.work / 2
    assert sizes._replace(passes="training").work == 3.5 * sizes.work


def test_what_was_measured_is_kept_on_disk_and_wins(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "speeds.json"
    here = Speeds("NVIDIA H200", file)
    listed = here.known(LONG, ("cudnn", "hopper"))
    assert listed is not None
    here.learn(LONG, {"cudnn": 1.0, "hopper": 2.0})
    Speeds("another", file).learn(LONG, {"cudnn": 7.0})
    for again in (here, Speeds("NVIDIA H200", file)):
        found = again.known(LONG, ("cudnn", "hopper"))
        assert found is not None
        assert found.rates == {"cudnn": 1.0, "hopper": 2.0}
        assert found.source == "measured on this NVIDIA H200"
    written = json.loads(file.read_text())
    written["NVIDIA H200"]["versions"] = "torch of yesterday"
    file.write_text(json.dumps(written))
    assert Speeds("NVIDIA H200", file).known(LONG, ("cudnn", "hopper")) == listed, "another PyTorch is another speed"
    for spoiled in ("", "[]", '{"NVIDIA H200": 3}', '{"NVIDIA H200": {"versions": 1, "rows": [{}]}}'):
        file.write_text(spoiled)
        assert Speeds("NVIDIA H200", file).known(LONG, ("cudnn", "hopper")) == listed
    locked = tmp_path / "file"
    locked.write_text("")
    Speeds("x", locked / "speeds.json").learn(LONG, {"a": 1.0})  # a folder that cannot be made


def test_the_file_lies_beside_tritons_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert speeds.cache_file() == tmp_path / "clearhead-speeds.json"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert speeds.cache_file() == tmp_path / ".triton" / "cache" / "clearhead-speeds.json"


def test_measuring_ends_within_its_budget_and_finds_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise RuntimeError("No available kernel")

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    now = [0.0]  # seconds by a clock that only calls move

    def takes(seconds: float) -> Any:
        return lambda: now.__setitem__(0, now[0] + seconds)

    monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls = {"slow": takes(0.004), "quick": takes(0.001), "refuses": refuses}
    rates = speeds.measure(LONG, calls, lambda: None)
    assert rates == pytest.approx({"slow": LONG.work / 4e9, "quick": LONG.work / 1e9, "refuses": 0.0})
    assert now[0] < 0.005 + speeds.BUDGET + speeds.REPEATS * 0.004, "once each to start with, and then the budget"
    with pytest.raises(torch.OutOfMemoryError):
        speeds.measure(LONG, {"full": full}, lambda: None)


class Timed:
    """A kernel that computes by the formula, as on a GPU, and takes some seconds more by the clock of measurements."""

    ahead = 0.0  # seconds of that clock for which nobody waits

    def __init__(self, name: str, seconds: float, reason: str | None = None, gradients: str | None = None) -> None:
        self.name, self.seconds, self.reason, self.without = name, seconds, reason, gradients
        self.seen: list[Problem] = []

    def rejects(self, problem: Problem) -> str | None:
        return self.reason

    def rejects_gradients(self, problem: Problem) -> str | None:
        return self.reason or self.without

    def run(self, problem: Problem) -> Ran:
        self.seen.append(problem)
        Timed.ahead += self.seconds
        return dense.run(problem)

    def gradients(self, problem: Problem, *given: Any) -> Any:
        return dense.gradients(problem, *given)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Speeds:
    """PyTorch as on a machine with a GPU that is in no table."""
    known = Speeds("Some GPU", tmp_path / "speeds.json")
    monkeypatch.setattr(module, "speeds_of", lambda device: known)
    monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + Timed.ahead))
    monkeypatch.setattr(module, "SHORT", 0.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return known


def problem_of(n: int = 6, heads: int = 4, **options: Any) -> Problem:
    return pose(*torch.randn(3, 2, heads, n, 4, generator=torch.Generator().manual_seed(1)).unbind(0), **options)


def test_the_fastest_is_found_once_and_remembered(gpu: Speeds) -> None:
    slow, quick = Timed("slow", 1.0), Timed("quick", 0.0)
    for _ in range(3):
        choice = module.fastest(problem_of(), "forward", (slow, quick))
        assert (choice.kernel, choice.way) == (quick, "quick")
        assert choice.found is not None
        assert set(choice.found.rates) == {"slow", "quick"}
        measured = len(slow.seen)
        assert measured, "by running it"
    assert len(slow.seen) == measured, "and not again"
    assert module.figures(problem_of(), "forward", quick, slow) is not None
    assert "Some GPU" in str(module.figures(problem_of(), "forward", quick, slow))


def test_nothing_is_measured_while_a_graph_is_captured(gpu: Speeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first, second = Timed("first", 1.0), Timed("second", 0.0)
    choice = module.fastest(problem_of(), "forward", (first, second))
    assert (choice.kernel, choice.found) == (first, None)
    assert not first.seen
    assert not gpu.measured


def test_a_short_call_starts_no_other_kernel(gpu: Speeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT", 1e12)
    first, second = Timed("first", 1.0), Timed("second", 0.0)
    assert module.fastest(problem_of(), "forward", (first, second)).kernel is first
    assert not second.seen
    asked = len(first.seen)
    assert module.fastest(problem_of(), "forward", (first, second)).kernel is first
    assert len(first.seen) == asked


@pytest.mark.parametrize("group", [1, 2])
def test_a_long_call_is_measured_on_a_part(group: int, gpu: Speeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG", 2.0 * 2 * 8 * 8 * 8)
    monkeypatch.setattr(module, "LONGEST", 8)
    q, k, v = (torch.randn(3, heads, 20, 4) for heads in (4, 4 // group, 4 // group))
    problem = pose(q, k, v, mask=ch.causal())
    part = module.shortened(problem, module.sizes_of(problem, "forward"))
    assert part.grid.shape == (1, 4, 8, 8)
    assert part.group == group
    assert torch.equal(part.q, q[:1, : part.grid.heads, :8])
    whole = pose(q[:1, :, :8], k[:1, :, :8], v[:1, :, :8])
    assert module.shortened(whole, module.sizes_of(whole, "forward")._replace(rows=1)) is whole


def test_gradients_are_timed_where_they_will_be_asked_for(gpu: Speeds) -> None:
    kernel, other = Timed("kernel", 0.0), Timed("other", 1.0)
    assert module.fastest(problem_of(), "training", (kernel, other)).kernel is kernel
    assert all(problem.differentiated for problem in kernel.seen)


def test_gradients_come_from_another_kernel_where_the_first_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    without = Timed("without", 0.0, gradients="it has none")
    assert chooser.choose_gradients(problem_of(), without).name == "dense"
    with pytest.raises(ch.KernelRefused, match="it has none"):
        chooser.choose_gradients(problem_of(), without, "without")
    whole = Timed("whole", 0.0)
    assert chooser.choose_gradients(problem_of(), whole) is whole


def test_what_another_kernel_ran_is_differentiated_by_the_one_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    without = Timed("without", 0.0, gradients="it has none")
    kernels: tuple[Kernel, ...] = (without, *chooser.KERNELS)
    monkeypatch.setattr(chooser, "KERNELS", kernels)
    monkeypatch.setattr(chooser, "preference", lambda problem: kernels)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 6, 4, dtype=torch.float64).unbind(0))
    output = ch.attention(q, k, v, mask=ch.causal())
    assert without.seen
    found = torch.autograd.grad(output.sum(), (q, k, v))
    right = torch.autograd.grad(ch.attention(q, k, v, mask=ch.causal(), kernel="dense").sum(), (q, k, v))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ch.KernelRefused, match="'without' refused: it has none"):
        ch.attention(q, k, v, kernel="without")
    with torch.no_grad():
        ch.attention(q, k, v, kernel="without")


def test_plan_shows_the_figures_it_chose_by(gpu: Speeds, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = Timed("slow", 1.0), Timed("quick", 0.0)
    monkeypatch.setattr(quick, "way", lambda problem: SimpleNamespace(kind=None), raising=False)
    monkeypatch.setattr(quick, "settle", lambda *given: None, raising=False)
    monkeypatch.setattr(chooser, "KERNELS", (quick, slow, *chooser.KERNELS))
    monkeypatch.setattr(chooser, "ON_GPU", (quick, slow))
    monkeypatch.setattr(chooser, "vendor", quick)
    monkeypatch.setattr(chooser, "on_gpu", lambda problem: True)
    monkeypatch.setattr(chooser, "_quickest", {})
    gpu.learn(module.sizes_of(problem_of(), "forward"), {"quick": 656.0, "slow": 588.0})
    q, k, v = torch.randn(3, 2, 4, 6, 4).unbind(0)
    plan = ch.plan(q, k, v)
    assert plan.kernel == "quick"
    words = "able, but 'quick' is preferred: 656 against 588 TFLOP/s, measured on this Some GPU"
    assert plan.others["slow"] == words
    assert words in str(plan)
    assert not slow.seen, "a plan runs nothing where it is known"


def test_small_calls_of_numpy_are_answered_at_once() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 8))
    np.testing.assert_allclose(dense.at_once(q, k, v, None, None), ch.attention(q, k, v, kernel="dense"), rtol=1e-12)
    assert dense.at_once(q, k, v, ch.causal(), None) is None
    assert dense.at_once(q, k, v, None, 0.5) is None
    assert dense.at_once(q, k, v.astype(np.float32), None, None) is None
    assert dense.at_once(*np.zeros((3, 5, 0)), None, None) is None


def test_plan_names_who_gives_gradients_where_they_are_wanted() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 4).unbind(0)
    assert ch.plan(q, k, v).gradients is None
    assert "gradients" not in str(ch.plan(q, k, v))
    plan = ch.plan(q.requires_grad_(), k, v)
    assert plan.gradients == plan.kernel
    assert f"\n  gradients     {plan.kernel}\n" in str(plan)
    with torch.no_grad():
        assert ch.plan(q, k, v).gradients is None


class Ends:
    """A kernel with two back ends, as on a GPU; one of them may have no gradients."""

    name = "ends"

    def __init__(self, *without: str) -> None:
        self.without, self.settled, self.ran = without, [], []

    def rejects(self, problem: Problem) -> str | None:
        return None

    def run(self, problem: Problem) -> Ran:
        return dense.run(problem)

    def gradients(self, problem: Problem, *given: Any) -> Any:
        return dense.gradients(problem, *given)

    def way(self, problem: Problem) -> Any:
        return SimpleNamespace(kind=problem.grid)

    def ways(self, problem: Problem, passes: str) -> tuple[str, ...]:
        return "left", "right"

    def calls(self, problem: Problem, passes: str) -> dict[str, Any]:
        return {name: self.call(name, passes) for name in self.ways(problem, passes)}

    def call(self, name: str, passes: str) -> Any:
        def call() -> None:
            self.ran.append(name)
            if passes == "training" and name in self.without:
                raise RuntimeError("No available kernel")

        return call

    def settle(self, problem: Problem, passes: str, name: str) -> None:
        self.settled.append((passes, name))


def test_gradients_that_a_table_promises_are_tried_before_they_are_relied_upon(gpu: Speeds) -> None:
    gpu.learn(module.sizes_of(problem_of(n=7), "training"), {"left": 2.0, "right": 1.0, "other": 0.5})
    ends, other = Ends("left"), Timed("other", 0.0)
    assert module.fastest(problem_of(), "training", (ends, other)).way == "right", "by the row beside"
    assert module.fastest(problem_of(), "training", (Ends("left", "right"), other)).kernel is other
    assert ends.ran == ["left", "right"]
    with pytest.raises(ch.KernelRefused, match="none of left, right gives gradients for these sizes"):
        module.fastest(problem_of(n=9), "training", (Ends("left", "right"),))


def test_that_one_refused_is_no_word_about_other_sizes(gpu: Speeds) -> None:
    sizes = module.sizes_of(problem_of(n=7), "forward")
    gpu.learn(sizes, {"left": 0.0, "right": 1.0})
    here, beside = gpu.known(sizes, ("left", "right")), gpu.known(sizes._replace(queries=8), ("left", "right"))
    assert here is not None
    assert beside is not None
    assert (here.rates, beside.rates) == ({"left": 0.0, "right": 1.0}, {"right": 1.0})


def test_what_does_not_compile_is_not_taken() -> None:
    class NoRoom(Exception):  # as Triton's are no RuntimeErrors
        pass

    def refuses() -> None:
        raise NoRoom

    assert speeds.measure(LONG, {"refuses": refuses, "runs": lambda: None}, lambda: None)["refuses"] == 0.0


def test_a_part_of_arrays_that_are_shared_by_batch_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG", 3e4)
    problem = pose(torch.randn(4, 8, 2, 6, 4), *torch.randn(2, 4, 1, 2, 6, 4).unbind(0))
    part = module.shortened(problem, module.sizes_of(problem, "forward"))
    assert part.grid.batch == (26,)
    assert torch.equal(part.q, problem.q.reshape(32, 2, 6, 4)[:26])
    assert torch.equal(part.k, problem.k.expand(4, 8, 2, 6, 4).reshape(32, 2, 6, 4)[:26])


def test_what_was_chosen_is_settled_again(gpu: Speeds, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, faster = Ends(), Timed("faster", 0.0)
    monkeypatch.setattr(chooser, "ON_GPU", (ends, faster))
    monkeypatch.setattr(chooser, "vendor", ends)
    monkeypatch.setattr(chooser, "on_gpu", lambda problem: True)
    monkeypatch.setattr(chooser, "_quickest", {})
    gpu.learn(module.sizes_of(problem_of(), "forward"), {"left": 1.0, "right": 2.0, "faster": 3.0})
    assert chooser.choose(problem_of()) is faster
    assert not ends.settled
    gpu.learn(module.sizes_of(problem_of(), "forward"), {"faster": 0.5})
    chooser._quickest.clear()
    for _ in range(2):
        assert chooser.choose(problem_of()) is ends
    assert ends.settled == [("forward", "right")] * 2, "also after others had to make room"


def test_threads_read_while_another_learns(gpu: Speeds) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def learn(n: int) -> None:
        gpu.learn(LONG._replace(rows=n + 1), {"a": 1.0, "b": 2.0})
        assert gpu.known(LONG._replace(rows=n + 1), ("a", "b")) is not None

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(learn, range(40)))


def test_who_has_no_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert speeds.cache_file() is None
    Speeds("x", None).learn(LONG, {"a": 1.0})


def test_a_file_that_is_no_table_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    file.write_text("[]")
    Speeds("x", file).learn(LONG, {"a": 1.0})
    assert "x" in json.loads(file.read_text())


def test_where_there_is_no_room_to_try_gradients_they_are_not_refused(gpu: Speeds) -> None:
    ends = Ends()
    ends.call = lambda name, passes: lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    assert module.runs(ends, "left", problem_of())
