"""Letters that matplotlib's own font has not: drawn in a font of this machine that has them, or else spelled out."""

from __future__ import annotations

from functools import cache

# Fonts of the systems that people have, which hold Chinese, Japanese, Korean and other scripts
KNOWN = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans CJK KR", "Source Han Sans", "Droid Sans Fallback",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "IPAGothic", "IPAexGothic", "TakaoGothic", "VL Gothic", "NanumGothic",
    "Hiragino Sans", "PingFang SC", "Heiti SC", "Apple SD Gothic Neo", "Arial Unicode MS", "Yu Gothic", "Meiryo",
    "MS Gothic", "Microsoft YaHei", "SimHei", "Malgun Gothic", "Noto Sans", "Noto Emoji", "Symbola", "Unifont",
)  # fmt: skip


def families(words: str) -> list[str] | None:
    """The fonts that words are drawn in, the usual one first; None where the usual one has every letter."""
    return list(_all()) if any(not _has(_all()[:1], sign) for sign in words if sign != "\n") else None


def drawable(words: str) -> str:
    r"""Words with letters that no font here has spelled as Python spells them.

    >>> drawable("bank"), drawable("\ue000")
    ('bank', '\\ue000')
    """
    return "".join(sign if sign.isascii() or _has(_all(), sign) else ascii(sign)[1:-1] for sign in words)


@cache
def _all() -> tuple[str, ...]:
    from matplotlib import font_manager, rcParams

    there = {font.name for font in font_manager.fontManager.ttflist}
    usual = font_manager.FontProperties(family=rcParams["font.family"]).get_name()
    return (usual, *(name for name in KNOWN if name in there and name != usual))


@cache
def _has(names: tuple[str, ...], sign: str) -> bool:
    return any(_font(name).get_char_index(ord(sign)) for name in names)


@cache
def _font(name: str):  # type: ignore[no-untyped-def]  # matplotlib's own type, which is not imported here
    from matplotlib import font_manager

    return font_manager.get_font(font_manager.findfont(name))
