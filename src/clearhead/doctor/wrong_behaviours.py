"""The catalogue: mistakes that are no formula, but show in what a function does."""

from __future__ import annotations

from clearhead.doctor.mistake import Mistake

BEHAVIOURS = (
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
        "batch-axis-transposed",
        "the batch axis is transposed with the keys",
        "with a batch the wrong axes change places: it raises, or where sizes agree the result is wrong in silence",
        "transpose the last two axes, counted from the end: k.swapaxes(-1, -2), k.mT",
    ),
    Mistake(
        "wrong-with-several-heads",
        "it is right with one head and wrong with several",
        "what mixes heads and positions does not show where there is only one head",
        "reshape to (B, T, H, D), transpose axes 1 and 2, and undo both in the other order",
    ),
    Mistake(
        "needs-contiguous-inputs",
        "inputs that are views of another memory order are refused or misread",
        "q.transpose(1, 2), as nearly every model makes its heads, is such a view",
        "use reshape in place of view, and no strides of your own; or call .contiguous() first",
    ),
    Mistake(
        "padding-hides-queries",
        "a mask for padded keys is applied to the queries",
        "padded keys keep their weight for every real query, and padded queries may attend to nothing",
        "give the mask its place on the last axis: mask[:, None, None, :]",
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
        "maximum-starts-at-zero",
        "the running maximum starts at 0, not at −inf",
        "where every score is far below 0 all exponentials are 0, and 0 / 0 is NaN",
        "start the running maximum at −inf, or at the first block's own",
    ),
    Mistake(
        "bias-scaled",
        "the bias is scaled with the scores",
        "it is added before the division by √D, so that it counts only in part",
        "add it to q kᵀ / √D, after the scale",
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
