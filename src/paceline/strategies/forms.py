"""The types of which strategies' states are made: what a checkpoint says is held against them before it is loaded.

A state's `form` names its fields and their types (see `paceline.decoding`), beside the `state_dict` that writes them.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from paceline.decoding import Between, Words, WorkerNumber

Workers: TypeAlias = tuple[WorkerNumber, ...]
Seconds: TypeAlias = Annotated[float, Between(0, 1e16)]
Nothing: TypeAlias = Annotated[tuple[()], Words("empty between two rounds")]  # wherever a state is kept
