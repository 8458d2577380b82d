"""Keys that are taken block by block with a running maximum, and what is forgotten on the way."""

from __future__ import annotations

import numpy as np

from clearhead.core.formula import softmax


def in_blocks(
    setting: str, block: int, scores: np.ndarray, v: np.ndarray, allowed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """(output, weights) of keys taken block by block with one thing forgotten; None where there is only one block."""
    keys = scores.shape[-1]
    if block >= (scores.shape[-2] if setting == "queries lost" else keys):
        return None
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    at, queries = np.arange(keys), scores.shape[-2]
    shown = {
        "tail lost": at < keys - keys % block,
        "cut": at < block,
        "last lost": at < keys - 1,
        "first lost": at > 0,
    }.get(setting)
    if shown is not None:
        weights = softmax(np.where(shown, scores, -np.inf))[0]
        return weights @ v, weights
    if setting == "queries lost":
        kept = np.arange(queries)[:, None] < queries - queries % block
        weights = np.where(kept, softmax(scores)[0], 0.0)
        return weights @ v, weights
    if setting == "padded":
        fresh = np.exp(scores)
        weights = fresh / (fresh.sum(-1, keepdims=True) + -keys % block)
        return weights @ v, weights
    if setting == "overlap":
        twice = softmax(scores + np.log(1.0 + (at >= keys - block) * (at < keys - keys % block)))[0]
        return twice @ v, twice
    parts = [scores[..., i : i + block] for i in range(0, keys, block)]
    if setting in ("apart", "averaged"):
        weights = np.concatenate([softmax(part)[0] for part in parts], axis=-1)
        weights = weights / len(parts) if setting == "averaged" else weights
        return weights @ v, weights
    peak = np.full((*scores.shape[:-1], 1), -np.inf)
    total, weights = np.zeros_like(peak), np.zeros((*scores.shape[:-1], 0))
    for part in parts:
        risen = np.maximum(peak, part.max(-1, keepdims=True))
        shrink, fresh = np.exp(peak - risen), np.exp(part - risen)
        grow = 1.0 / np.where(peak == -np.inf, np.inf, shrink)
        of_sum, of_output = {
            "not rescaled": (1.0, 1.0),
            "sum not rescaled": (1.0, shrink),
            "output not rescaled": (shrink, 1.0),
            "inverse": (grow, grow),
        }[setting]
        total = total * of_sum + fresh.sum(-1, keepdims=True)
        weights = np.concatenate([weights * of_output, fresh], axis=-1)
        peak = risen
    weights = weights / total
    return weights @ v, weights
