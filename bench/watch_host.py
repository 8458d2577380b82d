"""What watching costs the host: microseconds of Python a watched call, and of opening and closing a watch.

    python bench/watch_host.py [--json FILE] [--profile]

A Llama of 22 layers and next to no width: what it computes takes no time, and what is left is Python. Two ways:

- "GPU": the path of a GPU. Where there is one it is that, on it; else CPU tensors say that they are on a GPU, streams
  and events are nobody's, and kernels are launched that do nothing: all of the host's work but the driver's.
- "CPU": the path of a CPU as it is, kernels included, on four tokens.

Each row is the median of a watched run less the median of an unwatched one, by the calls that were watched. --profile
prints where the time of the GPU's path goes, by function.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import clearhead as ch
from clearhead.core.observations import Top
from clearhead.kernels import prepared
from clearhead.watching import leaving

LAYERS, GENERATED = 22, 16
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64
WANTS: dict[str, dict[str, Any]] = {"entropy": {}, "top 8 + received": {"top": 8, "received": True}}


def llama() -> Any:
    """22 layers whose products are as small as they may be."""
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, head_dim=HEAD_DIM, vocab_size=31, max_position_embeddings=4096,
        attn_implementation="sdpa", eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


class Stream:
    """A stream of nobody's, and the events on it."""

    cuda_stream = 0

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def launch() -> Any:
    """A launch of nothing, with as many arguments as kernels have."""
    from clearhead.kernels.gpu.bypass import DirectLaunch

    return DirectLaunch(lambda: 0, lambda *args: None, [0] * 45, [(13 + n, n % 5, 0) for n in range(10)], [])


def norms_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """In place of what finds the largest numbers: those of zeros."""
    from clearhead.kernels.gpu.packed import programs
    from clearhead.kernels.gpu.replay import Allocation, Replay

    shape = (sum(map(programs, (q, k, v))),)
    make = torch._C._dynamo.guards._empty_strided_cpu
    return Replay(4, [Allocation(shape, (1,), torch.int32, q.device, make, zeros=False)], [launch()], (4,))


class Played(dict[Any, Any]):
    """Observed calls of every kind: rooms are made and launches counted as for the real ones, and nothing is computed.

    It stands in for `prepared.OBSERVED`: a kind that it is asked for is one that was there before.
    """

    def get(self, kind: Any, _: Any = None) -> Any:
        found = super().get(kind)
        if found is None:
            found = self[kind] = self.made(*kind)
        return found

    def made(self, kind: tuple[Any, ...], asked: tuple[Any, ...], _: Any) -> Any:
        from clearhead.kernels.gpu import bypass
        from clearhead.kernels.gpu.allocate import strides_of
        from clearhead.kernels.gpu.call import Forward
        from clearhead.kernels.gpu.replay import Allocation, Replay
        from clearhead.kernels.gpu.run import Again, Looked

        (q, k, v), (top, received), device = kind[0][:3], asked[:2], torch.device("cpu")
        rows, make = tuple(q[:-1]), bypass.QUICK_EMPTY["cpu"]
        shapes = [(*rows, v[-1])] + [rows] * 5
        dtypes = [torch.float32] + [torch.float32] * 5
        more: dict[str, Any] = {}
        if received:
            more["received"], shapes, dtypes = len(shapes) + 4, [*shapes, (*rows[:-1], k[-2])], [*dtypes, torch.float32]
        if top:
            more["top"] = Top(len(shapes) + 4, len(shapes) + 5)
            shapes, dtypes = [*shapes, *([(*rows, top)] * 2)], [*dtypes, torch.int64, torch.float32]
        rooms = [
            Allocation(shape, strides_of(shape), dtype, device, make, zeros=False)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        steps = [launch() for _ in range(6 if more else 1)]
        return Again("hopper", Replay(4, rooms, steps, Looked(Forward(4, 5, 6, 7, 8, 9, None), more)), None)


def pretending() -> ExitStack:
    """CPU tensors are said to lie on a GPU; nothing where there is one."""
    stack = ExitStack()
    if torch.cuda.is_available():
        return stack
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are imported with no GPU to compile them for
    from clearhead.kernels.gpu import packed

    current = Stream()
    played = Played()
    for place, name, stand_in in (
        (torch.Tensor, "is_cuda", property(lambda self: True)),
        (torch.Tensor, "is_cpu", property(lambda self: False)),
        (torch.cuda, "current_device", lambda: -1),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_stream", lambda *_: current),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Stream),
        (torch.cuda, "stream", lambda stream: stream),
        (leaving, "pinned", lambda count, dtype: torch.empty(count, dtype=dtype)),
        (packed, "norms_of", norms_of),
        (prepared, "OBSERVED", played),
        (__import__("clearhead.calls", fromlist=["calls"]), "OBSERVED", played),
    ):
        stack.enter_context(mock.patch.object(place, name, stand_in, create=True))
    return stack


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of each, medians, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 3:
                times[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(taken) for name, taken in times.items()}


def forwards(model: Any, ids: torch.Tensor, way: str, rounds: int) -> dict[str, float]:
    """Microseconds a watched call, and of a watch that sees nothing."""

    def plain() -> None:
        model.model(ids, use_cache=False)

    def watched(want: dict[str, Any]) -> None:
        with ch.watch(model, want=want) as seen:
            plain()
        assert len(seen) == LAYERS

    def opened() -> None:
        with ch.watch(model, want={}):
            pass

    watched({})
    found = in_turn(
        {"unwatched": plain, "opened": opened, **{name: partial(watched, want) for name, want in WANTS.items()}}, rounds
    )
    rows = {f"{way}: unwatched forward": found["unwatched"], f"{way}: opening and closing a watch": found["opened"]}
    for name in WANTS:
        rows[f"{way}: a watched call, {name}"] = (found[name] - found["unwatched"] - found["opened"]) / LAYERS
    return rows


def generating(model: Any, way: str, rounds: int) -> dict[str, float]:
    ids = torch.ones(1, 8, dtype=torch.long, device=model.device)

    def plain() -> None:
        model.generate(ids, max_new_tokens=GENERATED, do_sample=False)

    def watched() -> None:
        with ch.watch(model, want=WANTS["top 8 + received"]):
            plain()

    watched()
    found = in_turn({"unwatched": plain, "watched": watched}, rounds)
    more = found["watched"] - found["unwatched"]
    return {
        f"{way}: generating, unwatched step": found["unwatched"] / GENERATED,
        f"{way}: generating, a watched call": more / LAYERS / GENERATED,
    }


def profiled(model: Any, ids: torch.Tensor) -> None:
    """Where the time of watched forwards goes."""
    taken = cProfile.Profile()
    for number in range(23):
        if number == 3:
            taken.enable()
        with ch.watch(model, want=WANTS["top 8 + received"]):
            model.model(ids, use_cache=False)
    taken.disable()
    pstats.Stats(taken).sort_stats("tottime").print_stats("clearhead|method|built-in|torch", 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--rounds", type=int, default=30, help="how often each is timed")
    parser.add_argument("--profile", action="store_true", help="say where the time goes, by function")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: dict[str, float] = {}
    with torch.no_grad():
        with pretending():
            # a GPU has nothing to do at 128 tokens, and a CPU at four; half precision is what GPUs are for
            tokens, dtype = (128, torch.bfloat16) if device == "cuda" else (4, torch.float32)
            model, ids = llama().to(device, dtype), torch.ones(1, tokens, dtype=torch.long, device=device)
            if options.profile:
                profiled(model, ids)
                return
            rows |= forwards(model, ids, "GPU", options.rounds)
            rows |= generating(model, "GPU", max(3, options.rounds // 6))
        if device == "cpu":
            model = llama()
            rows |= forwards(model, ids, "CPU", options.rounds)
            rows |= generating(model, "CPU", max(3, options.rounds // 6))
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, {device}")
    for name, microseconds in rows.items():
        print(f"  {name:<45} {microseconds:10,.1f} µs")
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.machine(), "microseconds": rows}, indent=1))


if __name__ == "__main__":
    main()
