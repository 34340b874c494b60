"""What a checkpoint of an averaging says of itself, so that another run's is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.strategies.averaging import Averaging


def member_description(member: Averaging) -> dict[str, str]:
    """The settings of a member, as text.

    >>> from paceline.strategies.averaging import make_averaging
    >>> member_description(make_averaging("hpsgd"))["overlap"]
    'True'
    """
    settings = {setting.name: getattr(member, setting.name) for setting in dataclasses.fields(member)}
    return {"member": settings.pop("name")} | {name: repr(value) for name, value in settings.items()}


def check_state(state: Mapping[str, Any], about: Mapping[str, str], checksum: str) -> None:
    """Refuse a state that is of something else.

    >>> check_state({"about": {"codec": "QSGD()"}}, {"codec": "OneBit()"}, "")
    Traceback (most recent call last):
    ValueError: this state is of another averaging: its codec is QSGD(), and this one's is OneBit()
    """
    for key, text in about.items():
        if state["about"].get(key) != text:
            raise ValueError(
                f"this state is of another averaging: its {key} is {state['about'].get(key)}, and this one's is {text}"
            )
    if state["checksum"] != checksum:
        raise ValueError(
            "the model is not what it was when this state was taken. Save: first the averaging's state_dict(), then "
            "the model's. Load: construct the averaging, load the model's state, then the averaging's"
        )
