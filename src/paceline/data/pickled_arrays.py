"""The few names of numpy that a pickled array needs, and the safe constructors they stand for here.

    numpy pickles an array as                              and here it becomes
    _reconstruct(ndarray, (0,), 'b')                       an empty Array
    dtype('u1', False, True)                               a Kind, of numbers only
    BUILD kind   (3, '|', None, None, None, -1, -1, 0)     its byte order
    BUILD array  (1, (10000, 3072), kind, False, bytes)    a view of exactly those bytes

Every part of a state is checked, and an array must have exactly the bytes the file holds for it.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from paceline.data.errors import DatasetError

_LARGEST_DIMENSIONS = 4
_NUMBER_KINDS = ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


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
    """The name, if it is one of the few.

    >>> known("os system")
    Traceback (most recent call last):
    paceline.data.errors.DatasetError: it names 'os system', and nothing but plain data is read
    """
    if name not in _KNOWN:
        raise DatasetError(f"it names {name[:60]!r}, and nothing but plain data is read")
    return _KNOWN[name]


def constructed(function: object, arguments: object) -> object:
    """What a call in the file builds here.

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
