"""What a checkpoint says of its run, compared setting by setting with the run that would go on from it.

A checkpoint holds the recipe of its run, or what a script had given instead. Whoever goes on with another seed or
strategy would get a run that is neither of the two, so every setting that differs is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from paceline.renaming import with_new_names, with_old_defaults

OF_THE_MACHINE = {"data.directory", "delay.file", "pipeline.plan"}  # the same may lie elsewhere on another one


def difference(
    kept: Mapping[str, Any], given: Mapping[str, Any], *, within: str = "", ignoring: Collection[str] = ()
) -> str:
    """Return the first setting in which two runs differ, with both values; "" if there is none.

    Paths are of the machine, and a network of one's own may have moved to another module: they may differ, and so may
    the settings to be ignored.

    >>> difference({"seed": 0, "optimizer": {"lr": 0.1}}, {"seed": 0, "optimizer": {"lr": 0.2}})
    'optimizer.lr was 0.1, and is 0.2 now'
    >>> difference({"rounds": 300}, {"rounds": 640}, ignoring=["rounds"])
    ''
    """
    kept, given = json.loads(json.dumps(kept)), json.loads(json.dumps(given))  # a tuple was kept as a list
    for name in dict.fromkeys([*kept, *given]):
        before, now, setting = kept.get(name), given.get(name), f"{within}{name}"
        if before == now or setting in OF_THE_MACHINE or setting in ignoring:
            continue
        if setting == "model.name" and ":" in str(before) and ":" in str(now):
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            found = difference(before, now, within=f"{setting}.", ignoring=ignoring)
            if found:
                return found
            continue
        return f"{setting} was {json.dumps(before)}, and is {json.dumps(now)} now"
    return ""


def with_defaults(kept: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe with its settings' names of today, and values of those that did not exist when it began.

    >>> with_defaults({"optimizer": {"lr": 0.1}}, {"optimizer": {"lr": 0.05, "trust_coefficient": 0.001}})
    {'optimizer': {'lr': 0.1, 'trust_coefficient': 0.001}}
    """
    kept, defaults = with_new_names(kept), with_old_defaults(defaults)
    whole = {**defaults, **kept}
    for name, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(kept.get(name), Mapping):
            whole[name] = {**value, **kept[name]}
    return whole


def remedy(different: str) -> str:
    """Return what helps where two runs differ in this: more rounds are an extension of the run.

    >>> remedy("rounds was 20, and is 40 now")
    'for more rounds give --rounds beside --resume, or extension=Extension(rounds=...) of paceline.recipes.extension'
    """
    if different.startswith("rounds was "):
        how = "extension=Extension(rounds=...) of paceline.recipes.extension"
        return f"for more rounds give --rounds beside --resume, or {how}"
    return "give what it was, or begin anew in another folder"
