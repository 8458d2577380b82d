"""What the tests of the textbook share: its shared sentence, what texts print of it, the formula by hand, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead.textbook import EXAMPLES

PUBLISHED = json.loads((Path(__file__).parent / "data" / "worked_examples.json").read_text(encoding="utf-8"))
SENTENCE, NUMBERS = EXAMPLES["cat_sat"], PUBLISHED["cat_sat"]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def published(found: Any, expected: Any) -> None:
    """As printed: half a unit of the fourth place."""
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=0.5e-4 + 1e-9)


def near(found: Any, expected: Any) -> None:
    """Equal but for the order of sums, in float64."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=8 * np.finfo(float).eps * max(1.0, np.abs(expected).max()))


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray | bool = True) -> tuple[Any, Any]:
    """(output, weights), by the formula and nothing of ours; every query has a key."""
    scores = np.where(allowed, q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v, weights


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(array) for array in arrays]


def refused(message: str, act: Any) -> None:
    """One sentence, and the one that is expected."""
    with pytest.raises(clearhead.ArgumentError) as refusal:
        act()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
