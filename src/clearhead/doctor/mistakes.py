"""The catalogue: every mistake that has a name, what it does, and how it is mended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A named mistake: `title` in a few words, `why` it matters, and what `mends` it.

    Where it is another formula, `knob` and `setting` say which; see `variants`. The others show in what is done.
    """

    name: str
    title: str
    why: str
    mends: str
    knob: str | None = None
    setting: str | None = None


_FORMULAS = (
    Mistake(
        "no-scale",
        "the scores are not scaled",
        "without 1/√D the softmax saturates as D grows, and gradients vanish",
        "multiply q kᵀ with 1/√D, D being the features of one head",
        "scale",
        "none",
    ),
    Mistake(
        "scale-d-model",
        "the scores are divided by √d_model",
        "D is the features of one head, not of all of them: attention comes out too flat",
        "divide by the square root of q.shape[-1] after the heads are split",
        "scale",
        "model",
    ),
    Mistake(
        "scale-d-model-no-root",
        "the scores are divided by d_model",
        "both the root and the division into heads are missing: attention comes out nearly uniform",
        "divide by the square root of q.shape[-1] after the heads are split",
        "scale",
        "model whole",
    ),
    Mistake(
        "scale-d",
        "the scores are divided by D, not by √D",
        "the root is missing, or the scale is applied twice: attention comes out too flat",
        "divide by D ** 0.5, once",
        "scale",
        "features",
    ),
    Mistake(
        "scale-keys",
        "the scores are divided by √S, the number of keys",
        "the result then depends on how long the sequence is; often q.shape[-2] or k.shape[-2] in place of shape[-1]",
        "divide by the square root of q.shape[-1]",
        "scale",
        "keys",
    ),
    Mistake(
        "scale-queries",
        "the scores are divided by √T, the number of queries",
        "the result then depends on how long the sequence is; often q.shape[-2] in place of q.shape[-1]",
        "divide by the square root of q.shape[-1]",
        "scale",
        "queries",
    ),
    Mistake(
        "scale-dv",
        "the scores are divided by √Dv, the features of a value",
        "queries and keys are what is multiplied: where Dv ≠ D the scale is wrong",
        "divide by the square root of q.shape[-1], not of v.shape[-1]",
        "scale",
        "width",
    ),
    Mistake(
        "scale-heads",
        "the scores are divided by √H, the number of heads",
        "an axis was taken for another: with heads before positions or after them, shape[1] is not D",
        "divide by the square root of q.shape[-1]",
        "scale",
        "heads",
    ),
    Mistake(
        "scale-inverted",
        "the scores are multiplied with √D, not divided by it",
        "the softmax saturates: nearly all weight is on one key",
        "divide by D ** 0.5",
        "scale",
        "inverse",
    ),
    Mistake(
        "scale-after-softmax",
        "the scale is applied after the softmax",
        "weights no longer sum to one, and the softmax has seen unscaled scores",
        "scale the scores before the softmax",
        "scale",
        "late",
    ),
    Mistake(
        "softmax-over-queries",
        "the softmax is taken over the queries, not over the keys",
        "each key's column sums to one in place of each query's row",
        "softmax over the last axis of q kᵀ",
        "axis",
        "queries",
    ),
    Mistake(
        "softmax-over-heads",
        "the softmax is taken over the heads, not over the keys",
        "heads then compete with one another for each pair",
        "softmax over the last axis of q kᵀ",
        "axis",
        "heads",
    ),
    Mistake(
        "softmax-over-batch",
        "the softmax is taken over the batch, not over the keys",
        "batch rows then influence one another; an axis of 0, or none given, is often why",
        "softmax over the last axis of q kᵀ",
        "axis",
        "batch",
    ),
    Mistake(
        "softmax-over-everything",
        "the softmax is taken over the whole matrix, not over each row",
        "all queries then share one weight of one",
        "softmax over the last axis of q kᵀ, keeping dimensions in the sum",
        "axis",
        "all",
    ),
    Mistake(
        "softmax-twice",
        "the softmax is applied twice",
        "the second one flattens the weights of the first to almost uniform",
        "apply it once",
        "axis",
        "twice",
    ),
    Mistake(
        "no-softmax",
        "there is no softmax",
        "scores are used as weights: they neither are positive nor sum to one",
        "softmax over the last axis of q kᵀ",
        "axis",
        "none",
    ),
    Mistake(
        "keys-as-values",
        "the keys are averaged, not the values",
        "the values have no influence on the result",
        "multiply the weights with v",
        "values",
        "keys",
    ),
    Mistake(
        "queries-as-values",
        "the queries are averaged, not the values",
        "the values have no influence on the result",
        "multiply the weights with v",
        "values",
        "queries",
    ),
    Mistake(
        "values-as-keys",
        "the queries are compared with the values, not with the keys",
        "the keys have no influence on the result",
        "compute the scores from q and k",
        "values",
        "compared",
    ),
    Mistake(
        "queries-and-keys-swapped",
        "queries and keys are swapped",
        "k qᵀ is the matrix of scores transposed: each row is the wrong one",
        "compute the scores as q kᵀ",
        "values",
        "swapped",
    ),
    Mistake(
        "heads-split-without-transpose",
        "heads are split by a reshape without the transpose",
        "(B, T, H·D) reshaped to (B, H, T, D) mixes positions into heads",
        "reshape to (B, T, H, D), then transpose axes 1 and 2",
        "split",
        "reshape",
    ),
    Mistake(
        "heads-merged-without-transpose",
        "heads are merged by a reshape without the transpose",
        "(B, H, T, D) reshaped to (B, T, H·D) mixes heads into positions",
        "transpose axes 1 and 2, then reshape to (B, T, H·D)",
        "merge",
        "reshape",
    ),
    Mistake(
        "mask-not-renormalised",
        "masked weights are set to 0 after the softmax, without renormalising",
        "hidden keys still take part in the denominator: the weights no longer sum to one",
        "set masked scores to −inf before the softmax",
        "masking",
        "after",
    ),
    Mistake(
        "mask-after-softmax",
        "the mask's −1e9 or −inf is applied after the softmax",
        "a weight of −1e9 is no weight; the mask is meant for the scores",
        "set masked scores to −inf before the softmax",
        "masking",
        "penalty after",
    ),
    Mistake(
        "mask-zeroes-scores",
        "masked scores are set to 0, not to −inf",
        "e^0 is 1: a hidden key has more weight than one that matches badly",
        "set masked scores to −inf before the softmax",
        "masking",
        "zero",
    ),
    Mistake(
        "mask-too-weak",
        "masked scores are lowered by too little",
        "a hidden key still has weight",
        "use −inf, or the dtype's lowest number, in place of a small penalty",
        "masking",
        "weak",
    ),
    Mistake(
        "mask-ignored",
        "the mask has no effect",
        "every query attends to every key, whatever the mask says",
        "set masked scores to −inf before the softmax, and use what masked_fill returns",
        "masking",
        "ignored",
    ),
    Mistake(
        "mask-transposed",
        "the mask is transposed: queries are taken for keys",
        "mask[i, j] is asked for query j and key i",
        "index masks as (…, query, key)",
        "masking",
        "transposed",
    ),
    Mistake(
        "mask-inverted",
        "the mask is inverted",
        "it hides what it should show and shows what it should hide",
        "invert it once; True means may attend in PyTorch's scaled_dot_product_attention, JAX and clearhead",
        "masking",
        "inverted",
    ),
    Mistake(
        "causal-excludes-itself",
        "causal is off by one: a query does not see its own position",
        "the first query sees nothing at all; tril(…, diagonal=-1) or triu(…, diagonal=0) is often why",
        "let query i see keys up to and with i: tril with diagonal 0, or hide triu with diagonal 1",
        "causal",
        "strict",
    ),
    Mistake(
        "causal-sees-the-next",
        "causal is off by one: a query sees the position after it",
        "in training the answer leaks: each token sees the one it should predict",
        "let query i see keys up to and with i: tril with diagonal 0, or hide triu with diagonal 1",
        "causal",
        "ahead",
    ),
    Mistake(
        "causal-inverted",
        "causal is inverted: a query sees itself and what comes after it, not what came before",
        "triu was taken for tril, or the mask was inverted once too often",
        "let query i see keys up to and with i",
        "causal",
        "future",
    ),
    Mistake(
        "causal-ignored",
        "causal has no effect",
        "every query sees the future",
        "hide keys after the query's own position",
        "causal",
        "ignored",
    ),
    Mistake(
        "causal-other-corner",
        "causal is aligned to the other corner",
        "with more keys than queries, as with a cache, each query sees the wrong keys",
        "to align the last query with the last key use tril with diagonal S − T; say check(…, causal='start') if the"
        " first ones are meant to be aligned",
        "causal",
        "corner",
    ),
)

_BEHAVIOURS = (
    Mistake(
        "scale-other",
        "the scores are scaled by another number",
        "every weight is sharper or flatter than it should be",
        "multiply q kᵀ with 1/√D, D being the features of one head",
    ),
    Mistake(
        "transpose-reverses-batch",
        "`.T` reverses the batch axes too",
        "on arrays of more than two axes .T reverses all of them; where sizes happen to agree the result is wrong in"
        " silence",
        "use k.swapaxes(-1, -2), k.mT or k.transpose(-2, -1)",
    ),
    Mistake(
        "no-maximum-subtracted",
        "the largest score is not subtracted before the exponential",
        "e^s overflows past 88 in float32 and past 11 in float16: NaN for large scores",
        "subtract each row's largest score before exp; the result is the same",
    ),
    Mistake(
        "maximum-of-the-whole-matrix",
        "one largest score is subtracted from all rows, not each row's own",
        "rows far below it underflow to 0 / 0: NaN",
        "subtract max(axis=-1, keepdims=True)",
    ),
    Mistake(
        "nan-for-fully-masked-rows",
        "a query that may attend to nothing gives NaN",
        "softmax of only −inf is 0 / 0; one padded row then poisons every gradient",
        "divide by 1 where the sum is 0, so that such a row is 0",
    ),
    Mistake(
        "padding-leaks",
        "what hidden keys hold changes the result",
        "the penalty for masked scores is not low enough for large scores, or the values are not masked",
        "set masked scores to −inf, after every other change to them",
    ),
    Mistake(
        "penalty-overflows-float16",
        "the mask's penalty overflows float16",
        "−1e9 does not exist in float16: it becomes −inf, and 0 · −inf or −inf − −inf is NaN; or it raises",
        "use −inf with masked_fill or where, or torch.finfo(dtype).min",
    ),
    Mistake(
        "precision-lost",
        "precision is lost on the way",
        "somewhere numbers pass through a shorter type than the inputs have",
        "compute in the inputs' own dtype, or a longer one",
    ),
    Mistake(
        "inputs-written-to",
        "the inputs are written to",
        "an in-place operation changes the caller's arrays",
        "use an operation that returns a new array: x = x * s in place of x *= s",
    ),
    Mistake(
        "dropout-in-evaluation",
        "dropout is active in evaluation",
        "weights are dropped at random when nobody is training",
        "pass training=self.training to dropout, or dropout_p=0.0 when not training",
    ),
    Mistake(
        "nondeterministic",
        "two calls with the same inputs differ",
        "something random, or state kept between calls, changes the result",
        "make the result a function of the inputs",
    ),
    Mistake(
        "weights-not-those-used",
        "the weights that are returned are not those that were used",
        "the output is right, but what is shown beside it is not",
        "return the weights after the softmax and the mask",
    ),
    Mistake(
        "unknown",
        "the result is wrong, and it is no mistake that has a name here",
        "it matches neither the formula nor any of the broken formulas",
        "compare the small example below by hand; clearhead.trace shows every step of it",
    ),
)

CATALOGUE: dict[str, Mistake] = {mistake.name: mistake for mistake in (*_FORMULAS, *_BEHAVIOURS)}
BY_SETTING: dict[tuple[str, str], Mistake] = {
    (mistake.knob, mistake.setting): mistake for mistake in _FORMULAS if mistake.knob and mistake.setting
}
