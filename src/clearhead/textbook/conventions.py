"""How each text writes attention, as data, and the way there and back: masks, scale and the order of results.

The texts agree on the formula and on little else. A `Convention` says what one of them means; every face in this folder
reads its arguments and orders its results by its own, so that the table a face opens with is what it does.

>>> import numpy as np
>>> hidden = np.triu(np.ones((3, 3), dtype=bool), 1)  # the chapter: True hides
>>> CONVENTIONS["chapter_torch"].mask_to_clearhead(hidden).astype(int)
array([[1, 0, 0],
       [1, 1, 0],
       [1, 1, 1]])
>>> convert_mask(hidden, "chapter_torch", "course")  # the course: 1.0 lets through
array([[1., 0., 0.],
       [1., 1., 0.],
       [1., 1., 1.]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clearhead.core.arrays import Array, Library, dtype_name, require_array, truth
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask

OURS = {
    "axes": "(…, heads, N, d)",
    "results": "output; `observe` has the weights",
    "scale": "1/√d, multiplied",
    "True or 1 in a mask": "may attend",
    "an array as a mask": "bool",
    "a hidden score": "takes no part",
    "a query without keys": "0",
}


@dataclass(frozen=True)
class Convention:
    """What one text means: its axes, the order of what it returns, its masks, and what it makes of odd rows.

    - order: names of what comes back.
    - true: what True or 1 in a mask does, or None where there are no masks.
    - masks: which masks it takes, in words; dtype: of those that `mask_from_clearhead` makes.
    - hidden: what takes the place of a score that is hidden.
    - empty: what the text's own formula gives a query that may attend to nothing. A face gives 0, as all of clearhead.

    >>> lesson = CONVENTIONS["lesson"]
    >>> lesson.order, lesson.true
    (('output', 'weights'), 'may attend')
    """

    name: str
    axes: str
    order: tuple[str, str]
    true: Literal["hides", "may attend"] | None = None
    masks: str = "bool"
    dtype: str = "bool"
    hidden: str = ""
    empty: str = ""

    def mask_to_clearhead(self, mask: Mask | Array | None) -> Any:
        """This text's mask as a boolean array, True where a query may attend; a mask value stays as it is.

        >>> import numpy as np
        >>> CONVENTIONS["course"].mask_to_clearhead(np.array([[1.0, 0.0]]))
        array([[ True, False]])
        """
        if mask is None or isinstance(mask, Mask):
            return mask
        if self.true is None:
            raise ArgumentError("mask", "is given, but this text has no masks: clearhead.attention takes one")
        require_array("mask", mask)
        xp = Library.of(mask).xp
        if dtype_name(mask) != "bool":
            if truth(xp.all((mask == 0) | (mask == 1))) is False:
                raise ArgumentError(
                    "mask",
                    f"has numbers other than 0 and 1, expected 1 where a key {self._meaning()}"
                    " (an additive mask goes into the bias of clearhead.attention)",
                )
            mask = mask != 0
        return mask if self.true == "may attend" else xp.logical_not(mask)

    def mask_from_clearhead(
        self, mask: Mask | Array, queries: int | None = None, keys: int | None = None, batch: tuple[int, ...] = ()
    ) -> Array:
        """A boolean array that is True where a query may attend, or a mask value of that size, as this text's mask.

        >>> from clearhead import causal
        >>> CONVENTIONS["algebra"].mask_from_clearhead(causal(), queries=3).astype(int)
        array([[0, 1, 1],
               [0, 0, 1],
               [0, 0, 0]])
        """
        if self.true is None:
            raise ArgumentError("mask", "is given, but this text has no masks")
        if isinstance(mask, Mask):
            if queries is None:
                raise ArgumentError("queries", f"is not given, expected how many there are: {mask!r} has no size")
            dense = mask.dense(queries, keys, batch=batch)
            mask = dense if batch else dense[0]
        require_array("mask", mask)
        if dtype_name(mask) != "bool":
            raise ArgumentError("mask", f"has dtype {dtype_name(mask)}, expected bool, True where a query may attend")
        xp = Library.of(mask).xp
        mask = xp.asarray(mask, copy=True) if self.true == "may attend" else xp.logical_not(mask)
        return mask if self.dtype == "bool" else xp.astype(mask, getattr(xp, self.dtype))

    def scale_to_clearhead(self, scale: float) -> float:
        """What `clearhead.attention` multiplies by, from the √d that this text divides by.

        >>> CONVENTIONS["chapter"].scale_to_clearhead(2.0), CONVENTIONS["chapter"].scale_from_clearhead(0.5)
        (0.5, 2.0)
        """
        if not scale > 0:
            raise ArgumentError("scale", f"is {scale}, expected what scores are divided by, above 0")
        return 1.0 / scale

    # one division there, and the same one back
    scale_from_clearhead = scale_to_clearhead

    def ordered(self, output: Any, weights: Any) -> tuple[Any, Any]:
        """Both results in this text's order.

        >>> CONVENTIONS["chapter"].ordered("output", "weights")
        ('weights', 'output')
        """
        return (weights, output) if self.order[0] != "output" else (output, weights)

    def output_and_weights(self, results: Sequence[Any]) -> tuple[Any, Any]:
        """What this text's code returned, the output first.

        >>> CONVENTIONS["chapter"].output_and_weights(("weights", "output"))
        ('output', 'weights')
        """
        first, second = results
        return (second, first) if self.order[0] != "output" else (first, second)

    def table(self) -> str:
        """How this text's conventions differ from those of `clearhead.attention`.

        >>> print(CONVENTIONS["chapter"].table())
        |         | here              | `clearhead.attention`             |
        | ------- | ----------------- | --------------------------------- |
        | axes    | (N, d)            | (…, heads, N, d)                  |
        | results | (weights, output) | output; `observe` has the weights |
        | scale   | √d, divided by    | 1/√d, multiplied                  |
        """
        rows = {"axes": self.axes, "results": f"({', '.join(self.order)})", "scale": "√d, divided by"}
        if self.true is not None:
            rows["True or 1 in a mask"] = self.true
            rows["an array as a mask"] = self.masks
            rows["a hidden score"] = self.hidden
            rows["a query without keys"] = f"0; the text: {self.empty}"
        told = [("", "here", "`clearhead.attention`")]
        told += [(name, here, OURS[name]) for name, here in rows.items()]
        widths = [max(map(len, column)) for column in zip(*told, strict=True)]
        told.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2]))
        return "\n".join(
            f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in told
        )

    def _meaning(self) -> str:
        return "is hidden" if self.true == "hides" else "may be attended to"


_BOTH_WAYS = {"hidden": "−inf or −1e9", "empty": "NaN, or attends to all"}

CONVENTIONS: dict[str, Convention] = {
    one.name: one
    for one in (
        Convention("chapter", "(N, d)", ("weights", "output")),
        Convention("chapter_torch", "(…, N, d)", ("weights", "output"), "hides", hidden="−inf", empty="NaN"),
        Convention(
            "lesson", "(…, S, d)", ("output", "weights"), "may attend", "bool, or 1 and 0", hidden="−inf", empty="NaN"
        ),
        Convention(
            "tutorial",
            "(…, S, d)",
            ("output", "weights"),
            "may attend",
            "bool, or 1 and 0",
            hidden="−1e9",
            empty="the mean of all values",
        ),
        Convention(
            "course",
            "(batch, n, d)",
            ("output", "weights"),
            "may attend",
            "1.0 and 0.0; a third axis is the batch",
            "float64",
            **_BOTH_WAYS,
        ),
        Convention(
            "course_torch",
            "(batch, n, d)",
            ("output", "weights"),
            "may attend",
            "1.0 and 0.0; a third axis is the batch",
            "float32",
            **_BOTH_WAYS,
        ),
        Convention("algebra", "(n, d)", ("A", "O"), "hides", "bool, or 1 and 0", **_BOTH_WAYS),
    )
}


def convert_mask(
    mask: Mask | Array, source: str, target: str, *, queries: int | None = None, keys: int | None = None
) -> Array:
    """One text's mask as another's, by the names of their modules.

    >>> import numpy as np
    >>> convert_mask(np.array([[1, 0]]), "lesson", "chapter_torch")
    array([[False,  True]])

    A mask value says how many `queries` and `keys` it has to be made for.
    """
    for argument, name in (("source", source), ("target", target)):
        if name not in CONVENTIONS:
            raise ArgumentError(argument, f"is {name!r}, expected one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[target].mask_from_clearhead(CONVENTIONS[source].mask_to_clearhead(mask), queries, keys)
