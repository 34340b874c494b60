"""The shell of every HTML page: one file that holds everything it needs and asks the network for nothing.

Each page is a template of assets/ filled with its texts, its charts and the one style sheet. The page carries a
content security policy that forbids every request, so the reader's browser enforces that it makes none. Every text
from outside goes through `escape` or `prose` on its way in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from paceline.reports.chart import PAGE_COLOURS, Chart, Scheme


def page_html(
    template: str,
    *,
    title: str,
    headline: str,
    conditions: Iterable[str],
    sentences: Iterable[str] = (),
    figures: Sequence[Chart] = (),
    colours: Mapping[Scheme, Mapping[str, str]] = PAGE_COLOURS,
    **sections: str,
) -> str:
    """Return a page: a template of assets/ with everything that it holds.

    `title`, `headline`, `conditions` (short phrases) and `sentences` (below the headline) are plain text.
    `sections` are the template's other parts, as HTML. `figures` are the charts that the page's script draws.

    >>> page = page_html("codecs.html", title="A & B", headline="2 s", conditions=["1 seed"], chart="", tables="")
    >>> "<title>A &amp; B</title>" in page, "<li>1 seed</li>" in page
    (True, True)
    """
    drawn = {chart.name: {"data": chart.data, "layout": chart.layout} for chart in figures}
    return Template(asset(template)).substitute(
        sections,
        title=escape(title),
        headline=prose(headline),
        sentences="".join(f"<p>{prose(sentence)}</p>" for sentence in sentences),
        conditions="".join(f"<li>{escape(phrase)}</li>" for phrase in conditions),
        style=colour_variables(colours) + asset("page.css"),
        data=safe_json({"charts": drawn, "colours": colours}),
        plotly=get_plotlyjs() if figures else "",
        script=asset("page.js"),
    )


def chart_card(chart: Chart, keys: str = "") -> str:
    """Return a chart's place on the page, into which the script draws; `keys` are the parts of its legend, as HTML.

    >>> 'id="chart-loss"' in chart_card(Chart(name="loss", title="Loss", caption="", data=[], layout={}))
    True
    """
    wide = " wide" if chart.wide else ""
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    height = int(chart.layout.get("height", 320))
    return (
        f'<section class="card{wide}" aria-labelledby="title-{chart.name}">'
        f'<h2 id="title-{chart.name}">{escape(chart.title)}</h2>'
        f'<p class="caption">{escape(chart.caption)}</p>{legend}'
        f'<div class="chart" id="chart-{chart.name}" style="height: {height}px"></div></section>'
    )


def prose(sentence: str) -> str:
    """Return a sentence, escaped, in which no line ends between a number and its unit.

    >>> prose("<lgc>: 33 % in 2 s").replace("\u00a0", "_")
    '&lt;lgc&gt;: 33_% in 2_s'
    """
    return escape(re.sub(r"(\d) (%|s\b)", "\\1\u00a0\\2", sentence))


def safe_json(value: Any) -> str:
    """Return JSON that may stand inside a script element: no text in it can end the element.

    >>> safe_json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def colour_variables(colours: Mapping[Scheme, Mapping[str, str]]) -> str:
    """Return the colours of both schemes as variables of a style sheet.

    >>> print(colour_variables({"light": {"ink": "#000"}, "dark": {"ink": "#fff"}}), end="")
    :root{color-scheme:light dark;--ink:#000;}
    @media (prefers-color-scheme: dark){:root{--ink:#fff;}}
    """
    light, dark = (
        "".join(f"--{token}:{colour};" for token, colour in colours[scheme].items()) for scheme in PAGE_COLOURS
    )
    return f":root{{color-scheme:light dark;{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def asset(name: str) -> str:
    """Return a file that pages are made of.

    >>> "$headline" in asset("page.html")
    True
    """
    return (files("paceline.reports") / "assets" / name).read_text(encoding="utf-8")


def recipe_text(recipe: Mapping[str, Any], prefix: str = "") -> str:
    """Return a recipe as TOML, as far as its values allow: plain keys first, then one section per nested part.

    >>> print(recipe_text({"seed": 1, "strategy": {"name": "lgc", "k": 7}, "target_loss": None}))
    seed = 1
    # target_loss is not set
    <BLANKLINE>
    [strategy]
    name = "lgc"
    k = 7
    """
    plain = {key: value for key, value in recipe.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in recipe.items() if isinstance(value, Mapping)}
    parts = ["\n".join(_toml_line(key, value) for key, value in plain.items())] if plain else []
    for key, value in nested.items():
        name = f"{prefix}{_toml_key(key)}"
        body = recipe_text(value, f"{name}.")
        only_sections = bool(value) and all(isinstance(inner, Mapping) for inner in value.values())
        parts.append(body if only_sections else f"[{name}]\n{body}".rstrip("\n"))
    return "\n\n".join(parts)


def _toml_line(key: str, value: Any) -> str:
    # TOML has no null: a comment stands for a setting that is not set.
    return f"# {_toml_key(key)} is not set" if value is None else f"{_toml_key(key)} = {_toml_value(value)}"


def _toml_key(key: str) -> str:
    text = str(key)
    return text if text and all(c.isascii() and (c.isalnum() or c in "-_") for c in text) else json.dumps(text)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(str(value), ensure_ascii=False)
