"""One pass over the loader: which batches were handed out, and which of them is being trained.

A loader fetches ahead, so the batch that was handed out last is not the one that is trained. But whoever asks a loader
for a batch makes it ask the sampler for one more, to the end and beyond it, where there are no more:

    asked          1 2 3 4 5   | 6   | 7   | (8) | (9) |          (8): nothing is left to hand out
    trained                  0 |   1 |   2 |   3 |   4 |          first asked 5 times: asked - 5

So the batch that is trained is known by how often the sampler was asked since the first forward pass. Two loaders are
told apart from that:

- One that asks in a thread of its own, whenever it has room: each forward pass that follows a backward pass is of the
  next batch.
- One that holds a batch back (to know which is the last) asks for its last ones before they are trained. So where
  nobody asks any more, a forward pass that follows a backward pass is of the next batch, if so far each batch had just
  one; else it is of the same batch once more.

`Accumulate` asks one part ahead within a group, and not for the first of the next group: it tells when a part begins.

What cannot be told is refused: batches that are drawn several at a time and trained one by one look like one that is
trained several times, and a script that draws its next batch before it trains the last of an epoch begins the next pass
too early. A forward pass after the last batch, with nothing drawn since, is of a batch from elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.drivers.balancing.schedule import BalanceError, DealtBatch, Place


@dataclass(slots=True)
class Habits:
    """How a script trains its batches, as far as it was seen: each in one backward pass, or some in several."""

    in_one: bool = False
    in_several: bool = False


class BatchPass(Iterator[list[int]]):
    """Hands out the batches of a pass, and knows which one is trained.

    `take` returns the indices and the size of the batch of each step from 0 on, and None after the last. `number` is
    how many passes were trained before this one; `first` is the place of its first step. `habits` are those of the
    passes before.

    >>> batches = iter([[3, 1], [2, 0]])
    >>> def take(step):
    ...     indices = next(batches, None)
    ...     return indices and (indices, DealtBatch(samples=2, total=4, first=0, ranks=2))
    >>> one = BatchPass(take, number=0, steps=2, lock=threading.RLock())
    >>> next(one), one.begin_forward()
    ([3, 1], 0)
    >>> one.end_backward()
    >>> next(one), one.begin_forward()
    ([2, 0], 1)
    """

    def __init__(
        self,
        take: Callable[[int], tuple[list[int], DealtBatch] | None],
        *,
        number: int,
        steps: int,
        lock: Any,
        first: int = 0,
        habits: Habits | None = None,
    ) -> None:
        self.number, self.steps, self._first = number, steps, first
        self._take, self._lock = take, lock
        self._asked = self._asked_at_forward = self._asked_first = self.handed_out = 0
        self._asked_by: int | None = None
        self._exhausted = False
        self._dealt: dict[int, DealtBatch] = {}
        self.trained = -1  # the batch that is being trained, or was last
        self.done = 0  # batches whose backward pass is over
        self._after_backward = self._again = False
        self._habits = Habits() if habits is None else habits

    def __next__(self) -> list[int]:
        with self._lock:  # ranks that look at their times must not be overtaken
            self._asked += 1
            self._asked_by = threading.get_ident()
            taken = None if self._exhausted else self._take(self.handed_out)
            if taken is None:
                self._exhausted = True
                raise StopIteration
            indices, self._dealt[self.handed_out] = taken
            self.handed_out += 1
            return indices

    @property
    def place(self) -> Place:
        """The next place that is handed out."""
        return self.number, self._first + self.handed_out

    def begin_forward(self, parts: int | None = None) -> int | None:
        """Note a forward pass in training; return the number of the batch that it is of, or None: of none of them.

        `parts` is how many batches the script has gone on by since the last forward pass, where somebody tells.
        """
        if not self.handed_out:
            raise BalanceError(
                "the model is trained, and its loader has handed out no batch yet: a pass over a loader of this "
                "Balance has begun (iter(loader)), and nothing was taken from it"
            )
        habits = self._habits
        if parts is None and self._is_elsewhere():
            return None
        if parts is not None:
            self.trained += parts
        elif self.trained < 0:
            self.trained, self._asked_first = 0, self._asked
        elif self._asked_by != threading.get_ident():
            self.trained += self._after_backward
        elif self._asked > self._asked_at_forward:
            if self._again and self._asked > self._asked_at_forward + 1:
                raise BalanceError(
                    "several batches were drawn at once, and trained one after the other: nobody knows which of them a "
                    "forward pass is of. Draw one batch at a time, or take paceline.Accumulate, which draws groups"
                )
            habits.in_one |= self._after_backward and not self._again
            self.trained, self._again = self.trained + self._asked - self._asked_at_forward, False
        elif self._after_backward and self._exhausted and habits.in_one and not habits.in_several:
            self.trained += 1
        elif self._after_backward:
            habits.in_several = self._again = True
        self._asked_at_forward, self._after_backward = self._asked, False
        self.trained = max(0, min(self.trained, self.handed_out - 1))
        for past in [number for number in self._dealt if number < self.trained]:
            del self._dealt[past]
        return self.trained

    def _is_elsewhere(self) -> bool:
        """Return whether a forward pass now is of no batch of this pass: all are trained, and none was asked for."""
        if not (self._exhausted and self._after_backward and self.done >= self.steps) or self._habits.in_several:
            return False
        in_thread = self._asked_by != threading.get_ident()
        return in_thread or self._habits.in_one

    @property
    def last_is_held(self) -> bool:
        """Whether the last batch was fetched, and is not trained: a script that draws ahead will train it later."""
        if not self._exhausted or not 0 <= self.trained < self.steps - 1:
            return False
        if self._asked_by != threading.get_ident():
            return self.done == self.steps - 1
        return self._asked - self._asked_first >= self.steps - 1

    def end_backward(self) -> None:
        """Note that a backward pass is over."""
        self._after_backward, self.done = True, max(self.done, self.trained + 1)

    @property
    def dealt(self) -> DealtBatch:
        """The size of the batch that is being trained."""
        return self._dealt[self.trained]
