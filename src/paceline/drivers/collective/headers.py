"""What a rank says of itself in an average, in numbers that survive being added up.

A sum of all ranks' messages tells every rank what each of them said, if each writes into a place of its own and zeros
into the others':

    [ what is averaged | rank 0: 7 numbers | rank 1: 7 numbers | ... ]

The numbers travel as floats, which hold whole numbers up to 2**24: larger ones are cut into digits of 20 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.events import Standing, Window

DIGIT = 2**20
NUMBERS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One rank's words in one average. `trouble` is why it brings nothing, 0 if there is none.

    >>> said = Said(number=3, window=Window(steps=2**21 + 5, merged_after=1))
    >>> said.numbers()
    [3, 5, 2, 1, 0, 0, 0]
    >>> Said.read(said.numbers()) == said
    True
    """

    number: int
    window: Window
    trouble: int = 0

    def numbers(self) -> list[int]:
        """As whole numbers below 2**20; of the average's number what is left modulo that."""
        steps, merged_after = self.window.steps, self.window.merged_after
        words = [self.number % DIGIT, steps % DIGIT, steps // DIGIT, merged_after % DIGIT, merged_after // DIGIT]
        return [*words, int(self.window.standing), self.trouble]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> Said:
        """From the numbers."""
        number, low, high, merged_low, merged_high, standing, trouble = (round(each) for each in numbers)
        window = Window(
            steps=low + DIGIT * high, merged_after=merged_low + DIGIT * merged_high, standing=Standing(standing)
        )
        return cls(number=number, window=window, trouble=trouble)
