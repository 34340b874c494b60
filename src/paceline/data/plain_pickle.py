"""Pickle files as plain data: arrays, strings, bytes, numbers, dicts, lists, tuples. Nothing is ever called.

A pickle is a program for a small stack machine, and Python's own machine will call any function the
program names. So this is another machine. `pickletools.genops` cuts the file into instructions (it runs
none), and the few instructions that build plain data are carried out here. A name in the file is never
looked up: a few names that numpy's arrays need are known, and stand for constructors of our own.

    instruction        here
    GLOBAL name        one of the names in pickled_arrays, or refused
    REDUCE f(args)     one of the constructors there, or refused
    BUILD state        fills what such a constructor began, or refused
    all others         listed in _Machine, or refused

Sizes: an array has exactly the bytes the file holds for it, and the number of instructions is bounded,
and bytes encoded from text are together no longer than the file, so what is built is bounded by a multiple
of the file. Keys of dicts are strings, bytes or whole numbers: hashing nested tuples that share parts could
take for ever.
"""

from __future__ import annotations

import io
import pickletools

from paceline.data.errors import DatasetError
from paceline.data.pickled_arrays import Array, Kind, constructed, known

LARGEST_KEY = 2**60  # beyond it, whole numbers can be chosen that all hash alike
LARGEST_INSTRUCTIONS = 500_000  # ten times those of a real batch


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
    )
)
_BYTE_STRINGS = frozenset(["BINSTRING", "SHORT_BINSTRING"])  # Python 2's str
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = frozenset(["PROTO", "FRAME", "STOP"])


class _Mark:
    """Where a list, tuple or dict on the stack begins."""


def read_plain_pickle(data: bytes) -> dict[str, object]:
    """The dict of plain data in a pickle; its keys as strings, whether they were strings or bytes.

    >>> import pickle
    >>> import numpy as np
    >>> read_plain_pickle(pickle.dumps({b"labels": [1, 2], "data": np.arange(3)}, protocol=2))
    {'labels': [1, 2], 'data': array([0, 1, 2])}
    >>> read_plain_pickle(pickle.dumps({"labels": print}))
    Traceback (most recent call last):
    paceline.data.errors.DatasetError: it names 'builtins print', and nothing but plain data is read
    """
    machine = _Machine(encoded_bytes_left=len(data))
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
            if count >= LARGEST_INSTRUCTIONS:
                raise DatasetError(f"it has more than {LARGEST_INSTRUCTIONS} instructions")
            machine.step(instruction.name, argument)
    except DatasetError:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeError) as error:
        raise DatasetError(f"it is no whole pickle ({' '.join(str(error).split())[:100]})") from error
    match machine.stack:
        case [dict() as result]:
            return {_text(key): _finished(value) for key, value in result.items()}
    raise DatasetError("it is a pickle of something else than a dict")


class _Machine:
    """The stack and the memo, and what each instruction does to them."""

    def __init__(self, *, encoded_bytes_left: int) -> None:
        self._encoded_bytes_left = encoded_bytes_left
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def step(self, name: str, argument: object) -> None:
        """Carry out one instruction, or refuse it."""
        stack = self.stack
        if name in _NOTHING:
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _BYTE_STRINGS:
            stack.append(str(argument).encode("latin-1"))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack.append(tuple([self._pop() for _ in range(count)][::-1]))
        elif not (self._memory(name, argument) or self._container(name) or self._construction(name, argument)):
            raise DatasetError(f"it uses the instruction {name}, which plain data does not need")

    def _memory(self, name: str, argument: object) -> bool:
        match name, argument:
            case ("BINPUT" | "LONG_BINPUT", int() as index):
                self.memo[index] = self.stack[-1]
            case ("MEMOIZE", _):
                self.memo[len(self.memo)] = self.stack[-1]
            case ("BINGET" | "LONG_BINGET", int() as index):
                self.stack.append(self.memo[index])
            case _:
                return False
        return True

    def _container(self, name: str) -> bool:
        match name:
            case "MARK":
                self.stack.append(_Mark())
            case "EMPTY_LIST":
                self.stack.append([])
            case "EMPTY_DICT":
                self.stack.append({})
            case "TUPLE":
                self.stack.append(tuple(self._since_mark()))
            case "APPEND":
                self._extend([self._pop()])
            case "APPENDS":
                self._extend(self._since_mark())
            case "SETITEM":
                value, key = self._pop(), self._pop()
                self._update([key, value])
            case "SETITEMS":
                self._update(self._since_mark())
            case _:
                return False
        return True

    def _construction(self, name: str, argument: object) -> bool:
        match name:
            case "GLOBAL":
                self.stack.append(known(str(argument)))
            case "STACK_GLOBAL":
                last, module = self._pop(), self._pop()
                self.stack.append(known(f"{module} {last}" if type(module) is type(last) is str else "?"))
            case "REDUCE":
                arguments, function = self._pop(), self._pop()
                built = constructed(function, arguments)
                if isinstance(built, bytes):  # a copy: a text remembered once could be encoded a thousand times
                    self._encoded_bytes_left -= len(built)
                    if self._encoded_bytes_left < 0:
                        raise DatasetError("it builds more bytes than it holds")
                self.stack.append(built)
            case "BUILD":
                state, target = self._pop(), self.stack[-1]
                if not isinstance(target, Kind | Array):
                    raise DatasetError("it sets the state of something that is no array")
                target.build(state)
            case _:
                return False
        return True

    def _pop(self) -> object:
        value = self.stack.pop()
        if isinstance(value, _Mark):
            raise ValueError("a mark where a value should be")
        return value

    def _since_mark(self) -> list[object]:
        start = len(self.stack) - 1
        while not isinstance(self.stack[start], _Mark):
            start -= 1
            if start < 0:
                raise ValueError("no mark")
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise DatasetError("it appends to something that is no list")
        target.extend(items)

    def _update(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise DatasetError("it sets items of something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes | int) or (isinstance(key, int) and abs(key) >= LARGEST_KEY):
                raise DatasetError("it has a dict whose keys are not strings or whole numbers")
            target[key] = value


def _finished(value: object) -> object:
    if not isinstance(value, Array):
        return value
    if value.values is None:
        raise DatasetError("it holds an array that is never filled")
    return value.values


def _text(key: object) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)
