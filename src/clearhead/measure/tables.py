"""Tables of numbers as text: within a width, however narrow, and numbers that never outgrow their columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

# As wide as a table is unless somebody says how much room there is
WIDTH = 60


def laid_out(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH, *, names: bool = False
) -> list[str]:
    r"""The lines of a table, right-aligned. What does not fit goes below, under the first column once more.

    `names` says that the first column has words in it, which stand at the left.

    >>> print(*laid_out(["d", "spread", "entropy"], [["16", "4.156", "1.2785"]], width=20), sep="\n")
     d  spread  entropy
    16   4.156   1.2785
    >>> print(*laid_out(["d", "spread", "entropy"], [["16", "4.156", "1.2785"]], width=12), sep="\n")
     d  spread
    16   4.156
    <BLANKLINE>
     d  entropy
    16   1.2785
    """
    widths = [max(len(row[place]) for row in (titles, *rows)) for place in range(len(titles))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= width else 1
    parts: list[list[int]] = [[0]]
    for place in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(gap + widths[i] for i in (*parts[-1], place)) - gap > width:
            parts.append([0])
        parts[-1].append(place)
    if len(parts) > 1:
        gap = 2 if all(sum(widths[i] + 2 for i in part) - 2 <= width for part in parts) else 1
    lines: list[str] = []
    for part in parts:
        lines += [] if not lines else [""]
        for row in (titles, *rows):
            cells = [row[i].ljust(widths[i]) if names and i == 0 else row[i].rjust(widths[i]) for i in part]
            lines.append((" " * gap).join(cells).rstrip())
    return lines


def number(value: float, decimals: int) -> str:
    """A number with so many decimals where that shows it, and in powers of ten where it does not.

    >>> number(4.1561, 3), number(0.0, 3), number(1.6e140, 3), number(2e-9, 3), number(math.inf, 3)
    ('4.156', '0.000', '1.60e+140', '2.00e-09', '∞')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    small = value != 0 and abs(value) < 0.5 * 10.0**-decimals
    return f"{value:.2e}" if small or abs(value) >= 10**6 else f"{value:.{decimals}f}"


def growth(now: float, before: float) -> str:
    """By what a number has grown.

    >>> growth(1024, 256), growth(1.0, 0.0)
    ('× 4.00', '')
    """
    return f"× {now / before:.2f}" if before > 0 and math.isfinite(now / before) else ""
