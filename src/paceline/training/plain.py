"""Nested state with tensors in it <-> plain values that JSON can hold, and the tensors beside them.

An optimiser's `state_dict` has dicts with whole-number keys, tuples and tensors anywhere; JSON has none of these. What
is neither plain nor one of them is refused by its path, never pickled.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_MARKS = ("=tensor", "=items", "=tuple", "=counter")


def without_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value with every tensor moved to `tensors`, under its path.

    >>> found = {}
    >>> without_tensors({0: {"step": torch.tensor(3.0)}, "lr": (0.1,)}, "state", found)
    {'=items': [[0, {'step': {'=tensor': 'state.0.step'}}], ['lr', {'=tuple': [0.1]}]]}
    >>> list(found)
    ['state.0.step']
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"=tensor": path}
    if isinstance(value, Counter):
        return {"=counter": [[key, count] for key, count in value.items()]}
    if isinstance(value, dict):
        parts = [[key, without_tensors(inner, f"{path}.{key}", tensors)] for key, inner in value.items()]
        plain = all(isinstance(key, str) and key not in _MARKS for key in value)
        return dict(parts) if plain else {"=items": parts}
    if isinstance(value, list | tuple):
        parts = [without_tensors(inner, f"{path}.{index}", tensors) for index, inner in enumerate(value)]
        return parts if isinstance(value, list) else {"=tuple": parts}
    raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def with_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value that `without_tensors` took apart.

    >>> found = {}
    >>> with_tensors(without_tensors({1: (torch.ones(1), 2)}, "x", found), found)
    {1: (tensor([1.]), 2)}
    """
    return _put_back(value, dict(tensors))


def _put_back(value: Any, left: dict[str, torch.Tensor]) -> Any:
    """Put the tensors back; each is `left` until it is used, so that a few bytes cannot ask for a thousand copies."""
    if isinstance(value, list):
        return [_put_back(inner, left) for inner in value]
    if not isinstance(value, dict):
        return value
    if "=tensor" in value:
        return left.pop(value["=tensor"]).clone()
    if "=items" in value:
        return {key: _put_back(inner, left) for key, inner in value["=items"]}
    if "=tuple" in value:
        return tuple(_put_back(inner, left) for inner in value["=tuple"])
    if "=counter" in value:
        return Counter(dict(value["=counter"]))
    return {key: _put_back(inner, left) for key, inner in value.items()}
