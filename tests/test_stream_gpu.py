"""Keys that stay in the host's memory for queries on a GPU; what of it can be seen without one."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_gpu import MARKS

import clearhead as ch
from clearhead.distributed import on_disk, shuttle, stream, stream_observe


def test_heads_are_copied_one_by_one_where_they_lie_apart() -> None:
    whole = torch.randn(2, 3, 50, 4)
    for part in (whole, whole[..., 7:31, :], whole[0, ..., 7:31, :], whole[..., 9:9, :], whole[:0]):
        there = torch.full(part.shape, torch.nan)
        shuttle.copy_heads(there, part)
        assert torch.equal(there, part)
    assert not shuttle.straight(whole)  # not pinned, and so put together first


class Watched:
    """CUDA as a log: streams and events that say what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events = 0

    def Stream(self, device: Any) -> Any:  # as in PyTorch
        log = self.log

        class Stream:
            def wait_event(self, event: Any) -> None:
                log.append(f"wait {event.name}")

        return Stream()

    def Event(self) -> Any:  # as in PyTorch
        watched, self.events = self, self.events + 1

        class Event:
            name = f"event {self.events}"

            def record(self, stream: Any) -> None:
                watched.log.append(f"record {self.name}")

        return Event()

    def current_stream(self, device: Any) -> Any:
        return self.Stream(device)

    @contextmanager
    def stream(self, stream: Any) -> Any:
        yield


def test_a_place_is_filled_again_when_what_was_computed_from_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, whole = Watched(), torch.randn(2, 60, 4)
    monkeypatch.setattr(torch, "cuda", watched)
    monkeypatch.setattr(shuttle, "straight", lambda part: True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    way, places = shuttle.Shuttle(torch.device("cpu")), []
    for number in range(6):
        part = whole[:, 10 * number : 10 * number + 10]
        k, v, berth = way.bring((part, -part))
        assert torch.equal(k, part)
        assert torch.equal(v, -part)
        places.append(k.data_ptr())
        way.take(berth)
        way.leave(berth)
    assert len(set(places)) == shuttle.PLACES
    assert places[:2] == places[4:]
    # of each chunk: where its place was used before, wait for that; it arrives, is waited for, and is used
    assert watched.log[:3] == ["record event 1", "wait event 1", "record event 2"]
    assert watched.log[12:16] == ["wait event 2", "record event 9", "wait event 9", "record event 10"]


class TestOnGPU:
    pytestmark = MARKS

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_host_held_keys_give_what_keys_on_the_gpu_give(self, dtype: torch.dtype, tmp_path: Path) -> None:
        torch.manual_seed(0)
        q = torch.randn(2, 8, 5, 64, device="cuda", dtype=dtype)
        k, v = (torch.randn(2, 4, 5003, 64).to(dtype) for _ in range(2))
        exact = ch.attention(q.double(), k.cuda().double(), v.cuda().double(), mask=ch.window(3000))
        budget = 2 * (ch.attention(q, k.cuda(), v.cuda(), mask=ch.window(3000)).double() - exact).abs().max() + 1e-6
        sources: dict[str, Any] = {
            "pageable": (k, v),
            "pinned": (k.pin_memory(), v.pin_memory()),
            "a part on the GPU": [(k[:, :, :2000], v[:, :, :2000]), (k[:, :, 2000:].cuda(), v[:, :, 2000:].cuda())],
        }
        if dtype is torch.float32:
            np.save(tmp_path / "k.npy", k.numpy())
            np.save(tmp_path / "v.npy", v.numpy())
            sources["disk"] = (on_disk(tmp_path / "k.npy"), on_disk(tmp_path / "v.npy"))
        for name, source in sources.items():
            for chunk in (None, 999):  # the last of several is shorter
                found = stream(q, source, chunk=chunk, mask=ch.window(3000))
                assert (found.double() - exact).abs().max() <= budget, (name, chunk)
        seen = stream_observe(q, sources["pinned"], chunk=999, mask=ch.window(3000), received=True, top=3, map=(5, 9))
        whole = ch.observe(
            q.float(), k.cuda().float(), v.cuda().float(), mask=ch.window(3000), received=True, map=(5, 9)
        )
        torch.testing.assert_close(seen.received, whole.received, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(seen.map.mean, whole.map.mean, rtol=1e-3, atol=1e-6)

    def test_parts_that_lie_on_both_are_attended_to_where_they_lie(self) -> None:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, n, 32, device="cuda") for n in (7, 300, 300))
        parts = [(k[:, :, :100].cpu(), v[:, :, :100].cpu()), (k[:, :, 100:], v[:, :, 100:])]
        whole = ch.attention(q, k, v, mask=ch.causal())
        torch.testing.assert_close(stream(q, parts, there=True, mask=ch.causal()), whole, rtol=1e-4, atol=1e-5)

    def test_a_gpu_holds_a_few_chunks_however_many_there_are(self) -> None:
        q = torch.randn(1, 8, 1, 64, device="cuda")
        k = torch.randn(1, 8, 131072, 64).pin_memory()  # 256 MiB
        stream(q, (k[:, :, :4096], k[:, :, :4096]), chunk=2048)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stream(q, (k, k), chunk=2048)  # 8 MiB each
        assert torch.cuda.max_memory_allocated() - before <= 80 * 2**20
