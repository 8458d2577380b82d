"""How a function is called, as one value: library, form, sizes, which result is the output, mask, causal flag."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.doctor.forms import Form
from clearhead.doctor.masks import MaskWay
from clearhead.doctor.sizes import Bounds, Sizes

ANY = Bounds()


@dataclass(frozen=True)
class Way:
    """How a function is called: library, form, sizes, which of the things it returns is the output, mask, flag."""

    library: str
    form: Form
    output: int | None = None
    weights: int | None = None
    mask: MaskWay | None = None
    causal: str | None = None
    bounds: Bounds = ANY
    order: tuple[int, ...] | None = None  # which input comes first, where names do not say

    def fit(self, sizes: Sizes) -> Sizes:
        """Sizes as near to these as the function takes."""
        return self.form.fit(self.bounds.fit(self.form.fit(sizes)))
