"""The public names: what `dir` shows, what signatures say, and old names that still work."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from typing import get_type_hints

import pytest

import paceline
from paceline.recipes.recipe import RecipeChanges

PACKAGES = ("averaging", "cluster", "codecs", "data", "loggers", "optim", "pipeline", "recipes", "reports")
FRAMEWORKS = ("huggingface", "lightning", "ray")  # extras: tests/integrations looks into them


def public_names():
    """Every public name with its value, of paceline and of its sub-packages."""
    for package in (paceline, *(importlib.import_module(f"paceline.{name}") for name in PACKAGES)):
        for name in package.__all__:
            yield f"{package.__name__}.{name}".removeprefix("paceline."), getattr(package, name)


def public_callables():
    """Every public function, class and public method of a public class, by name."""
    for name, value in public_names():
        if not callable(value):
            continue
        yield name, value
        if inspect.isclass(value):
            for inner, method in inspect.getmembers(value, inspect.isfunction):
                if not inner.startswith("_"):
                    yield f"{name}.{inner}", method


def parameters_of(call):
    try:
        return inspect.signature(call).parameters
    except ValueError:  # a builtin's, such as that of an exception
        return {}


def open_keywords(call):
    """The **parameters of a call that say nothing of what may be given."""
    parameters = parameters_of(call).values()
    return [each.name for each in parameters if each.kind is each.VAR_KEYWORD and each.annotation in ("Any", "object")]


def test_dir_shows_the_public_names_and_nothing_else():
    assert set(dir(paceline)) == {*paceline.__all__, *PACKAGES, *FRAMEWORKS, "__version__"}
    for name in PACKAGES:
        package = getattr(paceline, name)
        assert sorted(package.__all__) == dir(package)
        assert all(getattr(package, each) is not None for each in dir(package))
    with pytest.raises(AttributeError, match=r"module 'paceline\.cluster' has no attribute 'serv'"):
        paceline.cluster.serv  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'Limits'; it is paceline\.cluster\.Limits$"):
        paceline.Limits  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'paceline' has no attribute 'limits'$"):
        paceline.limits  # noqa: B018


def test_a_name_means_the_same_wherever_it_stands():
    found = {}
    for name, value in public_names():
        found.setdefault(name.rpartition(".")[2], set()).add(id(value))
    assert {name for name, values in found.items() if len(values) > 1} == set()
    listed = {name.rpartition(".")[2] for name, _ in public_names() if "." in name}
    of_no_package = {"PacelineError", "Race", "Result", "pruning_page", "simulate"}
    assert set(paceline.__all__) - listed == of_no_package


def test_looking_around_loads_no_torch():
    program = (
        f"import sys, paceline; [dir(getattr(paceline, name)) for name in {PACKAGES}]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_public_callable_names_its_keywords():
    found = {name: open_keywords(call) for name, call in public_callables()}
    assert {name: kinds for name, kinds in found.items() if kinds} == {"codecs.make_codec": ["settings"]}  # by its name
    fields = {field.name for field in dataclasses.fields(paceline.Recipe)}
    assert get_type_hints(RecipeChanges).keys() == fields  # what Recipe.with_settings takes
    assert open_keywords(lambda **settings: settings) == []
    assert "process_group" in inspect.signature(paceline.HPSGD).parameters


def test_whatever_takes_a_group_calls_it_process_group():
    groups = {
        name: [each for each in parameters_of(call) if each.endswith("group") and each != "param_group"]
        for name, call in public_callables()
    }
    names = {"FinePruning", "InfoBatch", "data.FinePruning", "data.InfoBatch"}
    old = {name: ["process_group", "group"] for name in names}
    assert {name: found for name, found in groups.items() if found not in ([], ["process_group"])} == old
    assert {"compress", "plan_pipeline", "Pipeline", "LGCSync", "DiLoCo"} <= {name for name in groups if groups[name]}


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: paceline.FinePruning(8, batch_size=4, **more),
        lambda **more: paceline.InfoBatch(8, batch_size=4, epochs=8, **more),
    ],
)
def test_group_is_the_old_name_of_process_group(make):
    group = object()
    with pytest.warns(DeprecationWarning, match="group is called process_group now") as warned:
        assert make(group=group)._find_ranks.group is group
    assert warned[0].filename == __file__
    assert make(process_group=group)._find_ranks.group is group
    with pytest.raises(TypeError, match="give process_group alone"):
        make(group=group, process_group=group)


def test_training_is_the_old_name_of_a_workers_running(monkeypatch):
    monkeypatch.setattr(paceline.Worker, "running", lambda worker: "it is")
    with pytest.warns(DeprecationWarning, match=r"Worker\.training is called running now"):
        assert object.__new__(paceline.Worker).training() == "it is"
