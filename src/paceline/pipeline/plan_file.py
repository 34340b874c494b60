"""A plan as JSON: plain numbers and texts, read with every field checked. A file from elsewhere can do no harm.

What a plan takes to read grows with its layers (their square) and with its actions (stages x chunks x micro-batches),
so both have limits, `costs.MOST_LAYERS` and `schedules.MOST_ACTIONS`, which are looked at before anything is computed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

from paceline.decoding import parse_object
from paceline.files import read_plain, write_file
from paceline.pipeline import PipelineError
from paceline.pipeline.costs import MOST_LAYERS
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.placement import Placement, priced
from paceline.pipeline.plan import Batch, Plan
from paceline.pipeline.profile import Layer, Profile, Tensor, Weight

FORMAT = 1
MOST_BYTES = 8 * 2**20  # of 3,000 layers with all their tensors and weights: 2 MiB
MOST_NUMBER = 2**50  # bytes, seconds or numbers of anything
MOST_COUNTED_BYTES = 2**62  # of all layers, in all micro-batches: costs are computed with 64-bit whole numbers
INFINITE = "infinite"
DTYPES = frozenset(
    ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64")
)


def profile_document(profile: Profile) -> dict[str, Any]:
    """Return a profile as plain values.

    >>> profile_document(Profile(layers=(Layer(name="a"),)))["layers"][0]["name"]
    'a'
    """
    return _plain(profile)  # type: ignore[no-any-return]


def profile_from(document: Any) -> Profile:
    """Return the profile that `profile_document` made plain values of; every field is checked.

    >>> profile_from(profile_document(Profile(layers=(Layer(name="a"),)))).layers
    (Layer(name='a', kind='', forward_seconds=0.0, ..., activation_bytes=0),)
    """
    layers = document.get("layers") if isinstance(document, dict) else None
    if isinstance(layers, list) and not 1 <= len(layers) <= MOST_LAYERS:
        raise PipelineError(f"a profile must have between 1 and {MOST_LAYERS:,} layers (it has {len(layers):,})")
    profile: Profile = _made(Profile, document, "profile")
    _check_profile(profile)
    return profile


def write(plan: Plan, path: Path) -> None:
    write_file(path, json.dumps(document_of(plan), indent=1, allow_nan=False))


def document_of(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values; the placement is its cuts and devices, which it is priced by again."""
    links = [plan.links] if isinstance(plan.links, Link) else list(plan.links)
    return {
        "format": FORMAT,
        "model": plan.model,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "chunks": plan.chunks,
        "cuts": list(plan.cuts),
        "proven": plan.placement.proven,
        "notes": list(plan.placement.notes),
        "devices": [_plain(device) for device in plan.placement.devices],
        "links": [_plain(link) for link in links],
        "one_link": isinstance(plan.links, Link),
        "states": plan.states,
        "fingerprint": plan.fingerprint,
        "batch": _plain(plan.batch),
        "profile": profile_document(plan.profile),
    }


def read(path: Path) -> Plan:
    try:
        return plan_from(parse_object(read_plain(path, most_bytes=MOST_BYTES)))
    except OSError as error:
        raise PipelineError(f"cannot read the plan {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PipelineError(f"{path} is not a plan: {error}") from error


def plan_from(document: Any) -> Plan:
    """Return the plan that `document_of` made plain values of; every field is checked."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        raise PipelineError(f"format must be {FORMAT} (format={_short(found)})")
    try:
        devices = _rows(Device, document["devices"], "devices", least=1)
        links = _rows(Link, document["links"], "links", least=1 if document["one_link"] is True else 0)
        plan = Plan(
            model=_typed(document["model"], str, "model"),
            profile=profile_from(document["profile"]),
            placement=Placement(cuts=(), pieces=(), devices=devices),
            batch=_made(Batch, document["batch"], "batch"),
            microbatches=_typed(document["microbatches"], int, "microbatches"),
            schedule=_typed(document["schedule"], str, "schedule"),
            links=links[0] if document["one_link"] is True else links,
            states=_typed(document["states"], float, "states"),
            fingerprint=_typed(document["fingerprint"], str, "fingerprint"),
        )
        _check_batch(plan)
        chunks = _typed(document["chunks"], int, "chunks")
        _check_bytes(plan)
        conditions = plan.conditions(len(devices), chunks)
        cuts = _typed(document["cuts"], tuple[int, ...], "cuts")
        placement = dataclasses.replace(
            priced(plan.profile, cuts, devices, **conditions),
            proven=document["proven"] is True,
            notes=_typed(document["notes"], tuple[str, ...], "notes"),
        )
    except PipelineError:
        raise
    except KeyError as error:
        raise PipelineError(f"{error} is missing") from error
    except (TypeError, ValueError, IndexError) as error:
        raise PipelineError(str(error)) from error
    return dataclasses.replace(plan, placement=placement)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return INFINITE if value == math.inf else value


def _made(kind: Any, document: Any, where: str) -> Any:
    """Return a dataclass made from plain values, each of the type that it should have."""
    if not isinstance(document, dict):
        raise PipelineError(f"{where} must be a table ({where}={_short(document)})")
    hints = typing.get_type_hints(kind)
    unknown = set(document) - set(hints)
    if unknown:
        raise PipelineError(f"{where} has a field that it should not have: {sorted(map(str, unknown))[0]}")
    return kind(**{name: _typed(value, hints[name], f"{where}.{name}") for name, value in document.items()})


def _rows(kind: Any, document: Any, where: str, *, least: int) -> tuple[Any, ...]:
    if not isinstance(document, list) or len(document) < least:
        raise PipelineError(f"{where} must be a list of at least {least} ({where}={_short(document)})")
    return tuple(_made(kind, each, where) for each in document)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """Return a plain value as the type it should be."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return None if value is None else _typed(value, typing.get_args(hint)[0], where)
    if origin in (tuple, frozenset):
        if not isinstance(value, list):
            raise PipelineError(f"{where} must be a list ({where}={_short(value)})")
        return origin(_typed(each, typing.get_args(hint)[0], where) for each in value)
    if hint in (Layer, Tensor, Weight):
        return _made(hint, value, where)
    if hint is float and value == INFINITE:
        return math.inf
    kinds = (int, float) if hint is float else hint
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise PipelineError(f"{where} must be {hint.__name__} ({where}={_short(value)})")
    least = -1 if where.endswith(".producer") else 0
    if hint in (int, float) and not least <= value <= MOST_NUMBER:
        raise PipelineError(f"{where} must be a number between {least} and {MOST_NUMBER:,} ({where}={_short(value)})")
    return float(value) if hint is float else value


def _check_profile(profile: Profile) -> None:
    """Refuse a profile that placement could not work with."""
    layers = len(profile.layers)
    for tensor in profile.tensors:
        if not -1 <= tensor.producer < tensor.last_use + 1 <= layers:
            raise PipelineError(f"tensor {tensor.name!r} goes from layer {tensor.producer} to {tensor.last_use}")
    for weight in profile.weights:
        if not weight.layers or not all(0 <= layer < layers for layer in weight.layers):
            raise PipelineError(f"weight {weight.name!r} is used by layers {_short(weight.layers)} of {layers}")


def _check_bytes(plan: Plan) -> None:
    """Refuse sizes whose sums would not be right any more."""
    profile = plan.profile
    every = sum(layer.activation_bytes for layer in profile.layers)
    every += sum(tensor.bytes for tensor in profile.tensors) + sum(weight.bytes for weight in profile.weights)
    if every * max(plan.microbatches, 2 + plan.states) > MOST_COUNTED_BYTES:
        raise PipelineError(f"its layers have {every:,} bytes, more than can be counted in {plan.microbatches:,} parts")


def _check_batch(plan: Plan) -> None:
    """Refuse a batch that tracing could not work with."""
    batch = plan.batch
    if not batch.shapes or len(batch.shapes) != len(batch.dtypes) or not set(batch.dtypes) <= DTYPES:
        raise PipelineError(f"batch must have inputs of known types ({_short(batch)})")
    if any(not shape or shape[0] * plan.microbatches != batch.samples or 0 in shape for shape in batch.shapes):
        raise PipelineError(f"batch must be {plan.microbatches} micro-batches of equal size ({_short(batch)})")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
