"""A strict checker of Chrome's Trace Event Format, JSON Object Format, as far as paceline writes it.

Written from the published description ("Trace Event Format") and from what Perfetto says of its importer: slices of one
thread nest perfectly or are apart, and what breaks that rule is not shown as it was meant.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

KINDS = {"X", "M", "C", "s", "f"}
NAMES = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}
TOP = {"traceEvents": list, "displayTimeUnit": str, "otherData": dict}


class FormatError(AssertionError):
    pass


def check(document: Any) -> None:
    """Raise FormatError for the first rule that a document breaks."""
    document = json.loads(json.dumps(document, allow_nan=False))
    need(isinstance(document, dict) and set(document) <= set(TOP), "unknown fields at the top", document)
    for name, kind in TOP.items():
        need(isinstance(document.get(name), kind), f"{name} must be a {kind.__name__}", document.get(name))
    need(document["displayTimeUnit"] in ("ms", "ns"), "displayTimeUnit", document["displayTimeUnit"])
    events = document["traceEvents"]
    for event in events:
        check_event(event)
    check_names(events)
    slices = check_nesting(events)
    check_arrows(events, slices)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    need(times == sorted(times), "events are in order of time", "")


def need(holds: bool, rule: str, found: Any) -> None:
    if not holds:
        raise FormatError(f"{rule}: {str(found)[:300]}")


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_event(event: Any) -> None:
    need(isinstance(event, dict) and event.get("ph") in KINDS, "an event has a known ph", event)
    kind = event["ph"]
    need(isinstance(event.get("name"), str) and event["name"] != "", "an event has a name", event)
    need(whole(event.get("pid")) and whole(event.get("tid")), "pid and tid are whole numbers", event)
    need(number(event.get("ts")) and event["ts"] >= 0, "ts is finite and at least 0", event)
    need("args" not in event or isinstance(event["args"], dict), "args is an object", event)
    if kind == "X":
        need(isinstance(event.get("cat"), str), "a slice has a category", event)
        need(number(event.get("dur")) and event["dur"] >= 0, "dur is finite and at least 0", event)
    elif kind == "M":
        need(event["name"] in NAMES, "metadata has a known name", event)
        field, type_of = NAMES[event["name"]]
        need(set(event.get("args", {})) == {field}, "metadata has its one argument", event)
        need(isinstance(event["args"][field], type_of), "the argument has its type", event)
    elif kind == "C":
        values = event.get("args", {})
        need(bool(values) and all(number(each) for each in values.values()), "a counter has numbers", event)
    else:
        need(isinstance(event.get("cat"), str), "an arrow has a category", event)
        need(whole(event.get("id")) or isinstance(event.get("id"), str), "an arrow has an id", event)
        need(kind == "s" or event.get("bp") == "e", "an end is bound to the slice around it", event)
    known = {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args", "id", "bp"}
    need(set(event) <= known, "no other fields", event)


def check_names(events: list[Any]) -> None:
    named = [(event["pid"], event["tid"], event["name"]) for event in events if event["ph"] == "M"]
    need(len(named) == len(set(named)), "a track has one name", named)
    processes = {process for process, _, name in named if name == "process_name"}
    tracks = {(process, track) for process, track, name in named if name == "thread_name"}
    for event in events:
        need(event["pid"] in processes, "every process has a name", event)
        if event["ph"] in ("X", "s", "f"):
            need((event["pid"], event["tid"]) in tracks, "every track has a name", event)


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def check_nesting(events: list[Any]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = nanoseconds(event["ts"])
            tracks[event["pid"], event["tid"]].append((begin, begin + nanoseconds(event["dur"])))
    for track, slices in tracks.items():
        open_until: list[int] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            need(not open_until or end <= open_until[-1], f"slices of track {track} nest or are apart", (begin, end))
            open_until.append(end)
    return tracks


def check_arrows(events: list[Any], slices: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    arrows: dict[Any, dict[str, list[Any]]] = defaultdict(lambda: {"s": [], "f": []})
    for event in events:
        if event["ph"] in ("s", "f"):
            arrows[event["cat"], event["name"], event["id"]][event["ph"]].append(event)
    ids = [key[2] for key in arrows]
    need(len(ids) == len(set(ids)), "an id is that of one arrow", ids)
    begins = {track: sorted(each) for track, each in slices.items()}
    for key, ends in arrows.items():
        need(len(ends["s"]) == 1, "an arrow has one start", key)
        need(len(ends["f"]) >= 1, "an arrow has an end", key)
        for event in (*ends["s"], *ends["f"]):
            at, track = nanoseconds(event["ts"]), (event["pid"], event["tid"])
            around = [begin for begin, end in begins.get(track, ()) if begin <= at < end]
            need(bool(around), "an end of an arrow is inside a slice", event)
        need(all(event["ts"] >= ends["s"][0]["ts"] for event in ends["f"]), "an arrow goes forward in time", key)
