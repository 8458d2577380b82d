"""What the fuzz found, cut down and pinned: each of these problems once had a wrong answer.

A line is what `make fuzz` prints. The comment says what was wrong.
"""

from __future__ import annotations

from drawn import Drawn

FINDINGS: tuple[Drawn, ...] = (
    # no keys and no batch axis: a reshape to −1 rows of nothing
    Drawn(numbers=2686, verb="merge", library="torch", kernel="triton", queries=1, keys=1, cuts=(0,)),
    Drawn(numbers=1, verb="gradients", library="torch", kernel="triton", queries=2, keys=0, group=2),
    # gradients of keys that batch rows share were rounded to half precision row by row, and then added up
    Drawn(numbers=121, verb="gradients", kernel="compiled", dtype="float16", batch=((2,), (), ()), queries=1, keys=93),
    Drawn(
        numbers=853, verb="gradients", library="torch", kernel="compiled", dtype="bfloat16", batch=((2, 1, 2), (), ()),
        queries=2, keys=193, features=13, width=13, bias=("alibi", "end", 6), sinks=-200.0,
    ),
    # a sink whose row sees no key: its part of the log-sum-exp's gradient was lost
    *(
        Drawn(verb="merged autograd", library="torch", kernel=kernel, mask=("lengths", 0), sinks=0.0, wants="qkvs")
        for kernel in ("dense", "tiled", "compiled")
    ),
    # a row that sees no key takes no part, whatever its gradient holds; with a sink it did
    Drawn(
        numbers=2417, verb="gradients", kernel="tiled", key_heads=2, group=3, queries=1, keys=1,
        mask=("where", "h", 0.9, 365727), sinks=3.0, planted=(("padding", "-inf"),),
    ),
    Drawn(
        numbers=277, verb="autograd", library="torch", kernel="dense", queries=2, keys=1, mask=("causal", "end", None),
        planted=(("padding", "inf"),),
    ),
    # a sink of +inf leaves nothing for the keys
    *(Drawn(numbers=1, verb=verb, sinks=float("inf")) for verb in ("attention", "observe", "gradients")),
    # a sink far above all scores does not fit into exp
    Drawn(numbers=2018, verb="observe", kernel="compiled", queries=1, keys=1, sinks=900.0),
    Drawn(numbers=2759, verb="merge", queries=1, keys=114, features=1, width=1, sinks=900.0, cuts=(113,)),
    # a negated mask let the empty end of a panel in
    Drawn(
        numbers=3, verb="gradients", kernel="compiled", dtype="float16", queries=1, keys=65,
        mask=("not", ("lengths", 49)), planted=(("padding", "nan"),),
    ),
    # no keys: grouped queries, and random blocks
    Drawn(numbers=3244, verb="gradients", kernel="dense", group=2, queries=1, keys=0),
    Drawn(numbers=2282, verb="observe", kernel="dense", queries=1, keys=0, mask=("random_blocks", 9, 3, 594832)),
    # the sign bit of a tensor, and a merge's entropy beside a sink
    Drawn(numbers=14, library="torch", kernel="compiled", layouts=("negative", "plain", "negative", "plain")),
    Drawn(numbers=55, verb="merge", kernel="tiled", sinks=3.0, cuts=(1, 1)),
    # softmax that saturates in half precision: Σ dout · output of the rounded output
    Drawn(numbers=4, verb="gradients", kernel="compiled", dtype="bfloat16", queries=5, keys=37, large=10.0, width=16),
    Drawn(numbers=4, verb="gradients", kernel="tiled", dtype="float16", queries=5, keys=37, large=10.0, width=16),
)  # fmt: skip
