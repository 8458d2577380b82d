"""A small GPT trained on sequences that are split over ranks: loss and gradients are those of one process.

    torchrun --nproc-per-node 4 examples/train_split_gpt.py [--length 509] [--steps 20] [--check]

Each rank holds a part of every sequence, so that a sequence may be as long as all ranks together have memory for. The
positions that a rank holds are chosen so that a causal mask gives every rank as many pairs to compute. `--check`
computes the first step on one process as well, and says how far loss and gradients are from it.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

import clearhead as ch
import clearhead.distributed as chd
from clearhead.nn import GPT, GPTConfig

VOCABULARY = 61


def batch(rows: int, length: int, step: int) -> torch.Tensor:
    """Something to learn, the same on every rank: each token follows from the one 7 before it."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    for i in range(7, length + 1):
        tokens[:, i] = (tokens[:, i - 7] * 3 + 1) % VOCABULARY
    return tokens


def part_of_loss(model: GPT, tokens: torch.Tensor, placement: chd.Placement, rank: int) -> torch.Tensor:
    """What the positions here add to the mean over all of them."""
    here, next_ones = (chd.shard(some, placement, rank, axis=1) for some in (tokens[:, :-1], tokens[:, 1:]))
    with chd.parallel(placement=placement):
        logits = model(here)
    total = F.cross_entropy(logits.flatten(0, 1).float(), next_ones.flatten(), reduction="sum")
    return total / (tokens.shape[0] * placement.n)


def learn(model: GPT, loss: torch.Tensor) -> torch.Tensor:
    """Gradients of all ranks, added up: each has those of its own positions."""
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:  # a rank may hold no position at all
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole


def main() -> None:
    """Train, and say the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=509)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=VOCABULARY, context=given.length, layers=2, heads=4, width=64, positions=ch.rotary())
    model = GPT(config)
    placement = chd.place(ch.causal(), given.length, world)
    if rank == 0:
        print(placement, flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(given.steps):
        tokens = batch(given.rows, given.length, step)
        optimizer.zero_grad()
        loss = learn(model, part_of_loss(model, tokens, placement, rank))
        if step == 0 and given.check:
            compare(model, tokens, loss, rank)
        optimizer.step()
        if rank == 0:
            print(f"step {step:3d}  loss {float(loss):.4f}", flush=True)
    dist.destroy_process_group()


def compare(model: GPT, tokens: torch.Tensor, loss: torch.Tensor, rank: int) -> None:
    """The same step on one process, in this precision and in float64: as far from exact, the one as the other."""
    if rank:
        return
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    alone = []
    for dtype in (torch.float32, torch.float64):
        one = GPT(model.config, dtype=dtype)
        one.load_state_dict(model.state_dict())
        logits = one(tokens[:, :-1])
        whole = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        whole.backward()
        alone.append((whole.detach(), [p.grad for p in one.parameters() if p.grad is not None]))
    (plain, plain_gradients), (exact, exact_gradients) = alone
    print(f"loss: {float(loss - exact):+.1e} from float64 split, {float(plain - exact):+.1e} on one process")
    far = [max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(some, exact_gradients, strict=True))
           for some in (found, plain_gradients)]  # fmt: skip
    print(f"gradients: at most {far[0]:.1e} of the largest split, {far[1]:.1e} on one process")


if __name__ == "__main__":
    main()
