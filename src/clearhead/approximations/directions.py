"""Random directions by their seed: drawn by NumPy in float64, so that they are the same in every library."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=32)
def directions(count: int, features: int, seed: int, orthogonal: bool = True, norms: str = "drawn") -> np.ndarray:
    """The ω, (count, features): normal vectors, orthogonal to one another in blocks of as many as there are features.

    >>> omega = directions(3, 4, seed=0)
    >>> bool(abs(omega @ omega.T - np.diag((omega**2).sum(-1))).max() < 1e-12)
    True
    """
    generator = np.random.default_rng([seed, count, features])
    omega = generator.standard_normal((count, features))
    if orthogonal:
        lengths = np.sqrt((omega**2).sum(-1, keepdims=True))
        if norms == "equal":
            lengths = np.full_like(lengths, math.sqrt(features))
        blocks = []
        for start in range(0, count, max(features, 1)):
            rows = min(features, count - start)
            turned, upper = np.linalg.qr(generator.standard_normal((features, features)))
            # with these signs every rotation is as likely as every other
            blocks.append((turned * np.sign(np.diag(upper))).T[:rows])
        omega = lengths * np.concatenate(blocks) if blocks else omega
    elif norms == "equal":
        omega *= math.sqrt(features) / np.sqrt((omega**2).sum(-1, keepdims=True))
    omega.flags.writeable = False
    return omega
