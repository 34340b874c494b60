"""Who may import whom: the levels drawn in docs/architecture.md, held over the source itself.

Imports inside functions and under TYPE_CHECKING count: a rule that a later import can go round is no rule.
A module named in a string ("paceline.data.digits", for importlib) counts as well, and so do the examples in
docstrings: whoever reads one is sent to no place that the module itself may not know.
"""

from __future__ import annotations

import ast
import doctest
import functools
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# From the top down. A unit may import the units on the lines below it, and none on its own line.
LEVELS = [
    {"__main__"},
    {"cli"},
    {"huggingface", "lightning", "ray", "slurm"},
    {"analysis", "averaging", "cluster", "live"},
    {"runs", "bench"},
    {"recipes"},
    {
        "drivers.simulated",
        "drivers.served",
        "drivers.averaging",
        "drivers.balancing",
        "drivers.ddp",
        "drivers.pipelining",
        "drivers.replayed",
        "drivers.rounds",
        "drivers.watching",
        "drivers",
        "reports",
    },
    {"drivers.ranks", "diagnosis"},
    {"traces", "training", "pipeline"},
    {"exchanges"},
    {"data", "models", "workers", "codecs", "strategies", "optim"},
    {"distributed"},
    {"settings", "quantities", "stopwatch", "terminal", "files", "processes", "loggers"},
    {"decoding", "user_code"},
    {"events", "traffic", "randomness", "lookup", "lazy", "errors", "renaming"},
]
BOTTOM = LEVELS[-1] | LEVELS[-2] | LEVELS[-3]
ONLY_THESE = {"reports": {"traces", "pipeline", "diagnosis", *BOTTOM}, "diagnosis": {"traces", *BOTTOM}}
ON_RANKS = {
    "distributed",
    "drivers.ranks",
    "drivers.averaging",
    "drivers.balancing",
    "drivers.ddp",
    "drivers.pipelining",
    "drivers.rounds",
    "drivers.watching",
}
FRAMEWORKS = {"huggingface", "lightning", "ray"}  # in their scripts there are ranks already
# A public face shows, lazily, what stands above it: whoever looks for a pipeline looks in paceline.pipeline.
SHOWN = {
    ("paceline.pipeline", "paceline.drivers.pipelining.pipeline"),
    ("paceline.pipeline", "paceline.drivers.pipelining.planning"),
}
ON_THE_NETWORK = {"drivers.served"}
ONLY_IN = {
    "torch.distributed": {*ON_RANKS, "pipeline", *FRAMEWORKS},
    "asyncio": {*ON_THE_NETWORK, "runs", "live"},
    "socket": {*ON_THE_NETWORK, "live"},
    "ssl": ON_THE_NETWORK,
    "grpc": set(),
}
NOT_IN_A_STRATEGY = {"torch", "time", "random", "logging"}
MAY_USE_TORCH = {"paceline.strategies.combine"}


@functools.cache
def modules():
    """Every module of the library by its dotted name."""
    found = {}
    for path in sorted((SOURCE / "paceline").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def parsed(source):
    return ast.parse(source)


def unit_of(module):
    """The part of the house a module belongs to; "" is the front door, paceline/__init__.py."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] == ["drivers"] else ".".join(parts[:1])


def imports(module, source, known, *, at_import_time_only=False):
    """The dotted names a source imports; names imported from a package count as modules where there is one."""
    found = set()
    is_package = any(other.startswith(f"{module}.") for other in known)

    def base_of(node):
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)

    def visit(node):
        if at_import_time_only and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = base_of(node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                ours = base.split(".")[0] == "paceline"
                found.add(full if full in known or not ours else base)
        elif (
            isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node) == "torch.distributed"
        ):
            found.add("torch.distributed")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not at_import_time_only:
            named = re.fullmatch(r"(paceline(\.\w+)+|torch\.distributed|asyncio|socket|ssl|grpc)(:\w+)?", node.value)
            if named and (named[1] in known or not named[1].startswith("paceline")):
                found.add(named[1])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(source))
    return found


def example_imports(module, source, known):
    """The dotted names that the examples in a source's docstrings import."""
    parser, found = doctest.DocTestParser(), set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for example in parser.get_examples(ast.get_docstring(node) or ""):
                try:
                    found |= imports(module, example.source, known, at_import_time_only=True)
                except SyntaxError:  # the example shows one
                    continue
    return found


def level_of(unit):
    return next((number for number, units in enumerate(LEVELS) if unit in units), None)


def begins_with(name, package):
    return name == package or name.startswith(f"{package}.")


def violations(sources):
    """Every broken rule, as a sentence."""
    broken = []
    for module, source in sources.items():
        unit = unit_of(module)
        if unit and level_of(unit) is None:
            broken.append(f"{module} is in no level of the house")
            continue
        for name in sorted(imports(module, source, set(sources))):
            if (module, name) not in SHOWN:
                broken += [f"{module} imports {name}: {why}" for why in _why_not(module, unit, name)]
        for name in sorted(example_imports(module, source, set(sources))):
            broken += [f"an example in {module} imports {name}: {why}" for why in _why_not_by_level(unit, name)]
    return broken


def _why_not(module, unit, name):
    for package, allowed in ONLY_IN.items():
        if begins_with(name, package) and unit not in allowed:
            yield f"{package} is only for {', '.join(sorted(allowed)) or 'nobody'}"
    if unit == "strategies" and name.split(".")[0] in NOT_IN_A_STRATEGY and module not in MAY_USE_TORCH:
        yield "a strategy reads no clock, draws nothing, opens nothing, logs nothing and touches no tensor"
    yield from _why_not_by_level(unit, name)


def _why_not_by_level(unit, name):
    if not begins_with(name, "paceline"):
        return
    other = unit_of(name)
    if unit in ("", other) or other == "":
        return
    if level_of(other) is None or level_of(other) <= level_of(unit):
        yield "imports go downwards only"
    elif other not in ONLY_THESE.get(unit, {other}):
        yield f"{unit} may import only {', '.join(sorted(ONLY_THESE[unit]))}"


def cycle(sources):
    """A ring of modules that import each other as they are loaded, or None."""
    graph = {
        module: {name for name in imports(module, source, set(sources), at_import_time_only=True) if name in sources}
        for module, source in sources.items()
    }
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        ring = next((ring for other in sorted(graph[module]) if (ring := visit(other))), None)
        path.pop()
        done.add(module)
        return ring

    return next((ring for module in sorted(graph) if (ring := visit(module))), None)


# -- the house ----------------------------------------------------------------------------------------------------

of_the_house = pytest.mark.xdist_group("house")  # every module is parsed once


@of_the_house
def test_imports_go_downwards_only():
    assert violations(modules()) == []


@of_the_house
def test_no_modules_import_each_other_in_a_ring():
    assert cycle(modules()) is None


def classes(sources):
    """Every class of the package: its name, the module it stands in, and the names of its bases."""
    for module, source in sources.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                yield node.name, module, [ast.unparse(base).split(".")[-1] for base in node.bases]


def names_taken_twice(sources):
    homes = {}
    for name, module, _ in classes(sources):
        homes.setdefault(name, []).append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def errors_of_their_own(sources):
    """Error classes that do not come from PacelineError, which catches whatever paceline raises on purpose.

    A private one is a signal inside its module and reaches nobody.
    """
    bases = {name: found for name, _, found in classes(sources)}

    def comes_from(name, wanted):
        return name == wanted or any(comes_from(base, wanted) for base in bases.get(name, ()))

    public = [name for name in bases if name.endswith("Error") and not name.startswith("_")]
    return [name for name in public if not comes_from(name, "PacelineError")]


@of_the_house
def test_no_class_name_is_taken_twice():
    assert names_taken_twice(modules()) == {}


@of_the_house
def test_every_error_is_a_paceline_error():
    assert errors_of_their_own(modules()) == []


def hooks_of_ddp(sources):
    """The modules whose functions DDP gets as communication hooks, and whether their annotations are texts."""
    texts = "from __future__ import annotations\n"
    called = re.compile(r"\b(model|dist)\._?register_comm_hook\(\w+(\.\w+)?, ")
    return {module: f"\n{texts}" in source for module, source in sources.items() if called.search(source)}


def test_the_annotations_of_a_hook_are_classes_with_which_ddp_compares_them():
    """It refuses a hook whose bucket is annotated with a text, as all annotations are with this import."""
    assert hooks_of_ddp(modules()) == {"paceline.drivers.ddp": False, "paceline.drivers.watching.buckets": False}


# -- the rules can be broken --------------------------------------------------------------------------------------

HOUSE = {
    "paceline": "",
    "paceline.cli": "from paceline import recipes",
    "paceline.recipes": "from paceline.drivers.simulated import cluster\nfrom paceline import reports, models",
    "paceline.reports": "from paceline.traces import Trace\nfrom paceline import lookup",
    "paceline.drivers.simulated": "",
    "paceline.drivers.simulated.cluster": "from paceline.strategies import full\nfrom . import delays",
    "paceline.drivers.simulated.delays": "import random, time, torch",
    "paceline.drivers.served": "import asyncio, socket, ssl",
    "paceline.drivers.averaging": "import torch.distributed as dist",
    "paceline.traces": "from paceline.events import Step\nimport paceline.data",
    "paceline.data": "",
    "paceline.models": "import torch",
    "paceline.strategies": "from paceline.strategies.full import Full",
    "paceline.strategies.full": "from paceline.events import Step",
    "paceline.strategies.combine": "import torch",
    "paceline.events": "",
    "paceline.lookup": "",
}


def test_a_house_in_order_breaks_no_rule():
    assert violations(HOUSE) == []
    assert cycle(HOUSE) is None


@pytest.mark.parametrize(
    ("module", "line", "because"),
    [
        ("paceline.events", "from paceline.strategies import Full", "downwards"),
        ("paceline.strategies.full", "from paceline.data import Samples", "downwards"),
        ("paceline.strategies.full", "import paceline.models", "downwards"),
        ("paceline.strategies.full", "from ..drivers.simulated.cluster import Cluster", "downwards"),
        ("paceline.strategies.full", "def later():\n    import time", "reads no clock"),
        ("paceline.strategies.full", "if TYPE_CHECKING:\n    import torch", "touches no tensor"),
        ("paceline.strategies.full", "from torch.nn import functional", "touches no tensor"),
        ("paceline.strategies", "import logging", "logs nothing"),
        ("paceline.strategies", "from random import random", "draws nothing"),
        ("paceline.strategies", "import socket", "socket is only for"),
        ("paceline.data", "def later():\n    from paceline import models", "downwards"),
        ("paceline.data", "where = 'paceline.models'", "downwards"),
        ("paceline.data", "where = 'paceline.models:build'", "downwards"),
        ("paceline.models", "import torch.distributed", "torch.distributed is only for"),
        ("paceline.models", "from torch import distributed", "torch.distributed is only for"),
        ("paceline.models", "from torch.distributed.pipelining import Pipe", "torch.distributed is only for"),
        ("paceline.models", "import torch\ntorch.distributed.barrier()", "torch.distributed is only for"),
        ("paceline.models", "import_module('torch.distributed')", "torch.distributed is only for"),
        ("paceline.drivers.simulated", "import socket", "socket is only for drivers.served"),
        ("paceline.drivers.simulated", "from asyncio import sleep", "asyncio is only for drivers.served, live, runs"),
        ("paceline.traces", "import ssl", "ssl is only for drivers.served"),
        ("paceline.drivers.served", "import grpc", "grpc is only for nobody"),
        ("paceline.drivers.simulated", "from paceline.drivers import served", "downwards"),
        ("paceline.drivers.simulated", "import paceline.reports", "downwards"),
        ("paceline.reports", "from paceline.models import MODELS", "reports may import only"),
        ("paceline.reports", "import paceline.drivers.simulated.cluster", "downwards"),
        ("paceline.traces", "import paceline.recipes", "downwards"),
        ("paceline.recipes", "import paceline.cli", "downwards"),
        ("paceline.shed", "", "in no level"),
        ("paceline.data", '"""Text.\n\n>>> from paceline.models import build\n"""', "an example in paceline.data"),
        ("paceline.data", 'def f():\n    """Text.\n\n    >>> import paceline.recipes\n    """', "an example in"),
    ],
)
def test_a_broken_rule_is_found(module, line, because):
    broken = violations(HOUSE | {module: f"{HOUSE.get(module, '')}\n{line}"})
    assert len(broken) == 1, broken
    assert because in broken[0]


@pytest.mark.parametrize(
    ("extra", "ring"),
    [
        ({"paceline.data.a": "from paceline.data import b", "paceline.data.b": "import paceline.data.a"}, "a b a"),
        ({"paceline.data.a": "from . import b", "paceline.data.b": "from paceline.data.a import x"}, "a b a"),
        ({"paceline.data.a": "def f():\n    from . import b", "paceline.data.b": "from . import a"}, None),
        ({"paceline.data.a": "if TYPE_CHECKING:\n    from . import b", "paceline.data.b": "from . import a"}, None),
    ],
    ids=["names", "relative", "in a function", "for types only"],
)
def test_a_ring_is_found_where_it_bites(extra, ring):
    found = cycle(HOUSE | extra)
    assert (found and " ".join(name.split(".")[-1] for name in found)) == ring


def test_a_name_taken_twice_and_an_error_of_its_own_are_found():
    twice = HOUSE | {"paceline.data.a": "class Plan: ...", "paceline.models": "class Plan: ..."}
    assert names_taken_twice(twice) == {"Plan": ["paceline.models", "paceline.data.a"]}
    errors = "class BaseError(PacelineError, ValueError): ...\nclass NextError(BaseError): ..."
    sources = {"paceline.errors": "class PacelineError(Exception): ...", "paceline.data": errors}
    assert errors_of_their_own(sources) == []
    assert errors_of_their_own(sources | {"paceline.models": "class LoneError(ValueError): ..."}) == ["LoneError"]
