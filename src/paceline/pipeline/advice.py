"""Into how many micro-batches? The step time for every number that divides the mini-batch, and which one to take.

    few micro-batches    devices wait for the first one to come through and for the last one to come back
    many                 every micro-batch pays a layer's fixed part again: the call, the launch, the latency

Costs are known for one size of micro-batch, s samples. For another size t they are extrapolated, piece by piece:

    seconds(t) = fixed + (seconds(s) - fixed) t / s

and each step is then simulated. It is an extrapolation: a layer may be better at large sizes, or fall out of a cache.
Of the numbers whose steps are within a few per cent of the shortest, the smallest is recommended: it is the least
dependent on the fixed part, which is the least certain of these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.pipeline.schedules import find, orders, why_not
from paceline.pipeline.timing import MessageCost, PieceCost, timeline

MOST_MICROBATCHES = 1024  # beyond, nothing is to be gained and much to be simulated
GOOD_ENOUGH = 0.03


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One number of micro-batches, and the step that it would give.

    >>> Choice(microbatches=8, samples=16, step_seconds=1.1, idle=0.27).name
    '8 of 16'
    """

    microbatches: int
    samples: int
    step_seconds: float
    idle: float

    @property
    def name(self) -> str:
        return f"{self.microbatches} of {self.samples}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All choices, the one that is made, the one that is recommended, and a sentence about them.

    >>> cost = PieceCost(forward_seconds=1.0, input_seconds=1.0, weight_seconds=1.0)
    >>> advice = advise("1f1b", [cost] * 4, batch_samples=32, microbatches=4, fixed_seconds=[0.3] * 4)
    >>> print(advice.sentence)
    4 micro-batches of 8: idle 43 %; 8 of 4 would take 14 % less time
    >>> [choice.name for choice in advice.choices]
    ['4 of 8', '8 of 4', '16 of 2', '32 of 1']
    """

    choices: tuple[Choice, ...]
    current: Choice
    recommended: Choice
    sentence: str


def advise(
    name: str,
    costs: Sequence[PieceCost],
    links: Sequence[MessageCost] = (),
    *,
    batch_samples: int,
    microbatches: int,
    fixed_seconds: Sequence[float] = (),
    latency_seconds: float = 0.0,
    chunks: int | None = None,
    good_enough: float = GOOD_ENOUGH,
) -> Advice:
    """Return what other numbers of micro-batches would come to, from the costs with this one.

    `costs` and `links` are of one micro-batch of batch_samples / microbatches samples. `fixed_seconds` is, for each
    piece, the part of its seconds (forward and backward together) that does not depend on the micro-batch's size, and
    `latency_seconds` that of a message. Other sizes are an extrapolation from these, see the top of this file.

    >>> cost = PieceCost(forward_seconds=1.0, input_seconds=2.0)
    >>> advise("gpipe", [cost] * 2, batch_samples=6, microbatches=3).recommended.microbatches
    6
    >>> advise("gpipe", [cost] * 2, batch_samples=6, microbatches=4)
    Traceback (most recent call last):
    ValueError: microbatches must divide the mini-batch (microbatches=4, batch_samples=6); take one of 1, 2, 3, 6
    """
    chunks = find(name).chunks if chunks is None else chunks
    stages = _stages(costs, chunks)
    fixed = tuple(fixed_seconds) or (0.0,) * len(costs)
    _check(name, stages, microbatches, chunks, batch_samples)
    _check_fixed(fixed, len(costs), latency_seconds, good_enough)
    choices = []
    for number in _possible(name, stages, chunks, batch_samples, most=max(MOST_MICROBATCHES, microbatches)):
        ratio = microbatches / number  # of the sizes
        step = timeline(
            orders(name, stages, number, chunks),
            [_resized(cost, part, ratio) for cost, part in zip(costs, fixed, strict=True)],
            [_resized_message(link, latency_seconds, ratio) for link in links],
        )
        choices.append(
            Choice(microbatches=number, samples=batch_samples // number, step_seconds=step.step_seconds, idle=step.idle)
        )
    current = next(choice for choice in choices if choice.microbatches == microbatches)
    shortest = min(choice.step_seconds for choice in choices)
    recommended = next(choice for choice in choices if choice.step_seconds <= shortest * (1 + good_enough))
    sentence = _sentence(current, recommended, shortest)
    return Advice(choices=tuple(choices), current=current, recommended=recommended, sentence=sentence)


def _stages(costs: Sequence[PieceCost], chunks: int) -> int:
    if not costs or chunks < 1 or len(costs) % chunks:
        raise ValueError(f"there must be costs for {chunks} pieces on each device (pieces={len(costs)})")
    return len(costs) // chunks


def _check(name: str, stages: int, microbatches: int, chunks: int, batch_samples: int) -> None:
    if batch_samples < 1:
        raise ValueError(f"batch_samples must be at least 1 (batch_samples={batch_samples})")
    reason = why_not(name, stages, microbatches, chunks)
    if reason is not None:
        raise ValueError(reason)
    if batch_samples % microbatches:
        given = f"microbatches={microbatches}, batch_samples={batch_samples}"
        possible = _possible(name, stages, chunks, batch_samples, most=MOST_MICROBATCHES)
        instead = f"take one of {', '.join(map(str, possible))}" if possible else f"no number does that {name} accepts"
        raise ValueError(f"microbatches must divide the mini-batch ({given}); {instead}")


def _check_fixed(fixed: Sequence[float], pieces: int, latency_seconds: float, good_enough: float) -> None:
    if len(fixed) != pieces:
        raise ValueError(f"fixed_seconds must be given for each piece (given={len(fixed)}, pieces={pieces})")
    named = [("fixed_seconds", part) for part in fixed]
    for name, value in (*named, ("latency_seconds", latency_seconds), ("good_enough", good_enough)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0 ({name}={value})")


def _possible(name: str, stages: int, chunks: int, batch_samples: int, *, most: int) -> list[int]:
    """Return the numbers that divide the mini-batch and that the schedule accepts, from the smallest on.

    >>> _possible("1f1b", stages=4, chunks=1, batch_samples=12, most=100)
    [4, 6, 12]
    """
    divisors = [number for number in range(1, min(batch_samples, most) + 1) if batch_samples % number == 0]
    return [number for number in divisors if why_not(name, stages, number, chunks) is None]


def _resized(cost: PieceCost, fixed_seconds: float, ratio: float) -> PieceCost:
    """Return the cost of a micro-batch `ratio` times as large; the fixed part is spread as the seconds are.

    >>> _resized(PieceCost(forward_seconds=1.0, input_seconds=3.0), fixed_seconds=2.0, ratio=0.5).seconds
    3.0
    """
    fixed = min(1.0, fixed_seconds / cost.seconds) if cost.seconds > 0 else 0.0
    factor = fixed + (1 - fixed) * ratio
    return PieceCost(
        forward_seconds=cost.forward_seconds * factor,
        input_seconds=cost.input_seconds * factor,
        weight_seconds=cost.weight_seconds * factor,
    )


def _resized_message(link: MessageCost, latency_seconds: float, ratio: float) -> MessageCost:
    def resized(seconds: float) -> float:
        fixed = min(latency_seconds, seconds)
        return fixed + (seconds - fixed) * ratio

    return MessageCost(forward_seconds=resized(link.forward_seconds), gradient_seconds=resized(link.gradient_seconds))


def _sentence(current: Choice, recommended: Choice, shortest: float) -> str:
    begin = f"{current.microbatches} micro-batch{'es' * (current.microbatches > 1)} of {current.samples}:"
    begin = f"{begin} idle {100 * current.idle:.0f} %"
    if current == recommended:
        if current.step_seconds <= shortest:
            return f"{begin}; no other number is predicted to be faster"
        return f"{begin}; no other number saves more than {_percent(current.step_seconds - shortest, current)} %"
    if recommended.step_seconds < current.step_seconds:
        saved = _percent(current.step_seconds - recommended.step_seconds, current)
        return f"{begin}; {recommended.name} would take {saved} % less time"
    more = _percent(recommended.step_seconds - current.step_seconds, current)
    return f"{begin}; {recommended.name} would do as well ({more} % more time)"


def _percent(seconds: float, of: Choice) -> str:
    """Return the seconds as a percentage of a step, with two digits where it is small.

    >>> choice = Choice(microbatches=8, samples=16, step_seconds=1.0, idle=0.27)
    >>> _percent(0.124, choice), _percent(0.0062, choice)
    ('12', '0.62')
    """
    percent = 100 * seconds / of.step_seconds if of.step_seconds > 0 else 0.0
    return f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"
