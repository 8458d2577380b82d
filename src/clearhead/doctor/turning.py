"""Rotary positions: queries and keys turned, pair by pair, by angles that grow with the position."""

from __future__ import annotations

import numpy as np

# Which features are a pair: i and i + D/2, as in Llama's published code, or 2i and 2i + 1, as in the paper
ROTARY = ("halves", "neighbours")
# The slowest pair's wavelength is about 2π times this: the paper's, and those of models for long texts
BASES = (10_000.0, 500_000.0, 1_000_000.0)


def rotate(way: str, x: np.ndarray) -> np.ndarray:
    """(…, T, D) with position t turned by t · base^(−2i/D) in the plane of its pair i."""
    one, other, cosine, sine = _planes(way, x)
    return _joined(way, one * cosine - other * sine, other * cosine + one * sine)


def rotated_errors(way: str, x: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """How far turned numbers may be off for an eps of one: their own errors, and those of angles and products."""
    one, other, cosine, sine = _planes(way, np.abs(x))
    first, second, *_ = _planes(way, errors)
    cosine, sine = np.abs(cosine), np.abs(sine)
    # an angle t · f is rounded by as much as it is large, and so are its cosine and sine
    rounded = (np.arange(x.shape[-2])[:, None] + 4.0) * (one + other)
    return _joined(way, first * cosine + second * sine + rounded, second * cosine + first * sine + rounded)


def _planes(way: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    pairs, base = way.split()
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] * float(base) ** (-np.arange(half) / half)
    one, other = (x[..., :half], x[..., half:]) if pairs == "halves" else (x[..., ::2], x[..., 1::2])
    return one, other, np.cos(angles), np.sin(angles)


def _joined(way: str, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    if way.startswith("halves"):
        return np.concatenate([one, other], axis=-1)
    return np.stack([one, other], axis=-1).reshape(*one.shape[:-1], -1)
