"""How large each layer's weights are beside their gradient: which layer limits the learning rate.

A step of plain gradient descent moves a layer by lr * |g|. Where that is more than |w|, its own length, the step throws
away what the layer was, and training may diverge. So each layer bears a rate up to about

    ratio = |w| / |g|

and one rate for all layers is limited by the layer with the smallest ratio. LARS (You, Gitman and Ginsburg 2017,
section 4 and table 2) gives each layer a rate of its own instead, in proportion to that ratio:

    local rate = trust_coefficient * |w| / (|g| + weight_decay * |w|)

The rate is lr * local rate; with `clip` it is min(lr, local rate), so that the local rate is a limit and no factor.
What LARS leaves out, and what has a norm of 0, takes lr as it is: a factor of 1, or no limit.

Where we differ: the paper lists every layer. A bias that starts at 0 has the ratio 0: it would limit every rate, and
yet its first step does no harm, for it has no size to lose. Such rows are listed, and never the limiting one. The same
bias has a tiny ratio after a few steps: `only("weight")` looks past all biases and scales of normalisation.

As text of at most 80 columns, each row ends in a bar on a logarithmic scale:

  layer              |w|   |grad|    ratio LARS rate  1 to 1000, log scale
> 0.weight          11.3     1.96     5.77   0.00577  ██████▎               the layer that limits the rate
  0.bias               0    0.198        0  as it is  weights are 0
  1.weight            16    0.208     76.9  as it is  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒        bias or scale of a normalisation
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from paceline.lookup import unknown
from paceline.optim.lars import is_bias_or_norm, local_rate
from paceline.optim.norms import entries
from paceline.quantities import number_text
from paceline.renaming import renamed
from paceline.terminal import WIDTH, bar, decades, log_share, shortened, text_table

LEAST_NAME, MOST_NAME, NUMBER, RATE = 15, 24, 8, 9  # widths of columns
AS_IT_IS = "as it is"  # a rate that LARS does not scale

Kind = Literal["weight", "bias", "norm"]


@dataclass(frozen=True, kw_only=True)
class LayerRatio:
    """One parameter: its norm, its gradient's, their ratio, and the local rate that LARS would give it.

    What cannot be told is None, and `remark` says why: "frozen", "no gradient", "not finite", "both are 0". A ratio is
    0 where the weights are, and infinite where only the gradient is 0. `scaled` is False where LARS takes the rate as
    it is; `local_rate` is then 1, or infinite with `clip`.

    >>> row = LayerRatio(name="fc.weight", shape=(10, 64), kind="weight", weight_norm=3.0, gradient_norm=0.5,
    ...                  ratio=6.0, local_rate=0.006)
    >>> row.count, row.counts
    (640, True)
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    weight_norm: float
    gradient_norm: float | None = None
    ratio: float | None = None
    local_rate: float | None = None
    scaled: bool = True
    remark: str = ""

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def counts(self) -> bool:
        """Whether its ratio is one that can limit the rate: positive and finite."""
        return self.ratio is not None and 0 < self.ratio < math.inf

    @property
    def local_rate_text(self) -> str:
        """The rate or limit of LARS as a cell of a table."""
        return AS_IT_IS if self.local_rate is not None and not self.scaled else number_text(self.local_rate)


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerRatios:
    """The rows of a model in the order of its parameters; shown as a table of 80 columns.

    >>> model = nn.Linear(2, 2)
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(2.0), model.bias.zero_()
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> print(layer_ratios(model))
      layer                |w|   |grad|    ratio LARS rate  1 to 10, log scale
    > weight                 4        2        2     0.002  ███████▎
      bias                   0     1.41        0  as it is  weights are 0
    """

    rows: tuple[LayerRatio, ...]
    trust_coefficient: float
    weight_decay: float
    exclude_bias_and_norm: bool
    clip: bool = False

    @property
    def trust(self) -> float:
        """The old name of `trust_coefficient`."""
        renamed("trust", self.trust_coefficient, "trust_coefficient", None)
        return self.trust_coefficient

    @property
    def limiting(self) -> LayerRatio | None:
        """The row with the smallest positive ratio, the first of several; None where there is none.

        >>> model = nn.Linear(2, 2)
        >>> (1e6 * model(torch.ones(1, 2)).sum()).backward()
        >>> ratios = layer_ratios(model)
        >>> ratios.limiting.ratio == min(row.ratio for row in ratios)
        True
        """
        return smallest(self.rows)

    @property
    def spread(self) -> float | None:
        """The largest ratio over the smallest, among those that are positive and finite; None where there is none.

        >>> model = nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(6.0), model.bias.fill_(2.0)
        >>> model(torch.ones(1, 1)).sum().backward()
        >>> layer_ratios(model).spread
        3.0
        """
        found = [row.ratio for row in self.rows if row.counts and row.ratio is not None]
        return max(found) / min(found) if found else None

    def only(self, kind: Kind) -> LayerRatios:
        """Return the rows of one kind.

        >>> model = nn.Linear(2, 2)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> [row.name for row in layer_ratios(model).only("weight")]
        ['weight']
        """
        if kind not in get_args(Kind):
            raise unknown("kind", kind, get_args(Kind))
        return replace(self, rows=tuple(row for row in self.rows if row.kind == kind))

    @property
    def rate_heading(self) -> str:
        """What `local_rate` is: a factor of the learning rate, or with `clip` a limit to it."""
        return "LARS limit" if self.clip else "LARS rate"

    def __iter__(self) -> Iterator[LayerRatio]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> LayerRatio:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(str(unknown("parameter", name, [row.name for row in self.rows])))

    def __str__(self) -> str:
        return "\n".join(ratio_lines(self.rows, limiting=self.limiting, rate_heading=self.rate_heading))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the table as a notebook shows it."""
        return f'<pre style="line-height: 1.25">{escape(str(self))}</pre>'


def layer_ratios(
    model: nn.Module,
    *,
    trust_coefficient: float = 0.001,
    weight_decay: float = 5e-4,
    exclude_bias_and_norm: bool = True,
    clip: bool = False,
    trust: float | None = None,
) -> LayerRatios:
    """Return each parameter's norm beside that of its gradient, as a backward has left it in `.grad`.

    Gradients must be as the optimiser sees them: with a `GradScaler`, unscale them first. A kind of "norm" or "bias"
    has one dimension at most: that is what LARS leaves out by default. The other arguments are those of `LARS`;
    `trust` is the old name of `trust_coefficient`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model(torch.ones(1, 4)).square().sum().backward()
    >>> [row.name for row in layer_ratios(model)]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> layer_ratios(nn.Linear(2, 2))
    Traceback (most recent call last):
    ValueError: no parameter has a gradient: call backward first
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"layer_ratios takes an nn.Module, not a {type(model).__name__}")
    if trust is not None:
        trust_coefficient = renamed("trust", trust, "trust_coefficient", None)
    if not 0 < trust_coefficient < math.inf:
        raise ValueError(f"trust_coefficient must be above 0 and finite (trust_coefficient={trust_coefficient})")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be at least 0 and finite (weight_decay={weight_decay})")
    named = list(_parameters(model))
    _check_gradients([parameter for _, _, parameter in named])
    ratios = LayerRatios(
        rows=(),
        trust_coefficient=trust_coefficient,
        weight_decay=weight_decay,
        exclude_bias_and_norm=exclude_bias_and_norm,
        clip=clip,
    )
    rows = (_row(name, _kind(owner, parameter), parameter, ratios) for name, owner, parameter in named)
    return replace(ratios, rows=tuple(rows))


def smallest(rows: Iterable[LayerRatio]) -> LayerRatio | None:
    """Return the row with the smallest positive and finite ratio.

    >>> smallest([]) is None
    True
    """
    return min((row for row in rows if row.counts), key=lambda row: cast("float", row.ratio), default=None)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Every parameter once, by the first of its names, with the module that holds it."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):  # the latter is what torch.compile returns
        model = model.module if isinstance(model, wrappers) else cast("nn.Module", model._orig_mod)
    owners = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: call forward and backward first")
        if hasattr(parameter, "full_tensor"):
            raise ValueError(f"{name} is sharded over processes (a DTensor), and no process has the whole of it")
        yield name, owners[name.rpartition(".")[0]], parameter


def _check_gradients(parameters: list[nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("the model has no parameters")
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("every parameter of the model is frozen (requires_grad is False)")
    if not any(parameter.requires_grad and parameter.grad is not None for parameter in parameters):
        raise ValueError("no parameter has a gradient: call backward first")


def _row(name: str, kind: Kind, parameter: nn.Parameter, settings: LayerRatios) -> LayerRatio:
    """Measure one parameter; its local rate is what LARS multiplies lr by, or with `clip` what it holds lr to."""
    given = parameter.grad if parameter.requires_grad else None
    weight, gradient = norm(parameter), None if given is None else norm(given)
    scaled = bool(weight and gradient) and not (settings.exclude_bias_and_norm and kind != "weight")
    ratio = local = None
    if gradient is None:
        remark = "no gradient" if parameter.requires_grad else "frozen"
    elif not (math.isfinite(weight) and math.isfinite(gradient)):
        remark = "not finite"
    else:
        if gradient:
            ratio, remark = weight / gradient, "" if weight else "weights are 0"
        else:
            ratio, remark = (math.inf, "gradient is 0") if weight else (None, "both are 0")
        local = math.inf if settings.clip else 1.0
        if scaled:
            local = local_rate(
                weight, gradient, trust_coefficient=settings.trust_coefficient, weight_decay=settings.weight_decay
            )
    return LayerRatio(
        name=name,
        shape=tuple(parameter.shape),
        kind=kind,
        weight_norm=weight,
        gradient_norm=gradient,
        ratio=ratio,
        local_rate=local,
        scaled=scaled,
        remark=remark,
    )


def _kind(owner: nn.Module, parameter: nn.Parameter) -> Kind:
    """Return the kind by the number of dimensions, as LARS does: a bias has one at most and is in no normalisation."""
    if not is_bias_or_norm(parameter):
        return "weight"
    return "norm" if "Norm" in type(owner).__name__ else "bias"


def norm(tensor: torch.Tensor) -> float:
    """Return the length of a tensor of any type and layout, added up in float64 (float32 on devices without it).

    >>> norm(torch.full((4,), 1e-30, dtype=torch.bfloat16)) > 0
    True
    >>> norm(torch.tensor([3 + 4j])), norm(torch.eye(4).to_sparse())
    (5.0, 2.0)
    """
    tensor = entries(tensor.detach())
    wide: Any = torch.complex128 if tensor.is_complex() else torch.float64
    if tensor.device.type == "mps":
        wide = torch.complex64 if tensor.is_complex() else torch.float32
    return float(torch.linalg.vector_norm(tensor.to(wide)))


# -- as text -----------------------------------------------------------------------------------------------------------


def ratio_lines(
    rows: Sequence[LayerRatio], *, limiting: LayerRatio | None, later: Mapping[str, float | None] | None = None,
    later_heading: str = "", rate_heading: str = "LARS rate",
) -> list[str]:  # fmt: skip
    """Return the table, a heading and a line per row; with `later`, another moment's ratios instead of LARS's rates.

    The other moment is drawn as a `|` where its bar would end.

    >>> row = LayerRatio(name="w", shape=(2, 2), kind="weight", weight_norm=3.0, gradient_norm=0.5, ratio=6.0)
    >>> for line in ratio_lines([row], limiting=row, later={"w": 2.0}, later_heading="step 9"):
    ...     print(line)
      layer                |w|   |grad|    ratio    step 9  1 to 10, log scale
    > w                      3      0.5        6         2  ██████|███████████▋
    """
    drawn = [row.ratio for row in rows if row.counts and row.ratio is not None]
    if later is not None:
        drawn += [ratio for ratio in later.values() if ratio is not None and 0 < ratio < math.inf]
    low, high = decades(drawn)
    name = min(max([LEAST_NAME, *(len(row.name) for row in rows)]), MOST_NAME)
    heading = rate_heading if later is None else later_heading
    room = WIDTH - 2 - name - 3 * (NUMBER + 1) - (max(RATE, len(heading)) + 1) - 2
    scale = f"{number_text(10.0**low)} to {number_text(10.0**high)}, log scale" if drawn else ""
    if len(scale) > room:
        scale = scale.removesuffix(" scale")
    cells: list[tuple[str, ...]] = [(" ", "layer", "|w|", "|grad|", "ratio", heading, f" {scale[:room]}")]
    for row in rows:
        mark = ">" if limiting is not None and row.name == limiting.name else " "
        norms = map(number_text, (row.weight_norm, row.gradient_norm, row.ratio))
        then = later.get(row.name) if later is not None else None
        last = row.local_rate_text if later is None else number_text(then)
        end = _bar(row, then, low, high, room) if row.counts else row.remark[:room]
        cells.append((mark, shortened(row.name, name, dots="..", cut="early"), *norms, last, f" {end}"))
    return text_table(cells, align="<<>>>><", least=(1, LEAST_NAME, NUMBER, NUMBER, NUMBER, RATE), gap=1)


def _bar(row: LayerRatio, later: float | None, low: int, high: int, width: int) -> str:
    """Return a bar from 10**low; weights are solid, to an eighth of a character, and all else is grey."""
    drawn = bar(width * log_share(cast("float", row.ratio), low, high), soft=row.kind != "weight")
    if later is None or not 0 < later < math.inf:
        return drawn
    at = min(width - 1, max(0, round(width * log_share(later, low, high)) - 1))
    cells = f"{drawn:<{width}}"
    return f"{cells[:at]}|{cells[at + 1 :]}".rstrip()
