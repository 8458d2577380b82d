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
)  # fmt: skip
