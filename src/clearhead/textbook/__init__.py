"""What textbooks call it, and the worked examples that they print.

>>> from clearhead.textbook import EXAMPLES, scaled_dot_product_attention
>>> example = EXAMPLES["cat_sat"]
>>> output, weights = scaled_dot_product_attention(example.q, example.k, example.v)
>>> weights[1].round(4).tolist()
[0.4026, 0.0898, 0.2442, 0.1481, 0.1153]
"""

from clearhead.textbook.examples import EXAMPLES, Example
from clearhead.textbook.names import (
    MultiHeadAttention,
    ScaledDotProductAttention,
    attention_loops,
    create_causal_mask,
    create_padding_mask,
    scaled_dot_product_attention,
)

__all__ = [
    "EXAMPLES",
    "Example",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "attention_loops",
    "create_causal_mask",
    "create_padding_mask",
    "scaled_dot_product_attention",
]
