"""What the codecs remember, bucket by bucket, through a change of the buckets.

DistributedDataParallel puts parameters into buckets, and after the first step into others: by then it has seen in
which order the gradients come. And a run that goes on from a checkpoint begins with the first buckets again. So a
bucket is known by the names of its parameters, and where the names change:

- what was held back (the residual of error feedback) follows its parameter into its new bucket: it is part of
  the gradient, and nothing of it may be lost;
- anything else begins anew (the warm start of power-sgd finds itself again in a step or two).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.codecs import Codec

RESIDUAL = "residual"  # in a codec's state_dict: what it holds back, one number for each element of the vector


class Memories:
    """A codec for each bucket.

    >>> from paceline.codecs import make_codec
    >>> memories = Memories(make_codec("qsgd"))
    >>> memories.codec_of(["weight", "bias"], [torch.Size([2, 3]), torch.Size([2])])
    QSGD(levels=7, bucket=512, norm='max', lossless='packed')
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._codecs: dict[tuple[str, ...], Codec] = {}
        self._sizes: dict[str, int] = {}
        self._carried: dict[str, torch.Tensor] = {}  # residuals of parameters whose bucket is no more

    def codec_of(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> Codec:
        """The codec of the bucket that holds these parameters."""
        key = tuple(names)
        if key not in self._codecs:
            self._sizes.update(zip(names, (shape.numel() for shape in shapes), strict=True))
            self._give_up(set(names))
            self._codecs[key] = self._codec.fresh(shapes)
            self._take_up(key)
        return self._codecs[key]

    def state_dict(self) -> dict[str, Any]:
        """Every bucket's memory with the names of its parameters; tensors, names and sizes, and nothing else."""
        buckets = [{"parameters": list(key), "memory": codec.state_dict()} for key, codec in self._codecs.items()]
        return {"buckets": buckets, "carried": dict(self._carried), "sizes": dict(self._sizes)}

    def load_state_dict(self, state: dict[str, Any], shapes: dict[str, torch.Size]) -> None:
        """Go on from a `state_dict`; `shapes` are those of the model's parameters."""
        unknown = sorted(name for name in state["sizes"] if name not in shapes)
        if unknown:
            raise ValueError(f"this state is of another model: it has no parameter {unknown[0]!r}")
        for name, size in state["sizes"].items():
            if shapes[name].numel() != size:
                raise ValueError(
                    f"this state is of another model: {name!r} has {shapes[name].numel():,} elements (there: {size:,})"
                )
        self._codecs.clear()
        for bucket in state["buckets"]:
            codec = self._codec.fresh([shapes[name] for name in bucket["parameters"]])
            codec.load_state_dict(bucket["memory"])
            self._codecs[tuple(bucket["parameters"])] = codec
        self._carried, self._sizes = dict(state["carried"]), dict(state["sizes"])

    def _give_up(self, names: set[str]) -> None:
        """Empty the buckets that hold one of these parameters."""
        for key in [key for key in self._codecs if names.intersection(key)]:
            residual = self._codecs.pop(key).state_dict().get(RESIDUAL)
            if residual is not None:
                parts = residual.reshape(-1).split([self._sizes[name] for name in key])
                self._carried.update(zip(key, parts, strict=True))

    def _take_up(self, key: tuple[str, ...]) -> None:
        """Fill a new bucket with what was held back of its parameters."""
        if not self._carried.keys() & set(key):
            return
        held = {name: self._carried.pop(name) for name in key if name in self._carried}
        some = next(iter(held.values()))
        parts = [held.get(name, some.new_zeros(self._sizes[name])) for name in key]
        codec = self._codecs[key]
        codec.load_state_dict({**codec.state_dict(), RESIDUAL: torch.cat(parts)})
