"""The paper's formulas (2) to (7): how many epochs fine-pruning prunes, and what time that saves.

    n epochs    w window    a starting point    r block    c count    b batches of a whole epoch
    T time of a batch       t_0 what pruning itself costs in a pruned epoch

    (3)  n_prune   = (floor((w - a) / r) * c + (w - a) mod r) * floor(n / w)            where w divides n
    (4)  n_prune   = the same + floor((n mod w - a) / r) * c + (n mod w - a) mod r      otherwise
    (2)  t_regular = n * T * b
    (5)  b_prune   = (n_prune * batches of a pruned epoch + (n - n_prune) * b) / n
    (6)  t_prune   = n * T * b_prune + n_prune * t_0
    (7)  t_save    = t_regular - t_prune

Where the print cannot be meant, or is not what the paper's own listings do:

  - r is introduced as "the number of iterations using the pruned data". The formulas only fit the listing where it is
    the block, of which c epochs are pruned.
  - (3) and (4) take all the (w - a) mod r epochs after a window's last whole block as pruned. At most c of them are.
  - (3) and (4) know no attenuation: to them every window starts at a. From the second window on there is more to prune.
  - (3) and (4) count the first epoch of a window if a is 0, and epoch 1 if a is 1. These are never pruned: nothing has
    been counted.
  - (4) sees a negative number of epochs where the run ends before the starting point of its last window (n mod w < a).
    Nothing is pruned there, so that part is taken as 0.
  - (4) sees n mod w - a epochs in the last window. From the a-th to the (n mod w)-th, both included, there is one more.
  - (5) is printed as the mean of T over n_prune epochs and over the others: T, whatever is pruned. It is introduced as
    the mean number of batches of an epoch, and that is what stands above.

So with attenuation 1 the exact number is at most (3), and at most (4) + 1; it is (3) where r divides w - a and a is at
least 2. With a higher attenuation it may be above or below. (2), (5), (6) and (7) are exact if n_prune is.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.data.pruning.schedule import FineSchedule

BATCHES, SECONDS = "batches", "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a number of pruned epochs comes to; times are in `unit`, batches (T = 1) or seconds.

    >>> times = Times.of(n=10, n_prune=5, b=8, b_of_pruned=6)
    >>> times.b_prune, times.t_regular, times.t_prune, times.t_save
    (7.0, 80.0, 70.0, 10.0)
    """

    n_prune: int
    b_prune: float
    t_regular: float
    t_prune: float
    t_save: float
    unit: str = BATCHES

    @classmethod
    def of(
        cls,
        *,
        n: int,
        n_prune: int,
        b: int,
        b_of_pruned: int,
        T: float | None = None,  # noqa: N803
        t_0: float = 0.0,
    ) -> Times:
        """Formulas (2), (5), (6) and (7) for this n_prune.

        >>> Times.of(n=10, n_prune=5, b=8, b_of_pruned=6, T=0.5, t_0=0.2).t_save
        4.0
        """
        unit, per_batch = (BATCHES, 1.0) if T is None else (SECONDS, T)
        batches = n_prune * b_of_pruned + (n - n_prune) * b
        t_regular = n * per_batch * b
        t_prune = per_batch * batches + n_prune * t_0
        return cls(
            n_prune=n_prune,
            b_prune=batches / n,
            t_regular=t_regular,
            t_prune=t_prune,
            t_save=per_batch * (n * b - batches) - n_prune * t_0,
            unit=unit,
        )


def n_prune(schedule: FineSchedule, n: int) -> int:
    """Formula (3) or (4): about how many of n epochs are pruned.

    >>> n_prune(FineSchedule(window=12, starting_point=6, block=4, count=2), 36)  # (1 * 2 + 2) * 3
    12
    >>> n_prune(FineSchedule(window=12, starting_point=6, block=4, count=2), 46)  # 12 + 1 * 2 + 0
    14
    """
    w, a, r, c = schedule.window, schedule.starting_point, schedule.block, schedule.count
    of_a_window = (w - a) // r * c + (w - a) % r
    in_the_last = max(0, n % w - a)
    return of_a_window * (n // w) + in_the_last // r * c + in_the_last % r


def remarks(schedule: FineSchedule, n: int) -> tuple[str, ...]:
    """Why (3) or (4) need not be the exact number for this schedule.

    >>> remarks(FineSchedule(window=12, starting_point=4, attenuation=1, block=4, count=2), 36)
    ()
    >>> for remark in remarks(FineSchedule(window=12, starting_point=6, attenuation=2, block=4, count=2), 28):
    ...     print(remark)
    The formulas know no attenuation: to them every window starts at 6.
    (3) and (4) take all 2 epochs after a window's last whole block as pruned.
    (4) sees -2 epochs in the last window, which ends before epoch 6: taken as 0.
    """
    w, a, r = schedule.window, schedule.starting_point, schedule.block
    said, rest, last = list[str](), (w - a) % r, n % w
    if schedule.starts_at(n) != a:
        said.append(f"The formulas know no attenuation: to them every window starts at {a}.")
    if rest and n >= w:
        epochs = "the epoch" if rest == 1 else f"all {rest} epochs"
        said.append(f"(3) and (4) take {epochs} after a window's last whole block as pruned.")
    if a <= 1:
        said.append(f"(3) and (4) count the first epoch of {'the run' if a else 'a window'}, which is never pruned.")
    if 0 < last < a:
        said.append(f"(4) sees {last - a} epochs in the last window, which ends before epoch {a}: taken as 0.")
    elif last and a:
        said.append(f"(4) sees {last - a} epochs from {a} to {last} of the last window; there is one more.")
    return tuple(said)
