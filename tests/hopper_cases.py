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
SEVERAL_RANGES = (
    "grouped, mask by head",
    "float16, rows masked",
    "global tokens",
    "random blocks",
    "Longformer",
    "BigBird",
    "array",
    "array of keys",
    "array of keys by row",
    "array of queries",
    "array and causal",
    "rows masked",
    "NaN here and there, array",
    "NaN here and there, blocks and global tokens",
    "NaN in padding, negated array",
    "NaN in padding, negated documents",
    "NaN in padding, negated blocks",
    "NaN in padding, negated global tokens",
    "NaN in padding, array, softcap",
    "NaN in padding, one query, negated",
)
ONE_RANGE_BUT_NO_BAND = (
    "one query, 64 features, lengths",
    "causal, offset by row",
    "window, offset by row",
    "lengths",
    "lengths, one empty",
    "documents",
    "documents, fewer queries",
    "documents by row",
    "documents, own query ids",
    "prefix",
    "prefix by row",
    "documents, causal and window",
    "negated",
    "NaN in padding",
    "NaN in padding, grouped",
    "NaN in padding, one query, grouped",
    "NaN and inf in dout, documents",
    "NaN here and there, documents",
    "NaN here and there, negated",
    "NaN in padding, negated lengths",
    "NaN in padding, negated band",
    "NaN in padding, negated and",
    "NaN in padding, documents",
    "NaN in padding, documents, softcap",
)
FORWARD = {
    "there is nothing to attend to": NOTHING,
    "the keys that a query sees are not in one range; `triton` takes any mask": (
        *SEVERAL_RANGES,
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
    "the mask is no band of keys that is the same for all batch rows; `triton` takes any mask": (
        *SEVERAL_RANGES,
        *ONE_RANGE_BUT_NO_BAND,
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
