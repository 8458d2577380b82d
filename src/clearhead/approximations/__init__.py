"""The efficient variants, each beside the exact answer: methods as values, and how far from exact they are.

approximate(q, k, v, performer(256), mask=causal())
audit(performer(256), q, k, v)
"""

from clearhead.approximations.approximating import approximate
from clearhead.approximations.auditing import audit
from clearhead.approximations.audits import Audit
from clearhead.approximations.block_selection import topk_blocks
from clearhead.approximations.clustering import clusters
from clearhead.approximations.comparing import Comparison, compare
from clearhead.approximations.favor import performer
from clearhead.approximations.linear_transformer import linear
from clearhead.approximations.low_rank import linformer
from clearhead.approximations.method import Method, crossover
from clearhead.approximations.nystromformer import nystrom
from clearhead.approximations.reformer import lsh
from clearhead.approximations.sweeping import Sweep, sweep

__all__ = [
    "Audit",
    "Comparison",
    "Method",
    "Sweep",
    "approximate",
    "audit",
    "clusters",
    "compare",
    "crossover",
    "linear",
    "linformer",
    "lsh",
    "nystrom",
    "performer",
    "sweep",
    "topk_blocks",
]
