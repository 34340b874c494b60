"""How fast the quantising codecs are: against a plain copy of the vector, and against the same in eager torch.

Everything is timed in turns in one process, with the threads torch has, and the best counts. A copy is
`tensor.clone()`. Values are random: what these codecs do does not depend on them.

New memory costs more than the work: the operating system hands it out page by page and fills it with zeros. Whether a
clone gets new memory or what something else has just given back is chance, and would decide the ratio; so large blocks
always are new here, for the clone as for the codecs. The other case, memory that is there already on both sides
(`copy_` against `out=`), is shown beside, and what limits both in the second table.

The eager codecs are as one writes them in a few lines of torch: each operation is a pass over the vector, and makes a
new one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from experiments.core.story import Numbers, Size, Telling, experiment
from experiments.core.turns import bar, seconds_of, take_turns, verdict
from paceline.codecs import make_codec
from paceline.quantities import counted
from paceline.reports.table import PlainTable

CLONE, COPY = "copy, new memory (clone)", "copy, warm memory (copy_)"
WIDTH = 4  # bits of a level and its sign
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

Sent: TypeAlias = tuple[int, torch.Tensor, torch.Tensor]


# -- the codecs in eager torch -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EagerQSGD:
    """Stochastic levels of each bucket's largest magnitude, two to a byte.

    >>> codec = EagerQSGD()
    >>> sent = codec.decode(codec.encode(torch.linspace(-7, 7, 15)))
    >>> sent.tolist() == torch.linspace(-7, 7, 15).tolist()  # on the grid already: nothing to round
    True
    """

    levels: int = 7
    bucket: int = 512

    def encode(self, vector: torch.Tensor) -> Sent:
        """Return the length, the norms and the packed levels."""
        buckets = F.pad(vector, (0, -vector.numel() % self.bucket)).view(-1, self.bucket)
        magnitudes = buckets.abs()
        norms = magnitudes.amax(1, keepdim=True)
        exact = magnitudes / norms.clamp(min=torch.finfo(torch.float32).tiny) * self.levels
        levels = (exact + torch.rand_like(exact)).floor().clamp(max=self.levels).to(torch.uint8)
        codes = (levels | (buckets < 0).to(torch.uint8) << (WIDTH - 1)).view(-1)
        return vector.numel(), norms, codes[0::2] | codes[1::2] << WIDTH

    def decode(self, sent: Sent) -> torch.Tensor:
        """Return levels times norms."""
        elements, norms, packed = sent
        codes = torch.stack([packed & 15, packed >> WIDTH], dim=1).view(-1, self.bucket)
        magnitudes = (codes & 7).to(torch.float32) * (norms / self.levels)
        return torch.where(codes >> (WIDTH - 1) != 0, -magnitudes, magnitudes).view(-1)[:elements]


@dataclass(frozen=True)
class EagerOneBit:
    """A sign for each element, eight to a byte, and two means.

    >>> EagerOneBit().decode(EagerOneBit().encode(torch.tensor([1.0, 2.0, -4.0])))
    tensor([ 1.5000,  1.5000, -4.0000])
    """

    def encode(self, vector: torch.Tensor) -> Sent:
        """Return the length, the means and the packed signs."""
        positive = vector >= 0
        count = positive.sum()
        upper = torch.where(positive, vector, 0.0).sum() / count.clamp(min=1)
        lower = torch.where(positive, 0.0, vector).sum() / (vector.numel() - count).clamp(min=1)
        bits = F.pad(positive, (0, -vector.numel() % 8)).view(-1, 8).to(torch.uint8)
        packed = bits[:, 0].clone()
        for place in range(1, 8):
            packed |= bits[:, place] << place
        return vector.numel(), torch.stack([lower, upper]), packed

    def decode(self, sent: Sent) -> torch.Tensor:
        """Return the mean of each element's sign."""
        elements, means, packed = sent
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return torch.where(bits.view(-1)[:elements] != 0, means[1], means[0])


# -- the story ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A codec, the same in eager torch, and what is asked of it."""

    label: str
    eager: EagerQSGD | EagerOneBit
    most_copies: float
    least_faster: float = 0.0


CASES = {"qsgd": Case("qsgd, 7 levels", EagerQSGD(), 2.5, 5.0), "one-bit": Case("one-bit", EagerOneBit(), 2.0)}


@experiment("codecs", question="the quantising codecs against a copy, and the same in eager torch", minutes=1)
def codecs(size: Size, *, repeat: int = 15) -> Telling:
    elements, turns = size.pick((50_000, 2), (11_000_000, repeat))
    let_memory_be_new()
    works = works_on(torch.randn(elements, generator=torch.Generator().manual_seed(0)))
    for work in works.values():
        work()  # loads the kernels, and lets the threads start
    threads, best = torch.get_num_threads(), dict[int, dict[str, float]]()
    counts = sorted({1, threads}, reverse=True)
    try:
        for count in counts:
            torch.set_num_threads(count)
            lanes = {name: partial(seconds_of, work) for name, work in works.items()}
            total = len(counts) * turns * len(lanes)
            times = yield from take_turns(lanes, turns, label=f"{counted(count, 'thread')}: ", total=total)
            best[count] = {name: min(seconds) for name, seconds in times.items()}
    finally:
        torch.set_num_threads(threads)
    rows = [row_of(name, best[threads]) for name in CASES]
    yield from tell_bars(rows, f"Codecs on {elements:,} float32, {counted(threads, 'thread')}", best[threads][CLONE])
    limits = []
    for name in works:
        pairs = [(f"{1e3 * one[name]:.1f}", f"{4e-9 * elements / one[name]:.1f}") for one in best.values()]
        limits.append((name, *(text for pair in pairs for text in pair)))
    yield PlainTable(
        title="What limits them",
        headings=("\nwhat", *(text for count in counts for text in (f"{counted(count, 'thread')}\nms", "\nGB/s"))),
        rows=limits,
        caption="GB/s of the float32 vector. New memory is handed out page by page: where it is most of the time, the "
        "codec is not what is slow, and `out=` helps.",
    )
    yield Numbers({"elements": elements, "turns": turns, "rows": rows, "best_seconds": best})


def let_memory_be_new() -> None:
    """Let malloc ask the system for every large block, and give it back at once."""
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(option, 2**20)


def works_on(vector: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    warm = torch.empty_like(vector)
    works: dict[str, Callable[[], object]] = {CLONE: vector.clone, COPY: lambda: warm.copy_(vector)}
    for name, case in CASES.items():
        codec = make_codec(name)
        payload = codec.encode(vector)
        works |= {
            f"{name} encode": partial(codec.encode, vector),
            f"{name} decode, new memory": partial(codec.decode, payload),
            f"{name} decode, warm memory (out=)": partial(codec.decode, payload, out=warm),
            f"{name} encode, eager torch": partial(case.eager.encode, vector),
            f"{name} decode, eager torch": partial(case.eager.decode, case.eager.encode(vector)),
        }
    return works


def row_of(name: str, best: Mapping[str, float]) -> dict[str, Any]:
    encode, decode = best[f"{name} encode"], best[f"{name} decode, new memory"]
    return {
        "codec": name,
        "encode_seconds": encode,
        "decode_seconds": decode,
        "copies": (encode + decode) / best[CLONE],
        "warm_copies": (encode + best[f"{name} decode, warm memory (out=)"]) / best[COPY],
        "faster": (best[f"{name} encode, eager torch"] + best[f"{name} decode, eager torch"]) / (encode + decode),
    }


def tell_bars(rows: Sequence[Mapping[str, Any]], title: str, clone: float) -> Telling:
    """Yield what encoding and decoding take, and whether that is within the bars."""
    shown = []
    for row in rows:
        label, _, most_copies, least_faster = CASES[row["codec"]]
        claims = [bar(f"{label}: encode and decode, in copies", row["copies"], most=most_copies)]
        if least_faster:
            claims.append(bar(f"{label}: times as fast as in eager torch", row["faster"], least=least_faster))
        yield from claims
        milliseconds = [f"{1e3 * row[name]:.1f}" for name in ("encode_seconds", "decode_seconds")]
        figures = (f"{row['copies']:.2f}", f"{row['warm_copies']:.2f}", f"{row['faster']:.1f} x")
        shown.append((label, *milliseconds, *figures, ", ".join(map(verdict, claims))))
    yield PlainTable(
        title=title,
        headings=("\ncodec", "encode\nms", "decode\nms", "both in\ncopies", "with warm\nmemory", "faster\nthan eager",
                  "copies,\nfaster"),
        rows=shown,
        caption=f"A copy is tensor.clone(): {1e3 * clone:.1f} ms; eager: the same codec in torch's operations.",
    )  # fmt: skip
