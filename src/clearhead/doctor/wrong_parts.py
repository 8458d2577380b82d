"""The catalogue: heads, projections and inputs that a module or function forgets, mixes up or adds."""

from __future__ import annotations

from clearhead.doctor.mistake import Mistake

PARTS = (
    Mistake(
        "heads-not-split",
        "the heads are never split: one softmax runs over the whole width",
        "whatever the number of heads, each query has one set of weights, and not one for each head",
        "reshape to (B, T, H, D), then transpose axes 1 and 2",
        "split",
        "whole",
        ("whole scaled",),
    ),
    Mistake(
        "heads-in-reverse-order",
        "the heads are joined in reverse order",
        "the output's projection meets each head where another should be",
        "join the heads in the order in which they were split",
        "merge",
        "reversed",
    ),
    Mistake(
        "output-projection-forgotten",
        "the output's projection is never applied",
        "its weights are there, and have no influence: the heads are joined and not mixed",
        "return self.out_proj(merged)",
        "output",
        "unprojected",
    ),
    Mistake(
        "residual-added",
        "the input is added to the output",
        "a residual belongs to the block around attention: added in both places it counts twice",
        "return the output alone; where the residual is meant, check what is inside it",
        "added",
        "queries",
        ("values",),
    ),
    Mistake(
        "relu-in-place-of-softmax",
        "a relu divided by its sum stands in place of the softmax",
        "negative scores have no weight at all, and a row without positive ones is 0 / 0",
        "softmax over the last axis of q kᵀ: exponentials divided by their sum",
        "axis",
        "positive sum",
    ),
)
