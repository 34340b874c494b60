"""The shell of every HTML page: one file that holds everything it needs and asks the network for nothing.

    assets/shell.html       head, headline, conditions, footer, scripts: the same on every page
    assets/parts.html       tiles, tables, cards of charts
    assets/race.html, ...   what each kind of page has between the headline and the footer
    assets/page.css, .js    the style sheet; the script that draws the figures in the colours of the reader's scheme

Templates are Jinja2's, with autoescape: whatever comes from outside (names of runs, layers, classes, reasons) is text.
The page carries a content security policy that forbids every request, so the reader's browser enforces that it makes
none. It allows two scripts by their hashes, page.js and the library of charts, and none on a page without figures.

A page is small because what it carries is packed (gzip, base64) and unpacked by the browser's own DecompressionStream.
Measured on a race of four strategies, bytes:

    all of plotly.js, as it is          5.0 M
    its basic bundle (bar, scatter)     1.4 M
    the bundle packed                   0.72 M
    the bundle and the data packed      0.57 M

`plotly-basic-4.1.1.min.js.gz` is `gzip -9n` of the file in npm's plotly.js-basic-dist-min 4.1.1 (MIT, licence beside
it). The bundle has bars, lines and points; a chart of another kind needs another bundle.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from paceline.reports.chart import PAGE_COLOURS, Chart, Scheme

PLOTLY = "plotly-basic-4.1.1.min.js.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure on top of a page: its name, a number with its unit, and facts below it.

    `share` is the length of a bar under the number, in the colour of `series`. `pace` comes first among the facts, and
    what it is measured `against` is left out on a narrow screen.

    >>> Tile(name="lgc", number="6.5", unit="s").facts
    ()
    """

    name: str
    number: str
    unit: str = ""
    facts: Sequence[str] = ()
    pace: str = ""
    against: str = ""
    share: float | None = None
    series: str = ""


def page_html(
    template: str,
    *,
    title: str,
    headline: str,
    conditions: Iterable[str],
    sentences: Iterable[str] = (),
    figures: Sequence[Chart] = (),
    colours: Mapping[Scheme, Mapping[str, str]] = PAGE_COLOURS,
    folder: Path | None = None,
    **content: Any,
) -> str:
    """Return a page: a template of assets/, or of a folder of its own, with everything that it holds.

    `title`, `headline`, `conditions` (short phrases) and `sentences` (below the headline) are plain text.
    `figures` are the charts that the page's script draws; `content` is what else the template asks for.

    >>> page = page_html("codecs.html", title="A & B", headline="2 s", conditions=["1 seed"], tables=[],
    ...                  figures=[Chart(name="loss", title="Loss", caption="", data=[], layout={"height": 300})])
    >>> "<title>A &amp; B</title>" in page, "<li>1 seed</li>" in page, 'id="chart-loss"' in page
    (True, True, True)
    """
    drawn = {chart.name: {"data": chart.data, "layout": chart.layout} for chart in figures}
    return (
        _templates(folder)
        .get_template(template)
        .render(
            content,
            title=title,
            headline=headline,
            conditions=list(conditions),
            sentences=list(sentences),
            figures=figures,
            colour_variables=Markup(colour_variables(colours)),
            data=packed(json.dumps({"charts": drawn, "colours": colours}, separators=(",", ":"), allow_nan=False)),
            plotly=_packed_plotly() if figures else "",
            script_hashes=Markup(_script_hashes()) if figures else "",
        )
    )


@cache
def _templates(folder: Path | None) -> Environment:
    ours = PackageLoader("paceline.reports", "assets")
    templates = Environment(
        loader=ours if folder is None else ChoiceLoader([FileSystemLoader(folder), ours]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["prose"] = prose
    templates.globals["asset"] = lambda name: Markup(asset(name))  # our own files: a style sheet and a script
    return templates


@cache
def _packed_plotly() -> str:
    return base64.b64encode((files("paceline.reports") / "assets" / PLOTLY).read_bytes()).decode()


@cache
def _script_hashes() -> str:
    library = gzip.decompress((files("paceline.reports") / "assets" / PLOTLY).read_bytes()).decode()
    return f"{content_hash(asset('page.js'))} {content_hash(library)}"


def content_hash(text: str) -> str:
    """Return what stands for a script or a style sheet in a content security policy that allows it.

    >>> content_hash("")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def packed(text: str) -> str:
    """Return a text as the page's script unpacks it: gzip in base64, in which nothing can end an element.

    >>> gzip.decompress(base64.b64decode(packed("</script>"))).decode()
    '</script>'
    """
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def prose(sentence: str) -> Markup:
    """Return a sentence, escaped, in which no line ends between a number and its unit.

    >>> prose("<lgc>: 33 % in 2 s").replace("\u00a0", "_")
    Markup('&lt;lgc&gt;: 33_% in 2_s')
    """
    return escape(re.sub(r"(\d) (%|(?:s|ms|us|kB|MB|GB)\b)", "\\1\u00a0\\2", sentence))


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

    >>> "autoescape" in asset("shell.html"), "Plotly.react" in asset("page.js")
    (False, True)
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
