"""How far a cut depends on the noise of what was measured, and the note that says so where it matters.

A layer's seconds are the least of several turns; `spread` says how far its median is above them. If layer i may take
t_i to t_i (1 + s_i), and layers err independently of each other, a piece may take

    T  to  T + sqrt(sum of (s_i t_i)^2)        T = sum of t_i

A cut is the most wrong where one of its pieces takes the most and all others take the least: then the other pieces
should have had some of its layers. So each piece is raised in turn, the model is placed anew, and the two are compared:

    layers                a b c │ d e │ f g
    piece 1 raised        a b c │ D E │ f g     slowest: D E
    best cut for these    a b c D │ E f │ g     slowest: shorter by `cut`

`cut` is the largest of these, as a share of the slowest piece of the best cut; `step` is how much longer the predicted
step is if all pieces are raised. A share above TOLERATED is worth a note.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.pipeline import PipelineError
from paceline.pipeline.placement import place, priced
from paceline.pipeline.profile import Profile
from paceline.quantities import percent_text

if TYPE_CHECKING:
    from paceline.pipeline.plan import Plan

TOLERATED = 0.03
MOST_ENTRIES = 1e8  # of costs that are looked at for all placements together: a few seconds
REMEDY = "plan again on a quieter machine, or with more repeats and seconds"


@dataclass(frozen=True, kw_only=True)
class Certainty:
    """What the noise of the measurement may cost: the cut against the best one, and the step as predicted; shares.

    `spread` is that of the whole model: how far the medians of all layers together are above their least times.

    >>> Certainty(spread=0.04, cut=0.01, step=0.02).note
    ''
    >>> print(Certainty(spread=0.4, cut=0.06, step=0.09).note)
    times of the layers vary by 40 % from round to round, enough for another cut to be 6 % faster: plan again on ...
    """

    spread: float
    cut: float
    step: float

    @property
    def note(self) -> str:
        """A sentence for people without its full stop; empty where nothing is in doubt."""
        if self.cut > TOLERATED:
            effect = f"another cut to be {percent_text(self.cut)} faster"
        elif self.step > TOLERATED:
            effect = f"a step to take {percent_text(self.step)} longer than predicted, with the same cut"
        else:
            return ""
        vary = f"times of the layers vary by {percent_text(self.spread)} from round to round"
        return f"{vary}, enough for {effect}: {REMEDY}"


def certainty(plan: Plan) -> Certainty:
    """Return how far a plan depends on the spread of its layers' times.

    >>> from paceline.pipeline.devices import Device
    >>> from paceline.pipeline.placement import Placement
    >>> from paceline.pipeline.plan import Batch, Plan
    >>> from paceline.pipeline.profile import Layer
    >>> layers = tuple(Layer(name=name, forward_seconds=1.0, spread=0.5) for name in "abcd")
    >>> plan = Plan(model="four", profile=Profile(layers=layers), placement=Placement(cuts=(), pieces=(), devices=()),
    ...             batch=Batch(samples=2, shapes=((1,),), dtypes=("float32",)), microbatches=2)
    >>> plan = plan.placed((Device(), Device()), chunks=1)
    >>> found = certainty(plan)
    >>> found.spread, found.cut, round(found.step, 3)
    (0.5, 0.0, 0.354)
    """
    layers = plan.profile.layers
    seconds = math.fsum(layer.seconds for layer in layers)
    if not seconds > 0 or not any(layer.spread for layer in layers):
        return Certainty(spread=0.0, cut=0.0, step=0.0)
    spread = math.fsum(layer.seconds * layer.spread for layer in layers) / seconds
    cut = max((_regret(plan, piece) for piece in _raised_first(plan)), default=0.0)
    return Certainty(spread=spread, cut=cut, step=_longer_step(plan))


def _raised_first(plan: Plan) -> list[int]:
    """Return the pieces that are raised: those that would be slowest first, and as many as can be looked at."""
    pieces = plan.placement.pieces
    if len(pieces) == 1:
        return []
    entries = len(plan.profile.layers) ** 2 * len(pieces) / 2
    order = sorted(range(len(pieces)), key=lambda piece: -pieces[piece].seconds * (1 + _piece_spread(plan, piece)))
    return order[: max(1, int(MOST_ENTRIES // max(entries, 1)))]


def _piece_spread(plan: Plan, piece: int) -> float:
    """Return by which share a piece may take longer, its layers erring independently."""
    place_of = plan.placement.pieces[piece]
    layers = plan.profile.layers[place_of.first : place_of.last]
    seconds = math.fsum(layer.seconds for layer in layers)
    return math.hypot(*(layer.seconds * layer.spread for layer in layers)) / seconds if seconds > 0 else 0.0


def _raised(plan: Plan, pieces: Iterable[int]) -> Profile:
    """Return the profile with the layers of some pieces as slow as the pieces may be."""
    layers = list(plan.profile.layers)
    for piece in pieces:
        factor, place_of = 1 + _piece_spread(plan, piece), plan.placement.pieces[piece]
        for at in range(place_of.first, place_of.last):
            layer = layers[at]
            layers[at] = dataclasses.replace(
                layer,
                forward_seconds=factor * layer.forward_seconds,
                input_seconds=factor * layer.input_seconds,
                weight_seconds=factor * layer.weight_seconds,
            )
    return dataclasses.replace(plan.profile, layers=tuple(layers))


def _regret(plan: Plan, piece: int) -> float:
    profile, devices = _raised(plan, [piece]), plan.placement.devices
    conditions = plan.conditions(plan.stages, plan.chunks)
    kept = priced(profile, plan.cuts, devices, **conditions)
    try:
        best = place(profile, devices, **conditions)
    except PipelineError:  # a plan whose model does not fit can be saved and read
        return 0.0
    return max(kept.slowest.seconds / best.slowest.seconds - 1, 0.0) if best.slowest.seconds > 0 else 0.0


def _longer_step(plan: Plan) -> float:
    profile, before = _raised(plan, range(len(plan.placement.pieces))), plan.timeline.step_seconds
    placement = priced(profile, plan.cuts, plan.placement.devices, **plan.conditions(plan.stages, plan.chunks))
    after = dataclasses.replace(plan, placement=placement).timeline.step_seconds
    return max(after / before - 1, 0.0) if before > 0 else 0.0
