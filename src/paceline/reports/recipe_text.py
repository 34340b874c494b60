"""A recipe as text a person can read and paste: TOML, as far as its values allow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def recipe_text(recipe: Mapping[str, Any], prefix: str = "") -> str:
    """Plain keys first, then one section per nested part.

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
    parts = ["\n".join(_line(key, value) for key, value in plain.items())] if plain else []
    for key, value in nested.items():
        name = f"{prefix}{_key(key)}"
        body = recipe_text(value, f"{name}.")
        only_sections = bool(value) and all(isinstance(inner, Mapping) for inner in value.values())
        parts.append(body if only_sections else f"[{name}]\n{body}".rstrip("\n"))
    return "\n\n".join(parts)


def _line(key: str, value: Any) -> str:
    # TOML has no null: what is not set is said in a comment.
    return f"# {_key(key)} is not set" if value is None else f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    text = str(key)
    return text if text and all(c.isascii() and (c.isalnum() or c in "-_") for c in text) else json.dumps(text)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return json.dumps(str(value), ensure_ascii=False)
