"""A page as self-contained HTML: no script, no font, no address; light and dark as the reader has it."""

from __future__ import annotations

from html import escape

from clearhead.explain.render.page import Line, Page, Step

STYLE = """
.clearhead{--ink:#1c2430;--soft:#66707d;--line:#d9dee5;--back:#fff;--hue:#1769aa;--fill:#cfe4f5;
 font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:64rem;padding:1rem 1.25rem}
@media(prefers-color-scheme:dark){.clearhead{--ink:#e6e9ee;--soft:#98a3b0;--line:#39424e;--back:#161b22;--hue:#6cb6ff;
 --fill:#1f4a73}}
.clearhead h2{font-size:1.25rem;margin:0 0 .25rem}
.clearhead h3{font-size:1rem;margin:1.25rem 0 .25rem}
.clearhead p{margin:.15rem 0;color:var(--soft)}
.clearhead .formula{font-family:ui-monospace,Menlo,Consolas,monospace;color:var(--hue)}
.clearhead .scroll{overflow-x:auto}
.clearhead table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.clearhead td{padding:.15rem .75rem .15rem 0;border-bottom:1px solid var(--line);white-space:pre;text-align:left}
.clearhead td.worked,.clearhead td.result{font-family:ui-monospace,Menlo,Consolas,monospace}
.clearhead td.worked{white-space:normal;max-width:40rem}
.clearhead td.result{text-align:right;font-weight:600;vertical-align:bottom}
.clearhead p.says{color:var(--ink);font-variant-numeric:tabular-nums}
.clearhead td.note{color:var(--soft);white-space:normal}
.clearhead tr.faint td{color:var(--soft)}
.clearhead .bar{display:inline-block;height:.8em;min-width:1px;background:var(--hue);border-radius:2px;
 vertical-align:middle}
.clearhead .track{display:inline-block;width:12rem;background:var(--fill);border-radius:2px;line-height:1}
""".strip()


def fragment(page: Page) -> str:
    """The page as one element with its own style, for a notebook."""
    parts = [f"<style>{STYLE}</style>", f"<h2>{escape(page.title)}</h2>"]
    parts += [f"<p>{escape(fact)}</p>" for fact in page.facts]
    parts.append(f'<p class="formula">{escape(page.formula)}</p>')
    parts += [_step(number, step) for number, step in enumerate(page.steps, 1)]
    return f'<div class="clearhead">{"".join(parts)}</div>'


def document(page: Page) -> str:
    """The page as a whole file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(page.title)}</title></head><body>{fragment(page)}</body></html>\n"
    )


def _step(number: int, step: Step) -> str:
    parts = [f'<h3>{number}. {escape(step.title)} <span class="formula">{escape(step.formula)}</span></h3>']
    if step.lines:
        bars = any(line.share is not None for line in step.lines)
        notes = any(line.note for line in step.lines) and not bars  # a note stands where its line has no bar
        rows = "".join(_row(line, bars, notes) for line in step.lines)
        parts.append(f'<div class="scroll"><table>{rows}</table></div>')
    if step.says:
        parts.append(f'<p class="says">{escape(step.says)}</p>')
    return "".join(parts)


def _row(line: Line, bars: bool, notes: bool) -> str:
    sign = " =" if line.worked and line.result else ""
    cells = [
        f"<td>{escape(line.name)}</td>",
        f'<td class="worked">{escape(line.worked + sign)}</td>',
        f'<td class="result">{escape(line.result)}</td>',
    ]
    if bars:
        if line.share is None:
            cells.append(f'<td class="note">{escape(line.note)}</td>')
        else:
            width = 100 * min(max(line.share, 0.0), 1.0)
            drawn = f'<span class="bar" style="width:{width:.2f}%"></span>'
            cells.append(f'<td><span class="track">{drawn}</span></td>')
    if notes:
        cells.append(f'<td class="note">{escape(line.note)}</td>')
    faint = ' class="faint"' if line.faint else ""
    return f"<tr{faint}>{''.join(cells)}</tr>"
