"""The papers' networks at CIFAR size, and how a user's network is named.

The rule: a network is its name, its input shape, its number of classes and its seed. The same four give
the same parameters to the last bit, nothing here touches torch's global random numbers, and no network
draws any later: there is no dropout. Importing this package does not import torch; building a network does.

Every network in the table takes any image size and any number of channels, and is an `nn.Sequential` of its
blocks, so a pipeline may cut it between any two. A new one is its file and one line in `MODELS`.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from paceline import randomness
from paceline.lookup import unknown
from paceline.user_code import Offered, call, is_code, make, name_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODELS", "ModelEntry", "build_model", "count_parameters", "own_model", "seeded"]

BATCH_OR_GROUP = ("batch", "group")
BATCH_GROUP_OR_NONE = ("batch", "group", "none")


@dataclass(frozen=True)
class ModelEntry:
    """One line of the table: where the network is built, what it is, and its choices of normalisation.

    `location` is 'module:function'. The first of `norms` is the default; empty means there is no choice.

    >>> entry = MODELS["vgg11"]
    >>> entry.location, entry.norms, entry.takes_norm
    ('paceline.models.vgg:vgg11', ('batch', 'group', 'none'), True)
    """

    location: str
    description: str
    norms: tuple[str, ...] = ()

    @property
    def takes_norm(self) -> bool:
        """Whether the network's normalisation can be chosen.

        >>> MODELS["mlp"].takes_norm
        False
        """
        return bool(self.norms)


def _entry(place: str, description: str, norms: tuple[str, ...] = ()) -> ModelEntry:
    return ModelEntry(f"{__name__}.{place}", description, norms)


MODELS = MappingProxyType(
    {
        "mlp": _entry("mlp:mlp", "two hidden layers of 128; the quickest"),
        "lenet": _entry("lenet:lenet", "LeNet-5: two convolutions, three linear layers"),
        "vgg11": _entry("vgg:vgg11", "VGG-11, one linear layer", BATCH_GROUP_OR_NONE),
        "vgg13": _entry("vgg:vgg13", "VGG-13, one linear layer", BATCH_GROUP_OR_NONE),
        "vgg16": _entry("vgg:vgg16", "VGG-16, one linear layer", BATCH_GROUP_OR_NONE),
        "vgg19": _entry("vgg:vgg19", "VGG-19, one linear layer", BATCH_GROUP_OR_NONE),
        "resnet18": _entry("resnet:resnet18", "ResNet-18, basic blocks", BATCH_OR_GROUP),
        "resnet34": _entry("resnet:resnet34", "ResNet-34, basic blocks", BATCH_OR_GROUP),
        "resnet50": _entry("resnet:resnet50", "ResNet-50, bottleneck blocks", BATCH_OR_GROUP),
        "resnet101": _entry("resnet:resnet101", "ResNet-101, bottleneck blocks", BATCH_OR_GROUP),
        "wrn10": _entry("wide_resnet:wrn10", "Wide ResNet 10-8", BATCH_OR_GROUP),
        "wrn16": _entry("wide_resnet:wrn16", "Wide ResNet 16-8", BATCH_OR_GROUP),
        "wrn22": _entry("wide_resnet:wrn22", "Wide ResNet 22-8", BATCH_OR_GROUP),
        "alexnet": _entry("alexnet:alexnet", "AlexNet, local response normalisation"),
        "alexnet-bn": _entry("alexnet:alexnet_bn", "AlexNet, batch normalisation", BATCH_OR_GROUP),
        "googlenet": _entry("googlenet:googlenet", "GoogLeNet: nine inception modules", BATCH_GROUP_OR_NONE),
        "densenet121": _entry("densenet:densenet121", "DenseNet-121, growth 32", BATCH_OR_GROUP),
        "mobilenetv2": _entry("mobilenetv2:mobilenetv2", "MobileNetV2, width 1", BATCH_OR_GROUP),
    }
)
"""Every network by its name on the command line."""


def build_model(
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    norm: str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build a network of the table, or a user's own named 'module:factory', with seeded parameters.

    `input_shape` is (channels, height, width); a user's own network and `mlp` take any. A factory gets it and
    `classes` if it takes them. `norm` is one of the network's choices; None is its default.
    The parameters are drawn on the CPU; torch's global generator is left as it was.

    >>> model = build_model("mlp", input_shape=(1, 8, 8), classes=10, seed=3)
    >>> count_parameters(model)
    26122
    >>> build_model("mlp", input_shape=(1, 8, 8), classes=10, norm="group")
    Traceback (most recent call last):
    ValueError: model 'mlp' has no normalisation to choose (norm='group'); leave norm out, or take one of ...
    """
    from_user = isinstance(name, str) and is_code(name)
    shape = _checked_shape(input_shape, any_length=from_user or name == "mlp")
    classes, seed = _checked_integer("classes", classes), _checked_integer("seed", seed)
    if classes < 1:
        raise ValueError(f"classes must be at least 1 (classes={classes}); give the number of labels")
    if not from_user and name not in MODELS:
        raise unknown("model", name, MODELS)
    norm = _checked_norm(name, norm)
    with seeded(seed):
        if from_user:
            return own_model(name, {"input_shape": lambda: shape, "classes": lambda: classes})
        return _build_listed(MODELS[name], shape, classes, norm)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let a network draw its parameters as the seed says, and leave the generators as they were.

    >>> import torch
    >>> with seeded(3):
    ...     first = torch.nn.Linear(2, 2)
    >>> with seeded(3):
    ...     print(bool((first.weight == torch.nn.Linear(2, 2).weight).all()))
    True
    """
    with randomness.seeded(seed, "model"):
        yield


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers a network learns.

    >>> import torch
    >>> count_parameters(torch.nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters())


def own_model(source: str | Callable[..., object], offered: Offered) -> nn.Module:
    """Build a user's network by its factory, or by the factory's name, 'module:factory'.

    >>> own_model("torch.nn:Identity", {})
    Identity()
    """
    from torch import nn

    name = source if isinstance(source, str) else name_of(source)
    model = make("model", source, offered) if isinstance(source, str) else call("model", name, source, offered)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} returned {type(model).__name__}; its factory must return a torch.nn.Module")
    return model


def _build_listed(entry: ModelEntry, shape: tuple[int, ...], classes: int, norm: str | None) -> nn.Module:
    from paceline.models.layers import initialise

    module, function = entry.location.split(":")
    choice = {} if norm is None else {"norm": norm}
    builder = getattr(importlib.import_module(module), function)
    model: nn.Module = builder(input_shape=shape, classes=classes, **choice)
    initialise(model)
    return model


def _checked_norm(name: str, norm: str | None) -> str | None:
    norms = MODELS[name].norms if name in MODELS else ()
    if norm is None:
        return norms[0] if norms else None
    if not norms:
        takers = ", ".join(model for model, entry in MODELS.items() if entry.takes_norm)
        raise ValueError(
            f"model {name!r} has no normalisation to choose (norm={norm!r}); leave norm out, or take one of {takers}"
        )
    if norm not in norms:
        raise unknown(f"norm for {name}", norm, norms)
    return norm


def _checked_shape(input_shape: Sequence[int], *, any_length: bool) -> tuple[int, ...]:
    try:
        shape = tuple(_checked_integer("a side", side) for side in input_shape)
        sound = min(shape, default=1) >= 1 and (any_length or len(shape) == 3)
    except (TypeError, ValueError):
        sound = False
    if not sound:
        many = "" if any_length else "three "
        raise ValueError(
            f"input_shape must be {many}whole numbers of at least 1, (channels, height, width) for images, "
            f"such as (3, 32, 32) (input_shape={input_shape!r})"
        )
    return shape


def _checked_integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a whole number ({name}={value!r})") from None
