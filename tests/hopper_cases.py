"""The cases of all kernels in half precision and 64 features, which is how Hopper's own kernels take them."""

from __future__ import annotations

from dataclasses import replace

from cases import BY_NAME, CASES, Case
from spoiled import SPOILED

HEAD_DIM = 64


def widened(case: Case) -> Case:
    """The same problem, with other numbers."""
    q, k, v = ((*shape[:-1], HEAD_DIM) for shape in (case.q, case.k, case.v))
    dtype = "float16" if case.dtype == "float16" else "bfloat16"
    return replace(case, name=f"{case.name}; {HEAD_DIM} wide", q=q, k=k, v=v, dtype=dtype)


HOPPER_CASES = tuple(map(widened, CASES))
BY_NAME.update({case.name: case for case in HOPPER_CASES})

# What is refused, pinned as data: reason → cases; forward, and gradients.
SINKS = (
    "float16, saturated, with sinks",
    "sinks",
    "sinks, all masked",
    "sinks of −inf",
    "NaN in dout of a query without keys",
    "sinks far above",
    "sinks far above, causal",
    "sinks far above, float64",
    "sinks far above, one query",
    "sinks far below",
    "sinks of inf",
    "sinks of NaN",
    "sinks far above, NaN in a key",
)
BIASES = (
    "bias",
    "bias by head",
    "bias by pair",
    "bias with −inf",
    "relative bias",
    "relative bias of a decoder",
    "relative bias, offset by row",
    "softcap and bias",
    "NaN in a bias, causal",
    "NaN in a value of weight zero, one query",
)
NOTHING = ("no keys", "no queries", "empty batch")
BANDS_BY_ROW = (
    "one query, 64 features, lengths",
    "causal, offset by row",
    "window, offset by row",
    "lengths",
    "lengths, one empty",
    "NaN in padding",
    "NaN in padding, grouped",
    "NaN in padding, one query, grouped",
)
FORWARD = {
    "there is nothing to attend to": NOTHING,
    "it has a bias only where the keys that a query sees are in one range; `triton` has any": (
        "NaN in padding, negated, softcap and bias",
    ),
    "it has no sinks; `triton` has": (*SINKS, "NaN here and there, everything", "sinks far above, softcap and bias"),
    "it has no dropout; `triton` has": (
        "bfloat16, everything",
        "dropout",
        "dropout, large seed",
        "everything",
        "NaN here and there, dropout",
    ),
    "scale 0.0 is not above 0": ("scale of zero", "scale of zero, causal"),
    "scale -0.4 is not above 0": ("scale below zero", "scale below zero, causal"),
    "it has no bias but ALiBi; `triton` has": BIASES,
}
GRADIENTS = {
    "there is nothing to attend to": NOTHING,
    "the mask is a band that is not the same for all batch rows; `triton` takes any mask": BANDS_BY_ROW,
    "the mask differs by head, and heads share keys; `triton` takes any mask": (
        "grouped, mask by head",
        "blocks by row and head, grouped",
    ),
    "an array serves several batch rows, of which gradients are added up before they are rounded": (
        "batch broadcasts from queries",
        "batch broadcasts both ways",
        "batch of keys is missing",
        "only values have a batch",
    ),
    "it has no sinks; `triton` has": SINKS,
    "it has no bias backwards; `triton` has": (
        *BIASES,
        "bfloat16, everything",
        "alibi",
        "alibi, fewer queries",
        "alibi, offset by row",
        "everything",
        "NaN here and there, everything",
        "NaN in padding, negated, softcap and bias",
        "sinks far above, softcap and bias",
    ),
    "it has no dropout; `triton` has": ("dropout", "dropout, large seed", "NaN here and there, dropout"),
}


def by_name(reasons: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Widened case → reason."""
    return {widened(BY_NAME[name]).name: reason for reason, names in reasons.items() for name in names}


HOPPER_REFUSED = {"forward": by_name(FORWARD), "gradients": by_name(GRADIENTS)}
# A number that is not finite spoils exactly who sees it, by DESIGN.md, in the output of these kernels and in what they
# observe under a mask that is a span; under other masks, and in gradients, it spoils more.
NO_SPAN = {widened(BY_NAME[name]).name for name in ("NaN here and there, documents", "NaN here and there, negated")}
NOT_PROMISED = {
    "forward": NO_SPAN,
    "gradients": {widened(BY_NAME[name]).name for name in SPOILED},
    "observe": NO_SPAN,
}
