"""Training with clipped logits, as MuonClip does: a head whose largest logit grew too large has its projections shrunk.

    python examples/clip_logits.py

    γ = min(1, limit / largest logit of the head)      W_q ← √γ W_q,  W_k ← √γ W_k      (and so their biases)

so that the head's logits are multiplied by γ. The largest logit of every query comes with the attention itself:
`watch(model, want={"max_score": True}, every=…)`, with no hooks and no matrix. Query heads that share a key head shrink
their queries alone, by γ.
"""

from __future__ import annotations

from typing import Any

import torch

import clearhead as ch

LIMIT, STEPS, EVERY = 4.0, 60, 5


@torch.no_grad()
def clip(attend: ch.nn.MultiHeadAttention, largest: torch.Tensor, limit: float) -> int:
    """Shrink the projections of the heads whose largest logit, (heads,), is above the limit; how many there were."""
    factor = (limit / largest.clamp(min=1e-9)).clamp(max=1.0).to(attend.in_proj_weight.device)
    shared = attend.kv_heads != attend.num_heads
    of_queries = factor if shared else factor.sqrt()
    width = attend.head_dim
    for array in (attend.in_proj_weight, attend.in_proj_bias):
        if array is None:
            continue
        queries, keys, _ = torch.split(array, list(attend.widths))
        queries.unflatten(0, (-1, width)).mul_(of_queries.view(-1, *(1,) * array.ndim))
        if not shared:
            keys.unflatten(0, (-1, width)).mul_(factor.sqrt().view(-1, *(1,) * array.ndim))
    return int((factor < 1).sum())


def clip_all(model: Any, calls: Any, limit: float) -> tuple[float, int]:
    """Clip what the calls of one run show; the largest logit of all, and how many heads were clipped."""
    largest, clipped = 0.0, 0
    for call in calls:
        by_head = call.max_score.amax((0, -1))  # (heads,)
        largest = max(largest, float(by_head.max()))
        clipped += clip(model.get_submodule(call.name), by_head, limit)
    return largest, clipped


def main() -> None:
    """Train a small GPT, its logits held below a limit."""
    torch.manual_seed(0)
    model = ch.nn.GPT(ch.nn.GPTConfig(vocabulary=32, context=64, layers=2, heads=4, width=64)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(32, (8, 33)).cumsum(1) % 32
    with ch.watch(model, want={"max_score": True}, every=EVERY) as seen:
        for step in range(STEPS):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0:
                largest, clipped = clip_all(model, seen.step(-1), LIMIT)
                print(
                    f"step {step:3d}   loss {loss.item():.3f}   largest logit {largest:6.2f}   {clipped} heads clipped"
                )


if __name__ == "__main__":
    main()
