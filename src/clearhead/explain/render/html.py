"""A page as self-contained HTML: no script, no font, no address; light and dark as the reader has it."""

from __future__ import annotations

from html import escape

from clearhead.explain.render.page import Line, Page, Step

LIGHT = (
    "--ink:#1c2430;--soft:#66707d;--line:#d9dee5;--back:#fff;--hue:#1769aa;--fill:#cfe4f5;--good:#1a7f37;--bad:#c62828"
)
DARK = (
    "--ink:#e6e9ee;--soft:#98a3b0;--line:#39424e;--back:#161b22;--hue:#6cb6ff;--fill:#1f4a73;"
    "--good:#57c26b;--bad:#ff7b72"
)

# What the reader's system has decides, unless the page around it does: JupyterLab and VS Code say which they are.
# Notebooks have rules for every table (right-aligned, striped, without borders), which must not reach these.
STYLE = f"""
.clearhead{{{LIGHT};font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:64rem;
 padding:1rem 1.25rem;text-align:left}}
@media(prefers-color-scheme:dark){{.clearhead{{{DARK}}}}}
[data-jp-theme-light=true] .clearhead,.vscode-light .clearhead{{{LIGHT}}}
[data-jp-theme-light=false] .clearhead,.vscode-dark .clearhead{{{DARK}}}
.clearhead h2,.clearhead h3{{color:inherit;font-family:inherit;font-weight:600;line-height:1.3}}
.clearhead h2{{font-size:1.25rem;margin:0 0 .25rem}}
.clearhead h3{{font-size:1rem;margin:1.25rem 0 .25rem}}
.clearhead h2.good{{color:var(--good)}}
.clearhead h2.bad{{color:var(--bad)}}
.clearhead p{{margin:.15rem 0;color:var(--soft)}}
.clearhead .formula{{font-family:ui-monospace,Menlo,Consolas,monospace;color:var(--hue)}}
.clearhead .scroll{{overflow-x:auto}}
.clearhead div.scroll table{{border-collapse:collapse;border:0;margin:0;font-variant-numeric:tabular-nums;
 font-size:inherit;color:inherit;table-layout:auto}}
.clearhead div.scroll tr,.clearhead div.scroll tr:hover{{background:transparent}}
.clearhead div.scroll td,.clearhead div.scroll th{{padding:.15rem .75rem .15rem 0;border:0;
 border-bottom:1px solid var(--line);white-space:pre;text-align:left;
 vertical-align:middle;max-width:none;color:inherit;background:transparent;
 line-height:1.5}}
.clearhead div.scroll th{{font-weight:600;color:var(--soft)}}
.clearhead div.scroll .sheet td:last-child{{white-space:pre-line}}
.clearhead div.scroll td.worked,.clearhead div.scroll td.result{{font-family:ui-monospace,Menlo,Consolas,monospace}}
.clearhead div.scroll td.worked{{white-space:normal;max-width:40rem}}
.clearhead div.scroll td.result,.clearhead div.scroll th.result{{text-align:right;vertical-align:bottom}}
.clearhead div.scroll td.result{{font-weight:600}}
.clearhead p.says{{color:var(--ink);font-variant-numeric:tabular-nums}}
.clearhead div.scroll td.note{{color:var(--soft);white-space:normal}}
.clearhead div.scroll tr.faint td{{color:var(--soft)}}
.clearhead .bar{{display:inline-block;height:.8em;min-width:1px;background:var(--hue);border-radius:2px;
 vertical-align:middle}}
.clearhead .track{{display:inline-block;width:12rem;background:var(--fill);border-radius:2px;line-height:1;
 text-align:left}}
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
