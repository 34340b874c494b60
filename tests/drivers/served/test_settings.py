"""The numbers of a server's limits: each is in its range, or is refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.drivers.served.messages import decode, encode
from paceline.drivers.served.settings import Limits, ServeError, ServerSettings
from paceline.drivers.served.worker import Worker
from paceline.strategies import Full
from tests.drivers.served.test_messages import EXAMPLES

NAMES = [each.name for each in dataclasses.fields(Limits)]
WELCOME = EXAMPLES[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_out_of_its_range_is_refused_by_name(name):
    for value in (math.inf, -math.inf, math.nan, -1, 10**10, "3", None, True, 1j):
        with pytest.raises(ServeError, match=rf"{name} must be a .*number.* between .* \({name}="):
            Limits(**{name: value})


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_of_nothing_is_refused_but_for_the_gathering(name):
    if name == "gather_seconds":
        assert Limits(gather_seconds=0).gather_seconds == 0
    else:
        with pytest.raises(ServeError, match=name):
            Limits(**{name: 0})


@pytest.mark.parametrize("name", ["rounds", "workers", "most_workers", "blocks", "evaluate_every", "checkpoint_every"])
def test_a_setting_that_counts_is_a_whole_number_in_its_range(name, tmp_path):
    model = torch.nn.Linear(2, 1)
    good = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "schedule": None,
        "strategy": Full(), "rounds": 1, "workers": 1, "folder": tmp_path,
    }  # fmt: skip
    ServerSettings(**good)
    for value in (-1, 2.5, math.nan, math.inf, "3", None, True, 2**60):
        with pytest.raises(ServeError, match=rf"{name} must be a whole number between [01] and .* \({name}="):
            ServerSettings(**good | {name: value})


def test_a_worker_needs_a_patience_that_is_a_number():
    for patience in (math.nan, -1.0):
        with pytest.raises(ValueError, match=r"patience_seconds must be 0 or more \(patience_seconds="):
            Worker("127.0.0.1:29400", torch.nn.Linear(2, 1), patience_seconds=patience)


@given(seconds=st.floats())
def test_a_silence_that_is_accepted_can_be_said_in_a_message(seconds):
    try:
        limits = Limits(silence_seconds=seconds)
    except ServeError:
        assert not 0.001 <= seconds <= 10**9
        return
    welcome = dataclasses.replace(WELCOME, silence_seconds=limits.silence_seconds)
    assert decode(encode(welcome))[0] == welcome
