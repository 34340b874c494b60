"""A plan as JSON: plain numbers and texts, read with every field checked. A file from elsewhere can do no harm.

What a plan takes to read grows with its layers (their square) and with its actions (stages x chunks x micro-batches),
so both have limits, `costs.MOST_LAYERS` and `schedules.MOST_ACTIONS`, which are looked at before anything is computed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

from paceline.decoding import INFINITE, Between, DecodingError, decode, parse_object
from paceline.files import read_plain, write_file
from paceline.pipeline import PipelineError
from paceline.pipeline.costs import MOST_LAYERS
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.placement import Placement, priced
from paceline.pipeline.plan import Batch, Plan
from paceline.pipeline.profile import MOST, Profile, Whole

FORMAT = 1
MOST_BYTES = 8 * 2**20  # of 3,000 layers with all their tensors and weights: 2 MiB
MOST_COUNTED_BYTES = 2**62  # of all layers, in all micro-batches: costs are computed with 64-bit whole numbers
DTYPES = frozenset(
    ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64")
)

DOCUMENT = {
    "format": Whole,
    "model": str,
    "schedule": str,
    "microbatches": Whole,
    "chunks": Whole,
    "cuts": tuple[Whole, ...],
    "proven": bool,
    "notes": tuple[str, ...],
    "devices": tuple[Device, ...],
    "links": tuple[Link, ...],
    "one_link": bool,
    "states": Annotated[float, Between(0, MOST)],
    "fingerprint": str,
    "batch": Batch,
    "profile": dict[str, Any],  # by `profile_from`
}


def profile_document(profile: Profile) -> dict[str, Any]:
    """Return a profile as plain values.

    >>> from paceline.pipeline.profile import Layer
    >>> profile_document(Profile(layers=(Layer(name="a"),)))["layers"][0]["name"]
    'a'
    """
    return _plain(profile)  # type: ignore[no-any-return]


def profile_from(document: Any) -> Profile:
    """Return the profile that `profile_document` made plain values of; every field is checked.

    >>> from paceline.pipeline.profile import Layer
    >>> profile_from(profile_document(Profile(layers=(Layer(name="a"),)))).layers
    (Layer(name='a', kind='', forward_seconds=0.0, ..., spread=0.0),)
    """
    layers = document.get("layers") if isinstance(document, dict) else None
    if isinstance(layers, list) and not 1 <= len(layers) <= MOST_LAYERS:
        raise PipelineError(f"a profile must have between 1 and {MOST_LAYERS:,} layers (it has {len(layers):,})")
    try:
        profile = decode(Profile, document, "profile")
    except DecodingError as error:
        raise PipelineError(str(error)) from error
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
        found = decode(DOCUMENT, document)
        devices, links = found["devices"], found["links"]
        for name in ("devices", "links") if found["one_link"] else ("devices",):
            if not found[name]:
                raise PipelineError(f"{name} must be a list of at least 1 ({name}=[])")
        plan = Plan(
            placement=Placement(cuts=(), pieces=(), devices=devices),
            profile=profile_from(found["profile"]),
            links=links[0] if found["one_link"] else links,
            **{name: found[name] for name in ("model", "batch", "microbatches", "schedule", "states", "fingerprint")},
        )
        _check_batch(plan)
        _check_bytes(plan)
        placement = priced(plan.profile, found["cuts"], devices, **plan.conditions(len(devices), found["chunks"]))
    except PipelineError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise PipelineError(str(error)) from error
    return dataclasses.replace(
        plan, placement=dataclasses.replace(placement, proven=found["proven"], notes=found["notes"])
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return INFINITE if value == math.inf else value


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
