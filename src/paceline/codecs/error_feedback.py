"""error feedback: what a codec loses this time is added to the next gradient.

    target   = gradient + residual
    sent     = codec(target)
    residual = target - sent            so that  sent + residual == gradient + old residual

Nothing is lost for ever: after T gradients the sum of what was sent differs from their sum by one residual, so the
mean of a biased codec is right in the long run.

Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch

from paceline.codecs import Codec
from paceline.codecs.payload import flat_vector
from paceline.codecs.requests import Adding

_INNER = "inner."


class ErrorFeedback:
    """Adds what a codec lost to the next gradient; payloads are the inner codec's.

    >>> from paceline.codecs import OneBit
    >>> codec = ErrorFeedback(OneBit())
    >>> sent = codec.decode(codec.encode(torch.tensor([1.0, 2.0, -4.0])))
    >>> sent, codec.residual
    (tensor([ 1.5000,  1.5000, -4.0000]), tensor([-0.5000,  0.5000,  0.0000]))
    """

    __slots__ = ("_residual", "_spare", "codec")

    biased: ClassVar[bool] = False
    suits_parameters: ClassVar[bool] = False

    def __init__(self, codec: Codec) -> None:
        if isinstance(codec, ErrorFeedback):
            raise ValueError(f"one error feedback is enough (codec={codec})")
        if isinstance(codec, type) or not hasattr(codec, "encode"):
            raise ValueError(f"error feedback is around a codec, such as OneBit() (codec={codec!r})")
        self.codec = codec
        self._residual: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r})"

    @property
    def NUMBER(self) -> int:  # noqa: N802 - named as every codec names it
        """The inner codec's number, for the payload is the inner codec's."""
        number: int = self.codec.NUMBER  # type: ignore[attr-defined]
        return number

    @property
    def fixed_size(self) -> bool:
        """Whether the inner codec's payloads have a fixed size."""
        return self.codec.fixed_size

    @property
    def plans(self) -> tuple[str, ...]:
        """The inner codec's plans; all-reduce only where the sum holds just what was sent, or the residual is wrong.

        >>> from paceline.codecs import BFloat16
        >>> ErrorFeedback(BFloat16()).plans
        ('gather', 'two-step')
        """
        return tuple(plan for plan in self.codec.plans if plan != "all-reduce" or self.codec.adds_exactly)

    @property
    def adds_exactly(self) -> bool:
        """Whether the inner codec's all-reduce gives the sum of what was sent."""
        return self.codec.adds_exactly

    @property
    def sum_steps(self) -> int:
        """How many all-reduces the inner codec's `add_up` asks for."""
        return self.codec.sum_steps

    @property
    def residual(self) -> torch.Tensor | None:
        """A copy of what is yet to be sent; None before the first gradient."""
        return None if self._residual is None else self._residual.clone()

    @torch.inference_mode(False)  # what is kept must be usable outside, too
    @torch.no_grad()
    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the inner codec's bytes of gradient plus residual. If it raises, the residual stays as it was."""
        before = self._residual
        target, memory = self.begin(gradient)
        try:
            payload = self.codec.encode(target, generator)
        except BaseException:
            self._residual = before
            raise
        self.end(self.codec.decode(payload, expected_length=target.numel(), out=memory))
        return payload

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is to be sent, gradient plus residual, and the residual's memory, for what will have been sent.

        Nothing has changed until something is written there: then `end` must follow, or what is written is what is held
        back itself. If it comes to nothing, `take_back`.
        """
        vector = flat_vector(gradient)
        residual, target = self._buffers(vector)
        torch.add(vector, residual, out=target)
        self._residual, self._spare = residual, target
        return target, residual

    @torch.inference_mode(False)
    @torch.no_grad()
    def end(self, sent: torch.Tensor) -> None:
        """Hold back what was not sent of what `begin` returned; `sent` may be the memory that it returned."""
        if self._residual is None or self._spare is None:
            raise ValueError("end() without begin()")
        torch.sub(self._spare, sent, out=self._residual)

    def add_up(
        self,
        gradient: torch.Tensor,
        world: int,
        generator: torch.Generator | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> Adding:
        """Add up gradient plus residual over all ranks, as the inner codec does, and hold back what it lost."""
        target, memory = self.begin(gradient)
        adding: Adding = self.codec.add_up(target, world, generator, out=out, rest=memory)  # type: ignore[attr-defined]
        return (yield from adding)

    def take_back(self) -> None:
        """Undo the last `encode`, whose payload was not used: all of it is yet to be sent.

        >>> from paceline.codecs import OneBit
        >>> codec = ErrorFeedback(OneBit())
        >>> _ = codec.encode(torch.tensor([1.0, 2.0, -4.0]))
        >>> codec.take_back()
        >>> codec.residual
        tensor([ 1.,  2., -4.])
        """
        self._residual, self._spare = self._spare, self._residual

    def _buffers(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual, and memory for the target: both are reused, for new memory is slower than arithmetic."""
        if self._residual is None:
            return torch.zeros_like(vector), torch.empty_like(vector)
        if self._residual.numel() != vector.numel():
            raise ValueError(
                f"the residual has {self._residual.numel():,} elements and the gradient {vector.numel():,}: "
                "each sender needs its own codec, from fresh()"
            )
        residual, spare = self._residual.to(vector.device), self._spare
        return residual, torch.empty_like(vector) if spare is None or spare.device != vector.device else spare

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.codec.decode(payload, expected_length=expected_length, out=out)

    def most_bytes(self, elements: int) -> int:
        return self.codec.most_bytes(elements)

    def fresh(self, shapes: Sequence[torch.Size] | None = None) -> Self:
        """Return a new error feedback without a residual, around an inner codec with an empty memory."""
        return type(self)(self.codec.fresh(shapes))

    def state_dict(self) -> dict[str, Any]:
        """Return the residual, and the inner codec's memory under `inner.`."""
        residual = {} if self._residual is None else {"residual": self._residual.clone()}
        return residual | {_INNER + name: value for name, value in self.codec.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`. If it does not fit, nothing changes."""
        unknown = [name for name in state if name != "residual" and not name.startswith(_INNER)]
        if unknown:
            raise ValueError(f"error feedback remembers 'residual' and '{_INNER}...', not {', '.join(unknown)}")
        residual = state.get("residual")
        if residual is not None:
            _check_residual(residual)
        self.codec.load_state_dict({name.removeprefix(_INNER): state[name] for name in state if name != "residual"})
        self._residual = None if residual is None else residual.clone()
        self._spare = None


def _check_residual(residual: Any) -> None:
    if not isinstance(residual, torch.Tensor) or residual.dtype is not torch.float32 or residual.dim() != 1:
        raise ValueError(f"a residual is a flat float32 tensor (this one is {_described(residual)})")
    if not bool(torch.isfinite(residual).all()):
        raise ValueError("a residual is finite (this one is not)")


def _described(value: Any) -> str:
    return f"{value.dtype}, {value.dim()}-dimensional" if isinstance(value, torch.Tensor) else type(value).__name__
