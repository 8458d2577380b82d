"""What textbooks call it, one module for each way of writing it, and the worked examples that they print.

| your text                                                  | its code runs as written with                       |
| ---------------------------------------------------------- | --------------------------------------------------- |
| the book's chapter, NumPy: (weights, output), `explain`    | `from clearhead.textbook.chapter import …`          |
| the book's chapter, PyTorch: True hides                    | `from clearhead.textbook.chapter_torch import …`    |
| the lesson, PyTorch: mask == 0 hides, −inf                 | `from clearhead.textbook.lesson import …`           |
| the tutorial, PyTorch: mask == 0 hides, −1e9               | `from clearhead.textbook.tutorial import …`         |
| the course module: loops, heads, masks of 1.0 and 0.0      | `from clearhead.textbook.course import …`           |
| the same as a PyTorch module                               | `from clearhead.textbook.course_torch import …`     |
| the linear-algebra example: A, O                           | `from clearhead.textbook.algebra import …`          |
| additive (Bahdanau) attention, to compare with             | `clearhead.textbook.additive`, `.additive_torch`    |
| the chapter's five exercises                               | `clearhead.textbook.exercises`                      |
| their arithmetic slips, with the right values              | `print(clearhead.textbook.slips.page())`            |

Each opens with a table of how its conventions differ, and `conventions` converts between them. The names of this
package itself have clearhead's meaning: True may attend, and the output comes before the weights.

>>> from clearhead.textbook import EXAMPLES, scaled_dot_product_attention
>>> example = EXAMPLES["cat_sat"]
>>> output, weights = scaled_dot_product_attention(example.q, example.k, example.v)
>>> weights[1].round(4).tolist()
[0.4026, 0.0898, 0.2442, 0.1481, 0.1153]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clearhead.textbook.additive import additive_attention
from clearhead.textbook.conventions import CONVENTIONS, Convention, convert_mask
from clearhead.textbook.examples import EXAMPLES, Example
from clearhead.textbook.names import (
    MultiHeadAttention,
    ScaledDotProductAttention,
    attention_loops,
    create_causal_mask,
    create_padding_mask,
    scaled_dot_product_attention,
)
from clearhead.textbook.softmaxes import exponentials, softmax, softmax_jacobian

__all__ = [
    "CONVENTIONS",
    "EXAMPLES",
    "Convention",
    "Example",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "additive_attention",
    "attention_loops",
    "convert_mask",
    "create_causal_mask",
    "create_padding_mask",
    "exponentials",
    "scaled_dot_product_attention",
    "softmax",
    "softmax_jacobian",
]

if TYPE_CHECKING:
    from clearhead.textbook import additive_torch as additive_torch
    from clearhead.textbook import algebra as algebra
    from clearhead.textbook import chapter as chapter
    from clearhead.textbook import chapter_torch as chapter_torch
    from clearhead.textbook import course as course
    from clearhead.textbook import course_torch as course_torch
    from clearhead.textbook import exercises as exercises
    from clearhead.textbook import lesson as lesson
    from clearhead.textbook import slips as slips
    from clearhead.textbook import tutorial as tutorial

# imported when they are first asked for: some of them need PyTorch
_LATER = (
    "additive_torch",
    "algebra",
    "chapter",
    "chapter_torch",
    "course",
    "course_torch",
    "exercises",
    "lesson",
    "slips",
    "tutorial",
)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            try:
                return import_module(f"clearhead.textbook.{name}")
            except ImportError as missing:  # which hasattr and completion do not expect of a name
                raise AttributeError(str(missing)) from missing
        raise AttributeError(f"module 'clearhead.textbook' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
