"""Every picture that needs no model, drawn by whatever versions are installed: what `make test-oldest` runs last.

    python tests/oldest_works.py

The tests of plots compare pixels, which differ between versions of matplotlib. Here it is enough that they are drawn.
"""

from __future__ import annotations

import io
from importlib.metadata import version

import numpy as np

import clearhead as ch
from clearhead.textbook import EXAMPLES


def pictures() -> dict[str, object]:
    """Axes by name."""
    example = EXAMPLES["cat_sat"]
    call, tokens = (example.q, example.k, example.v), example.tokens
    heads = np.random.default_rng(0).standard_normal((3, 4, 7, 5), dtype=np.float32)
    weights = ch.observe(*call, weights=True).weights
    several = ch.observe(*heads, weights=True)
    return {
        "attention": ch.plot_attention(weights, tokens=tokens),
        "heads": ch.plot_heads(several.weights),
        "mask": ch.plot_mask(ch.causal() & ch.window(3), 8),
        "bias": ch.plot_bias(ch.alibi(4), 8, heads=4),
        "entropy": ch.plot_entropy([several, several]),
        "geometry": ch.plot_geometry(*(a[:, :2] for a in call), query=1, tokens=tokens),
        "scaling": ch.plot_scaling(ch.scaling((4, 16))),
        "profile": ch.plot_profile(ch.profile((64, 128), heads=1)),
    }


def main() -> None:
    drawn = pictures()
    for name, axes in drawn.items():
        figure = np.asarray(axes).flat[0].figure
        for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            page = io.BytesIO()
            figure.savefig(page, format=kind)
            assert page.getvalue().startswith(start), f"{name} as {kind}"
    print(f"{len(drawn)} pictures by matplotlib {version('matplotlib')} and numpy {version('numpy')}")


if __name__ == "__main__":
    main()
