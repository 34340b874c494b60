"""Pickle files as plain data: arrays, strings, bytes, numbers, dicts, lists, tuples. Nothing is ever called.

A pickle is a program for a small stack machine, and Python's own machine will call any function the
program names. So this is another machine. `pickletools.genops` cuts the file into instructions (it runs
none), and the few instructions that build plain data are carried out here. A name in the file is never
looked up: a few names that numpy's arrays need are known, and stand for constructors of our own.

    instruction        here
    GLOBAL name        one of the names in `_KNOWN`, or refused
    REDUCE f(args)     one of the constructors there, or refused
    BUILD state        fills what such a constructor began, or refused
    all others         listed in _Machine, or refused

Sizes: an array has exactly the bytes the file holds for it, and the number of instructions is bounded,
and bytes encoded from text are together no longer than the file, so what is built is bounded by a multiple
of the file. Keys of dicts are strings, bytes or whole numbers: hashing nested tuples that share parts could
take for ever.

An array of numpy, which needs a few names, is built like this:

    numpy pickles an array as                              and here it becomes
    _reconstruct(ndarray, (0,), 'b')                       an empty Array
    dtype('u1', False, True)                               a Kind, of numbers only
    BUILD kind   (3, '|', None, None, None, -1, -1, 0)     its byte order
    BUILD array  (1, (10000, 3072), kind, False, bytes)    a view of exactly those bytes
"""

from __future__ import annotations

import io
import math
import pickletools
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from paceline.data.reading import DatasetError

LARGEST_KEY = 2**60  # beyond it, whole numbers can be chosen that all hash alike
LARGEST_INSTRUCTIONS = 500_000  # twice those of CIFAR-100's training images, ten times a batch of CIFAR-10
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
_LARGEST_DIMENSIONS = 4
_NUMBER_KINDS = ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


class _Mark:
    """Where a list, tuple or dict on the stack begins."""


def read_plain_pickle(data: bytes) -> dict[str, object]:
    """Return the dict of plain data in a pickle; its keys as strings, whether they were strings or bytes.

    >>> import pickle
    >>> import numpy as np
    >>> read_plain_pickle(pickle.dumps({b"labels": [1, 2], "data": np.arange(3)}, protocol=2))
    {'labels': [1, 2], 'data': array([0, 1, 2])}
    >>> read_plain_pickle(pickle.dumps({"labels": print}))
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: it names 'builtins print', and nothing but plain data is read
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


# -- arrays of numpy ---------------------------------------------------------------------------------------------------


class Name(Enum):
    """A name that may occur in a file; it is never looked up.

    >>> known("numpy ndarray")
    <Name.NDARRAY: 'ndarray'>
    """

    RECONSTRUCT = "_reconstruct"
    NDARRAY = "ndarray"
    DTYPE = "dtype"
    ENCODE = "encode"
    BYTES = "bytes"


_KNOWN = {
    "numpy.core.multiarray _reconstruct": Name.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": Name.RECONSTRUCT,
    "numpy ndarray": Name.NDARRAY,
    "numpy dtype": Name.DTYPE,
    "_codecs encode": Name.ENCODE,  # how Python 3 writes bytes for Python 2
    "__builtin__ bytes": Name.BYTES,  # and how it writes no bytes
}


class Kind:
    """A dtype of numbers, under construction.

    >>> Kind(("u1", False, True)).dtype
    dtype('uint8')
    """

    def __init__(self, arguments: object) -> None:
        match arguments:
            case (str() | bytes() as code, *_):
                text = code if isinstance(code, str) else code.decode("latin-1")
            case _:
                text = ""
        if text not in _NUMBER_KINDS:
            raise DatasetError(f"it holds an array of {text[:20]!r}; only numbers are read ({' '.join(_NUMBER_KINDS)})")
        self.dtype = np.dtype(text)

    def build(self, state: object) -> None:
        """Take the byte order, and nothing else, from a state."""
        match state:
            case (int(), str() | bytes() as order, None, None, None, int(), int(), *_):
                text = order if isinstance(order, str) else order.decode("latin-1")
                if text in ("<", ">", "|", "="):
                    # numpy writes '<' or '>' for what has a byte order, and '|' for single bytes
                    self.dtype = self.dtype.newbyteorder("<" if text in "|=" else text)  # type: ignore[arg-type]
                    return
        raise DatasetError("it holds an array with fields or a byte order that is not read here")


class Array:
    """A numpy array under construction; memoised before it is filled, so it must be one object.

    >>> array = Array((Name.NDARRAY, (0,), b"b"))
    >>> array.build((1, (3,), Kind(("u1", False, True)), False, b"abc"))
    >>> array.values
    array([97, 98, 99], dtype=uint8)
    """

    def __init__(self, arguments: object) -> None:
        match arguments:
            case (Name.NDARRAY, (0,), _):
                self.values: NDArray[np.generic] | None = None
            case _:
                raise DatasetError("it builds an array in a way numpy does not")

    def build(self, state: object) -> None:
        """Check the state (version, shape, kind, by columns, bytes) and view the bytes as an array."""
        match state:
            case (int(), tuple() as shape, Kind() as kind, int() as by_columns, bytes() as data):
                pass
            case _:
                raise DatasetError("it fills an array in a way numpy does not, or with objects")
        whole = all(type(size) is int and 1 <= size <= len(data) for size in shape)
        if self.values is not None or not whole or not 1 <= len(shape) <= _LARGEST_DIMENSIONS:
            raise DatasetError("it holds an array whose shape does not fit its bytes")
        if math.prod(shape) * kind.dtype.itemsize != len(data):
            sizes = " x ".join(map(str, shape))
            raise DatasetError(f"it holds an array of {sizes} {kind.dtype.name} in {len(data)} bytes")
        flat: NDArray[np.generic] = np.frombuffer(data, dtype=kind.dtype)
        self.values = flat.reshape(shape, order="F" if by_columns else "C")


def known(name: str) -> Name:
    """Return the name, if it is one of the few.

    >>> known("os system")
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: it names 'os system', and nothing but plain data is read
    """
    if name not in _KNOWN:
        raise DatasetError(f"it names {name[:60]!r}, and nothing but plain data is read")
    return _KNOWN[name]


def constructed(function: object, arguments: object) -> object:
    """Return what a call in the file builds here.

    >>> constructed(Name.ENCODE, ("abc", "latin1"))
    b'abc'
    """
    match function, arguments:
        case Name.RECONSTRUCT, _:
            return Array(arguments)
        case Name.DTYPE, _:
            return Kind(arguments)
        case Name.ENCODE, (str() as text, "latin1" | "latin-1"):
            return text.encode("latin-1")
        case Name.BYTES, ():
            return b""
    raise DatasetError("it calls something that builds no plain data")
