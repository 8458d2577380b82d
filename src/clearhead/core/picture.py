"""A picture of a mask in letters: text wherever text is wanted, and squares where a notebook shows it."""

from __future__ import annotations

from typing import Any

# Inline, since a notebook keeps no style of ours; a middle blue that is seen on white and on black
SQUARES = {"■": "#4a90d9", "▒": "#4a90d966", "·": "#80808026"}
SIDE = 12


class Picture(str):
    r"""Lines of ■, · and ▒; a `str` in every way, that a notebook draws as squares.

    >>> square = Picture("■ ·\n■ ■")
    >>> square == "■ ·\n■ ■", square._repr_html_().count("<rect")
    (True, 4)
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = [line.split() for line in self.splitlines()]
        wide, high = SIDE * max(map(len, rows), default=0), SIDE * len(rows)
        squares = [
            f'<rect x="{SIDE * x}" y="{SIDE * y}" width="{SIDE - 1}" height="{SIDE - 1}" fill="{SQUARES[sign]}"/>'
            for y, row in enumerate(rows)
            for x, sign in enumerate(row)
        ]
        words = "queries down, keys across; filled: may attend, pale: some of the block, grey: may not"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" role="img">'
            f"<title>{words}</title>{''.join(squares)}</svg>"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))
