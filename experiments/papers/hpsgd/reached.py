"""When a run reached an accuracy, as its measurements say, and which comparisons they allow.

    accuracy                     x   the first measurement at the target, or above it: `by`
      target - - - - - - - - /
                         /           `at`: where the straight line between the two crosses the target
                     x               the last measurement below the target: `after`

The target was reached somewhere between the two; `at` is a guess. local-sgd has a model of all workers only after an
average, every 8 steps, so no setting measures it more often; where its first average is above a target already, the
line begins at the untrained model. An accuracy that rises ever more slowly lies above its line, so the guess is late.
Of such a stretch the steps come first and the average last, so the computing up to `at` is more than its share.

An order of lanes, or a limit on a ratio, is certain if it comes out the same wherever between its two measurements
each lane reached the target. A claim is judged where it is certain, whether it then holds or not; else it is reported,
and says why. A lane that never reached the target makes a claim false, and that is certain.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.core.claims import Writer, ahead, figure, within
from experiments.core.story import NAN, Claim, Runs
from paceline.quantities import counted
from paceline.traces import Evaluation

TOO_FEW = "too few measurements to tell"
BETWEEN = (
    "A target is reached on the straight line between two measurements, the last one below it and the first one at it. "
    "local-sgd has a model to measure only after its averages, every 8 steps. A claim is judged where it comes out the "
    "same wherever between its two measurements each lane reached the target; else it is reported, with both of them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Seconds up to an accuracy are a guess, which lies between two measurements; NaN where it was never reached.

    >>> Reached(after=0.0, at=6.0, by=10.2).written, Reached().written
    ('0.0-10.2', '-')
    """

    after: float = NAN
    at: float = NAN
    by: float = NAN

    @property
    def known(self) -> bool:
        """Whether the target was reached."""
        return not any(map(math.isnan, (self.after, self.at, self.by)))

    @property
    def written(self) -> str:
        """The two measurements, as tables and claims show them."""
        return f"{self.after:.1f}-{self.by:.1f}" if self.known else "-"


def reached_of(runs: Runs, target: float, part: str = "seconds") -> dict[Any, Reached]:
    """Return the seconds to an accuracy, or a part of them, by key: means over seeds.

    >>> never, at_once = {"reached": {"0.4": None}}, {"seconds": 0.0}
    >>> soon = {"reached": {"0.4": {"seconds": 2.0, "after": at_once, "by": {"seconds": 4.0}}}}
    >>> found = reached_of(Runs(psgd=[soon, soon], ssgd=[soon, never]), 0.4)
    >>> found["psgd"].written, found["ssgd"].written
    ('0.0-4.0', '-')
    """
    after, at, by = (runs.mean("reached", f"{target:g}", *place, part) for place in (("after",), (), ("by",)))
    return {key: Reached(after=after[key], at=at[key], by=by[key]) for key in runs}


def measured_around(evaluations: Iterable[Evaluation], target: float) -> tuple[float, float] | None:
    """Return the seconds of the last measurement below an accuracy, and of the first one that is not.

    None means that it was never reached. If the first measurement of all is not below it, both are that one.

    >>> points = [Evaluation(round=n, seconds=n, loss=1.0, accuracy=n / 4) for n in range(5)]
    >>> measured_around(points, 0.6), measured_around(points, 1.1)
    ((2, 3), None)
    """
    before: float | None = None
    for each in evaluations:
        if each.accuracy is None:
            continue
        if each.accuracy >= target:
            return each.seconds if before is None else before, each.seconds
        before = each.seconds
    return None


def guesses(lanes: Mapping[str, Reached]) -> dict[str, float]:
    """Return each lane's seconds as the straight line has them; NaN where the target was never reached.

    >>> guesses({"ssgd": Reached(after=4.0, at=5.1, by=6.0), "hpsgd": Reached()})
    {'ssgd': 5.1, 'hpsgd': nan}
    """
    return {lane: found.at if found.known else NAN for lane, found in lanes.items()}


def order_is_certain(lanes: Sequence[Reached]) -> bool:
    """Return whether lanes surely come in this order, the soonest first, or surely do not.

    >>> early, late = Reached(after=0.0, at=6.0, by=10.0), Reached(after=10.0, at=12.0, by=14.0)
    >>> order_is_certain([early, late]), order_is_certain([late, early])
    (True, True)
    >>> order_is_certain([early, Reached(after=9.0, at=12.0, by=14.0)])
    False
    """
    pairs = list(itertools.combinations(lanes, 2))
    surely = all(first.by <= second.after for first, second in pairs)
    surely_not = any(second.by <= first.after for first, second in pairs)
    return surely or surely_not


def ratio_is_certain(first: Reached, second: Reached, *, least: float, most: float) -> bool:
    """Return whether a ratio is between two limits, or is not, wherever each lane reached its target.

    >>> first, second = Reached(after=21.0, at=22.0, by=24.0), Reached(after=20.0, at=22.0, by=23.0)
    >>> ratio_is_certain(first, second, least=0.9, most=1.1), ratio_is_certain(first, second, least=0.9, most=1.2)
    (False, True)
    """
    lowest, highest = first.after / second.by, first.by / second.after if second.after else math.inf
    return (least <= lowest and highest <= most) or highest < least or most < lowest


def sooner(text: str, lanes: Mapping[str, Reached], *, write: Writer = figure) -> Claim:
    """Return the claim that lanes reach a target in the order in which they are given; judged where it is certain.

    >>> lanes = {"hpsgd": Reached(after=21.4, at=22.8, by=24.1), "local-sgd": Reached(after=20.4, at=28.1, by=30.8)}
    >>> claim = sooner("HPSGD before Local SGD", lanes)
    >>> claim.judged, claim.because
    (False, 'hpsgd 22.8, local-sgd 28.1; too few measurements to tell: hpsgd 21.4-24.1, local-sgd 20.4-30.8')
    >>> sooner("HPSGD before Local SGD", {**lanes, "hpsgd": Reached()}).line
    'same winner: no, because hpsgd none, local-sgd 28.1 (HPSGD before Local SGD)'
    """
    claim = ahead(text, guesses(lanes), best="low", write=write)
    known = all(found.known for found in lanes.values())
    return claim if not known or order_is_certain(list(lanes.values())) else _reported(claim, lanes)


def alike(text: str, lanes: Mapping[str, Reached], *, least: float, most: float) -> Claim:
    """Return the claim that the first lane's seconds over the second's are between limits; judged where it is certain.

    >>> lanes = {"hpsgd": Reached(after=66.9, at=69.0, by=69.7), "ssgd": Reached(after=65.5, at=66.8, by=67.4)}
    >>> alike("to 10 %", lanes, least=0.9, most=1.1).line
    'same shape: yes, 1.03 is between 0.9 and 1.1 (to 10 %)'
    """
    first, second = lanes.values()
    known = first.known and second.known and second.at > 0
    claim = within(text, first.at / second.at if known else NAN, least=least, most=most, kind="shape")
    return claim if not known or ratio_is_certain(first, second, least=least, most=most) else _reported(claim, lanes)


def _reported(claim: Claim, lanes: Mapping[str, Reached]) -> Claim:
    between = ", ".join(f"{lane} {found.written}" for lane, found in lanes.items())
    return dataclasses.replace(claim, judged=False, because=f"{claim.because}; {TOO_FEW}: {between}")


def undecided_remark(claims: Iterable[Claim]) -> str:
    """Return a remark that says how many claims are not judged because the measurements cannot tell lanes apart.

    >>> lanes = {"hpsgd": Reached(after=21.4, at=22.8, by=24.1), "local-sgd": Reached(after=20.4, at=28.1, by=30.8)}
    >>> undecided_remark([sooner("HPSGD first", lanes), sooner("HPSGD first", {**lanes, "hpsgd": Reached()})])
    'Of 2 claims to judge, 1 is not judged, because the measurements cannot tell the lanes apart.'
    """
    to_judge = [claim for claim in claims if claim.judged or TOO_FEW in claim.because]
    undecided = sum(not claim.judged for claim in to_judge)
    return (
        f"Of {counted(len(to_judge), 'claim')} to judge, {undecided} {'is' if undecided == 1 else 'are'} not judged, "
        "because the measurements cannot tell the lanes apart."
    )
