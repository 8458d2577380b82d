"""The catalogue: every mistake that has a name, what it does, and how it is mended."""

from __future__ import annotations

from clearhead.doctor.mistake import Mistake as Mistake
from clearhead.doctor.wrong_behaviours import BEHAVIOURS
from clearhead.doctor.wrong_formulas import FORMULAS
from clearhead.doctor.wrong_masks import MASKS
from clearhead.doctor.wrong_parts import PARTS

CATALOGUE: dict[str, Mistake] = {mistake.name: mistake for mistake in (*FORMULAS, *PARTS, *MASKS, *BEHAVIOURS)}
BY_SETTING: dict[tuple[str, str], Mistake] = {
    (mistake.knob, setting): mistake
    for mistake in (*FORMULAS, *PARTS, *MASKS)
    if mistake.knob and mistake.setting
    for setting in (mistake.setting, *mistake.also)
}
