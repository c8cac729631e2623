"""Result rows as one HTML page that needs nothing beside it: no script, no font, no file, pictures included."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from . import report

Row = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; background: white; }
pre { overflow-x: auto; padding: .6rem; background: #8882; white-space: pre-wrap; }
.small { opacity: .75; }
"""


def html(rows: Sequence[Row], pictures: Mapping[str, bytes]) -> str:
    """The page; `pictures` are {what it shows: PNG}."""
    parts = ["<h1>Evaluation</h1>"]
    if overview := report.summary(rows):
        parts.append(_table(overview))
    parts += [_picture(title, png) for title, png in pictures.items()]
    for section in report.sections(rows):
        parts += [f"<h2>{escape(section.title)}</h2>", f'<p class="small">{escape(section.settings)}</p>']
        parts.append(_table([report.HEADER, *section.cells]))
        parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in section.notes) + "</ul>")
        if section.first_prompt is not None:
            parts.append(_details("The first prompt, as the target sees it", section.first_prompt))
    parts += [f'<p class="small">{escape(report.LEGEND)}</p>', f"<pre>{escape(rows[0]['settings']['command'])}</pre>"]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n<title>Evaluation</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(table: Sequence[report.Cells]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table[0])
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in table[1:])
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n' + "\n".join(lines) + "\n</table></div>"


def _picture(title: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return (
        f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{data}"><figcaption>{escape(title)}'
        "</figcaption></figure>"
    )


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
