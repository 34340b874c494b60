"""The placement against reference_pipeline.py, which tries every cut: on chains and graphs, with all that differs."""

from __future__ import annotations

from paceline.pipeline.devices import Device
from paceline.pipeline.placement import PlacementError, place, priced
from tests.oracles import placement as reference
from tests.pipeline.cases import chance_of, random_case

CASES = 1000


def placed(case):
    try:
        return place(case.profile, case.devices, **case.settings)
    except PlacementError:
        return None


def tried(case):
    return list(reference.fitting_cuts(case.profile, case.devices, **case.settings))


def test_the_placement_is_the_best_of_all_cuts():
    chance = chance_of(1)
    seen = dict.fromkeys(("fits", "too few layers", "too little memory", "memory decides", "bytes decide", "order"), 0)
    for number in range(CASES):
        case = random_case(chance)
        found, fitting = placed(case), tried(case)
        assert (found is not None) == bool(fitting), (number, case)
        if found is None:
            blocks = len(case.profile.layers) - len(case.profile.bound)
            seen["too few layers" if blocks < len(case.devices) else "too little memory"] += 1
            continue
        best = min(fitting)
        assert (found.slowest.seconds, found.crossing_bytes, found.cuts) == best, (number, case)
        assert found.proven
        assert found.fits
        seen["fits"] += 1
        everywhere = place(case.profile, [Device(speed=device.speed) for device in case.devices], **case.settings)
        seen["memory decides"] += everywhere.cuts != found.cuts
        as_fast = [cut for cut in fitting if cut[0] == best[0]]
        seen["bytes decide"] += max(as_fast)[1] > best[1]
        seen["order"] += len([cut for cut in as_fast if cut[1] == best[1]]) > 1
    assert seen["fits"] >= CASES // 3, seen
    assert min(seen.values()) >= CASES // 100, seen  # none of the rules stays untried


def test_every_piece_costs_what_the_plain_formulas_say():
    chance, checked = chance_of(2), 0
    while checked < 100:
        case = random_case(chance, chunks=1 + checked % 2, limited=0.0)
        cuts = list(reference.possible_cuts(len(case.profile.layers), len(case.in_flight), case.profile.bound))
        if not cuts:
            continue
        checked += 1
        k = len(case.devices)
        for piece in priced(case.profile, cuts[len(cuts) // 2], case.devices, **case.settings).pieces:
            before, behind = case.links[(piece.index - 1) % k], case.links[piece.index % k]
            run = case.profile, piece.first, piece.last
            assert piece.seconds == reference.piece_seconds(*run, case.devices[piece.device], before, behind)
            assert piece.seconds == (
                piece.forward_seconds + piece.backward_seconds + piece.send_seconds + piece.return_seconds
            )
            assert piece.memory_bytes == reference.piece_bytes(
                *run, in_flight=case.in_flight[piece.index], microbatches=case.microbatches, states=case.states
            )


def test_two_pieces_on_each_device_are_the_best_wherever_that_is_said():
    chance = chance_of(3)
    seen = dict.fromkeys(("proven", "not proven", "no cut fits", "one was not found"), 0)
    for number in range(300):
        case = random_case(chance, chunks=2, most_layers=9, most_devices=2)
        found, fitting = placed(case), tried(case)
        if found is None:
            seen["one was not found" if fitting else "no cut fits"] += 1
        elif found.proven:
            seen["proven"] += 1
            assert (found.slowest.seconds, found.crossing_bytes, found.cuts) == min(fitting), (number, case)
        else:
            seen["not proven"] += 1
            assert found.fits
            assert found.cuts in [cuts for _, _, cuts in fitting]
            assert "need not end with the best cut" in found.notes[0]
    assert min(seen["proven"], seen["not proven"], seen["no cut fits"]) >= 10, seen
    assert seen["one was not found"] <= seen["not proven"] // 5, seen
