"""Table 2 shows that |w| / |gradient| before the first step varies between the layers of AlexNet.

There are two versions: our AlexNet with He's initial weights, and one with the weights and the size of images that the
norms in the paper's table come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.analysis.layer_ratios import inspect_recipe
from paceline.models.alexnet import alexnet
from paceline.recipes import Recipe
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import figure, mean, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.published import LARS_TABLE_2

TABLE_2_LAYERS = ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8")
CAFFE_DEVIATIONS = (0.01, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.01)
CAFFE_BIASES = (0.01, 0.01, 0.01, 0.01, 0.01, 0.1, 0.1, 0.01)
PIXEL_DEVIATION = 64.0  # about that of a photograph's bytes, of which Caffe subtracts the mean and divides by nothing


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


TABLE_2_MODELS = {"ours": "alexnet", "Caffe's weights": f"{__name__}:caffe_alexnet"}


def run_ratios(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return |w|, |gradient| and their ratio of AlexNet's weights and biases before the first step."""
    recipe = Recipe(seed=settings["seed"]).with_settings(
        data={"name": settings["data"]}, model={"name": settings["model"]}
    )
    rows = list(inspect_recipe(recipe, batch=settings["batch"]).first.ratios)
    named = dict[str, Any]()
    for layer, weight, bias in zip(TABLE_2_LAYERS, rows[::2], rows[1::2], strict=True):
        for suffix, row in (("weight", weight), ("bias", bias)):
            ratio = row.ratio if row.ratio is not None and math.isfinite(row.ratio) else None
            named[f"{layer} {suffix}"] = {"weight": row.weight_norm, "gradient": row.gradient_norm, "ratio": ratio}
    return {"layers": named}


def jobs_of_table_2(plan: ExperimentPlan) -> list[Job]:
    return [
        Job(
            name=f"{name} seed {seed}",
            run=run_ratios,
            settings={
                "model": model,
                "data": plan.choose(toy="digits", laboratory="cifar10", full="cifar10"),
                "batch": plan.choose(toy=16, laboratory=256, full=512),
                "seed": seed,
            },
            seconds=plan.choose(toy=1.0, laboratory=25.0, full=40.0),
        )
        for name, model in TABLE_2_MODELS.items()
        for seed in plan.seeds
    ]


def paper_ratios() -> dict[str, float]:
    """Return the ratios of table 2; by their norms its ".b" are the weights, and its ".w" the biases.

    >>> paper_ratios()["conv1 weight"], paper_ratios()["fc8 bias"]
    (8.48, 19)
    """
    kinds = {"b": "weight", "w": "bias"}
    return {f"{label[:-2]} {kinds[label[-1]]}": ratio for label, _, _, ratio in LARS_TABLE_2}


def conclude_table_2(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    paper = paper_ratios()

    def ratio(name: str, layer: str) -> float | None:
        return mean([outcomes[f"{name} seed {seed}"]["layers"][layer]["ratio"] for seed in plan.seeds])

    def norm(name: str, layer: str) -> float:
        return float(outcomes[f"{name} seed {plan.seeds[0]}"]["layers"][layer]["weight"])

    weights = [f"{layer} weight" for layer in TABLE_2_LAYERS]
    found = {name: {layer: ratio(name, layer) for layer in weights} for name in TABLE_2_MODELS}
    spreads = {name: spread(each.values()) for name, each in found.items()}
    limiting = {name: _smallest(each) for name, each in found.items()}
    paper_spread, paper_limiting = (
        spread([paper[layer] for layer in weights]),
        _smallest({w: paper[w] for w in weights}),
    )
    caffe = "Caffe's weights"
    rows = [
        (layer, f"{paper[layer]:g}", figure(ratio("ours", layer)), figure(ratio(caffe, layer)))
        for layer in (f"{layer} {kind}" for layer in TABLE_2_LAYERS for kind in ("weight", "bias"))
    ]
    rows.append(("spread of the weights'", figure(paper_spread), figure(spreads["ours"]), figure(spreads[caffe])))
    return Findings(
        tables=(
            PlainTable(
                title="|w| / |gradient| before the first step",
                headings=("layer", "paper", "ours:\nHe's weights", "ours:\nCaffe's weights"),
                rows=rows,
                caption="0: the weights are 0 at the start.",
            ),
        ),
        claims=(
            *(
                within(
                    f"ratios of the weights differ by more than ten times ({name})",
                    spreads[name],
                    least=10.0,
                    kind="shape",
                )
                for name in TABLE_2_MODELS
            ),
            *(
                Claim(
                    kind="winner",
                    text=f"the first layer limits the rate, of the weights ({name})",
                    holds=limiting[name] == paper_limiting,
                    because=f"{limiting[name]}, {figure(found[name][limiting[name]])}" if limiting[name] else "none",
                )
                for name in TABLE_2_MODELS
            ),
        ),
        charts=(
            bar_chart(
                "ratios",
                "Ratio of weights to gradient, before the first step",
                "LARS gives each layer a rate in proportion to it.",
                list(TABLE_2_LAYERS),
                {
                    "paper": [paper[layer] for layer in weights],
                    "ours": [found["ours"][layer] for layer in weights],
                    caffe: [found[caffe][layer] for layer in weights],
                },
                y="ratio",
                log_y=True,
            ),
        ),
        series=("paper", "ours", caffe),
        remarks=(
            "The paper's .w and .b are swapped: by their norms its .b are the weights. Its conv5.w, 69, is not the "
            "quotient of the norms beside it, which is 800.",
            "AlexNet has CIFAR size and sees CIFAR-10 in place of ImageNet. He's weights are for a network whose "
            f"images are normalised; Caffe's see images {PIXEL_DEVIATION:g} times as large, about as in bytes.",
        ),
        numbers={
            "spread": spreads,
            "limiting": limiting,
            "norm of conv1": norm(caffe, "conv1 weight"),
            "ratios": found,
        },
    )


def spread(ratios: Iterable[float | None]) -> float | None:
    """Return the largest ratio over the smallest; None where one is missing.

    >>> spread([2.0, 6.0]), spread([2.0, None])
    (3.0, None)
    """
    known = list(ratios)
    whole = [each for each in known if each is not None and each > 0]
    return max(whole) / min(whole) if whole and len(whole) == len(known) else None


def _smallest(ratios: Mapping[str, float | None]) -> str:
    known = {name: each for name, each in ratios.items() if each is not None}
    return min(known, key=lambda name: known[name]) if known else ""
