"""lars-table-2: |w| / |gradient| before the first step varies between the layers of AlexNet, and the first limits.

There are two versions: our AlexNet with He's initial weights, and one with the weights and the size of images that the
norms in the paper's table come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from experiments.core.claims import figure, within
from experiments.core.story import NAN, Claim, Job, Numbers, Size, Telling, experiment
from experiments.papers.published import LARS_TABLE_2
from paceline.analysis.layer_ratios import inspect_recipe
from paceline.models.alexnet import alexnet
from paceline.recipes import Recipe
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable

LAYERS = ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8")
WEIGHTS = [f"{layer} weight" for layer in LAYERS]
CAFFE_DEVIATIONS = (0.01, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.01)
CAFFE_BIASES = (0.01, 0.01, 0.01, 0.01, 0.01, 0.1, 0.1, 0.01)
PIXEL_DEVIATION = 64.0  # about that of a photograph's bytes, of which Caffe subtracts the mean and divides by nothing
CAFFE = "Caffe's weights"


class Scaled(nn.Module):
    """This layer multiplies its input by a number, so that a normalised image has the size of one in bytes.

    >>> import torch
    >>> Scaled(2.0)(torch.ones(1)).item()
    2.0
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


def caffe_alexnet(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build AlexNet with the initial weights that the norms in the paper's table 2 come from.

    Its norms are those of normal weights with deviation 0.01 (0.005 for fc6 and fc7) and of biases of 0.01 (0.1 for fc6
    and fc7): 0.01 * sqrt(96 * 3 * 11 * 11) = 1.87 and 0.01 * sqrt(96) = 0.098 for conv1, and so on for all sixteen.

    >>> model = caffe_alexnet(input_shape=(3, 32, 32), classes=10)
    >>> float(model[1][0].bias[0].detach())
    0.00999...
    """
    model = alexnet(input_shape=input_shape, classes=classes)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer, deviation, bias in zip(layers, CAFFE_DEVIATIONS, CAFFE_BIASES, strict=True):
        nn.init.normal_(layer.weight, std=deviation)
        assert layer.bias is not None
        nn.init.constant_(layer.bias, bias)
    return nn.Sequential(Scaled(PIXEL_DEVIATION), *model)


MODELS = {"ours": "alexnet", CAFFE: f"{__name__}:caffe_alexnet"}


def run_ratios(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return |w|, |gradient| and their ratio of AlexNet's weights and biases before the first step."""
    recipe = Recipe(seed=settings["seed"]).with_settings(
        data={"name": settings["data"]}, model={"name": settings["model"]}
    )
    rows = list(inspect_recipe(recipe, batch=settings["batch"]).first.ratios)
    named = dict[str, Any]()
    for layer, weight, bias in zip(LAYERS, rows[::2], rows[1::2], strict=True):
        for suffix, row in (("weight", weight), ("bias", bias)):
            ratio = row.ratio if row.ratio is not None and math.isfinite(row.ratio) else None
            named[f"{layer} {suffix}"] = {"weight": row.weight_norm, "gradient": row.gradient_norm, "ratio": ratio}
    return {"layers": named}


def paper_ratios() -> dict[str, float]:
    """Return the ratios of table 2; by their norms its ".b" are the weights, and its ".w" the biases.

    >>> paper_ratios()["conv1 weight"], paper_ratios()["fc8 bias"]
    (8.48, 19)
    """
    kinds = {"b": "weight", "w": "bias"}
    return {f"{label[:-2]} {kinds[label[-1]]}": ratio for label, _, _, ratio in LARS_TABLE_2}


@experiment(
    "lars-table-2",
    source="LARS, table 2",
    question="weights over gradients, layer by layer",
    minutes=0.4,
    full_hours=0.01,
    data=("cifar10",),
)
def table_2(size: Size) -> Telling:
    def job(model: str) -> Job:
        settings = {"model": model, "data": size.pick("digits", "cifar10"), "batch": size.pick(16, 256, 512)}
        return Job(run_ratios, lambda seed: {**settings, "seed": seed}, size.pick(1.0, 25.0, 40.0))

    runs = yield {name: job(model) for name, model in MODELS.items()}
    paper = paper_ratios()
    ratios = {layer: runs.mean("layers", layer, "ratio") for layer in paper}
    found = {name: {layer: ratios[layer][name] for layer in WEIGHTS} for name in MODELS}
    spreads = {name: spread(list(each.values())) for name, each in found.items()}
    limiting = {name: smallest(each) for name, each in found.items()}
    expected = smallest({layer: paper[layer] for layer in WEIGHTS})
    for name in MODELS:
        text = f"ratios of the weights differ by more than ten times ({name})"
        yield within(text, spreads[name], least=10.0, kind="shape")
    for name, layer in limiting.items():
        yield Claim(
            kind="winner",
            text=f"the first layer limits the rate, of the weights ({name})",
            holds=layer == expected,
            because=f"{layer}, {figure(found[name][layer])}" if layer else "none",
        )
    rows = [(layer, f"{paper[layer]:g}", *(figure(ratios[layer][name]) for name in MODELS)) for layer in paper]
    of_paper = spread([paper[layer] for layer in WEIGHTS])
    yield PlainTable(
        title="|w| / |gradient| before the first step",
        headings=("layer", "paper", "ours:\nHe's weights", "ours:\nCaffe's weights"),
        rows=[*rows, ("spread of the weights'", figure(of_paper), *map(figure, spreads.values()))],
        caption="0: the weights are 0 at the start.",
    )
    yield bar_chart(
        "ratios",
        "Ratio of weights to gradient, before the first step",
        "LARS gives each layer a rate in proportion to it.",
        list(LAYERS),
        {
            "paper": [paper[layer] for layer in WEIGHTS],
            **{name: [None if math.isnan(ratio) else ratio for ratio in each.values()] for name, each in found.items()},
        },
        y="ratio",
        log_y=True,
    )
    yield (
        "The paper's .w and .b are swapped: by their norms its .b are the weights. Its conv5.w, 69, is not the "
        "quotient of the norms beside it, which is 800."
    )
    yield (
        "AlexNet has CIFAR size and sees CIFAR-10 in place of ImageNet. He's weights are for a network whose "
        f"images are normalised; Caffe's see images {PIXEL_DEVIATION:g} times as large, about as in bytes."
    )
    norm = runs.each("layers", "conv1 weight", "weight")[CAFFE][0]
    yield Numbers({"spread": spreads, "limiting": limiting, "norm of conv1": norm, "ratios": found})


def spread(ratios: Sequence[float]) -> float:
    """Return the largest ratio over the smallest; NaN where one is missing.

    >>> spread([2.0, 6.0]), spread([2.0, math.nan])
    (3.0, nan)
    """
    return max(ratios) / min(ratios) if all(ratio > 0 for ratio in ratios) else NAN


def smallest(ratios: Mapping[str, float]) -> str:
    """Return the layer with the smallest ratio, of those that have one.

    >>> smallest({"conv1": 2.0, "conv2": math.nan}), smallest({"conv1": math.nan})
    ('conv1', '')
    """
    known = {name: ratio for name, ratio in ratios.items() if not math.isnan(ratio)}
    return min(known, key=lambda name: known[name]) if known else ""
