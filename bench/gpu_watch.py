"""What watching costs on a GPU: a Llama of 1.1 B random weights in bfloat16, forwards, `generate` and training steps.

A section of `bench/gpu.py`, `watch`. Times are those of a clock on the wall, from one end of all work on the GPU to the
next, copies to the host included; medians, taken in turn in one run. A watch is opened and closed with every forward,
as people do.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from turns import together

import clearhead as ch

DEVICE = "cuda"
TOP = {"top": 8, "received": True}
# tokens, and the ratios to the unwatched forward that are asked for: entropy alone; the largest 8 and received
ROWS = {128: (1.3, 1.5), 1_024: (1.2, 1.4), 4_096: (1.15, 1.35), 16_384: (1.15, 1.7)}
BEYOND = 64  # MiB on the GPU, at most, beyond the unwatched forward
GENERATED = 64
PREFILL = 131_072


def llama(layers: int = 22, attention: str = "sdpa") -> Any:
    """The shape of a Llama of 1.1 B: 32 heads of 64 features over 4 key heads. Its weights are made on the GPU."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, vocab_size=32_000, max_position_embeddings=PREFILL, attn_implementation=attention,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def in_turn(calls: dict[str, Callable[[], object]], rounds: int = 7, warm: int = 3) -> dict[str, float]:
    """Milliseconds of each, medians: each begins when the GPU has nothing to do, and ends so."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + warm):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if number >= warm:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak(call: Callable[[], object]) -> float:
    """MiB that a call has at most beyond what was there before it."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def watch(bench: Any) -> None:
    """All rows."""
    with torch.no_grad():
        model = llama()
        forwards(bench, model)
        generating(bench, model)
    del model
    torch.cuda.empty_cache()
    training(bench)
    alone(bench)
    evicting(bench)


def forwards(bench: Any, model: Any) -> None:
    for tokens, (entropy, top) in ROWS.items():
        ids = torch.randint(32_000, (1, tokens), device=DEVICE)

        def plain(ids: torch.Tensor = ids) -> None:
            model.model(ids, use_cache=False)

        def watched(want: dict[str, Any], ids: torch.Tensor = ids) -> None:
            with ch.watch(model, want=want):
                model.model(ids, use_cache=False)

        calls = {"sdpa": plain, "entropy": lambda: watched({}), "top 8 + received": lambda: watched(TOP)}
        found = in_turn(calls, rounds=15, warm=5)  # pinned memory is taken by the first ones
        bench.add(f"{tokens:,} tokens: unwatched", found["sdpa"], "ms")
        for name, most in (("entropy", entropy), ("top 8 + received", top)):
            bench.add(f"{tokens:,} tokens: {name}", found[name], "ms")
            bench.at_most(f"{tokens:,} tokens: {name} by unwatched", found[name] / found["sdpa"], "×", most)
            bench.at_most(
                f"{tokens:,} tokens: {name}, GPU memory beyond", peak(calls[name]) - peak(plain), "MiB", BEYOND
            )


def generating(bench: Any, model: Any) -> None:
    ids = torch.randint(1, 32_000, (1, 128), device=DEVICE)

    def plain() -> None:
        model.generate(ids, max_new_tokens=GENERATED, do_sample=False)

    def watched() -> None:
        with ch.watch(model, want=TOP):
            plain()

    found = in_turn({"unwatched": plain, "watched": watched}, rounds=3, warm=1)
    bench.add(f"generate {GENERATED} tokens: unwatched", found["unwatched"], "ms")
    bench.at_most(f"generate {GENERATED} tokens: watched by unwatched", found["watched"] / found["unwatched"], "×", 1.4)


def training(bench: Any) -> None:
    """A step of training with the largest logits of every hundredth: that one, and one between, in turn with others.

    Three models of the same sizes, of which a watch is open on two all the while.
    """
    ids = torch.randint(32_000, (1, 2_048), device=DEVICE)

    def step(model: Any) -> Callable[[], None]:
        def run() -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)

        return run

    models = [llama(layers=6).train() for _ in range(3)]
    plain, seldom, always = map(step, models)
    want = {"max_score": True}
    with ch.watch(models[1], want=want, every=100), ch.watch(models[2], want=want):
        found = in_turn({"plain": plain, "between": seldom, "looked": always}, rounds=15)
    alone = found["plain"]
    bench.add("a step of training", alone, "ms")
    bench.add("a step that is looked at", found["looked"] / alone, "×")
    bench.at_most("every=100, on average", (99 * found["between"] + found["looked"]) / (100 * alone), "×", 1.03)


def alone(bench: Any) -> None:
    """`observe` by itself against cuDNN's plain forward, and against eager attention that does the same."""
    for tokens in (2_048, 4_096):
        q, k, v = (torch.randn(1, 16, tokens, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))

        def cudnn(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        def observed(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            return ch.observe(q, k, v, mask=ch.causal(), **TOP)

        found = together({"cuDNN": cudnn, "observe": observed})
        bench.at_most(f"observe by cuDNN's forward, {tokens:,} tokens", found["observe"] / found["cuDNN"], "×", 2.0)
    q, k, v = (torch.randn(1, 12, 512, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    hidden = torch.ones(512, 512, device=DEVICE, dtype=torch.bool).triu(1)

    def eager() -> tuple[torch.Tensor, ...]:
        weights = (q @ k.transpose(-1, -2) / math.sqrt(64)).masked_fill(hidden, -math.inf).float().softmax(-1)
        return weights.to(q.dtype) @ v, weights.sum(-2), *weights.topk(8)

    found = together({"eager": eager, "observe": lambda: ch.observe(q, k, v, mask=ch.causal(), **TOP)})
    bench.at_least("eager by observe, (1, 12, 512, 64)", found["eager"] / found["observe"], "×", 1.2)


def evicting(bench: Any) -> None:
    """A prompt of 128k tokens with what its keys received, and tokens decoded with a cache that evicts."""
    q = torch.randn(1, 8, PREFILL, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, PREFILL, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    ways: dict[str, dict[str, Any]] = {
        "H2O": {"received": True},
        "SnapKV": {"received": 32},
        "the largest received": {"received_max": True},
        "DropKV": {"removal": True},
    }
    for name, asked in ways.items():
        calls = {"cuDNN": cudnn, name: lambda asked=asked: ch.observe(q, k, v, mask=ch.causal(), **asked)}
        found = in_turn(calls, rounds=3, warm=1)
        ratio = found[name] / found["cuDNN"]
        if name in ("H2O", "SnapKV"):
            bench.at_most(f"{name}: 128k prefill by cuDNN's forward", ratio, "×", 1.7)
        else:
            bench.add(f"{name}: 128k prefill by cuDNN's forward", ratio, "×")
    from clearhead.nn.eviction import H2O

    attend = ch.nn.MultiHeadAttention(2048, 16, kv_heads=4, causal=True, positions=ch.rotary())
    attend = attend.to(DEVICE, torch.bfloat16).eval()
    prompt, token = (torch.randn(1, n, 2048, device=DEVICE, dtype=torch.bfloat16) for n in (4_096, 1))
    with torch.no_grad():
        caches = {"all": ch.nn.KVCache(), "H2O": ch.nn.KVCache(keep=H2O(keep=4_096, recent=256))}
        for cache in caches.values():
            attend(prompt, cache=cache)
        found = in_turn(
            {name: lambda cache=cache: attend(token, cache=cache) for name, cache in caches.items()}, 50, 10
        )
    bench.at_most("decoding with H2O by decoding with all, 4,096 tokens held", found["H2O"] / found["all"], "×", 1.15)
