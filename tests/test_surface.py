"""The public names: what `dir` shows, what signatures say, and old names that still work."""

from __future__ import annotations

import inspect

import pytest

import paceline


def public_callables():
    """Every public function, class and public method of a public class, by name."""
    for name in paceline.__all__:
        value = getattr(paceline, name)
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


def test_every_public_callable_names_its_keywords():
    found = {name: open_keywords(call) for name, call in public_callables()}
    found.pop("Recipe.with_settings")  # its keywords are the recipe's fields, checked by name
    assert {name: kinds for name, kinds in found.items() if kinds} == {}
    assert open_keywords(lambda **settings: settings) == []
    assert "process_group" in inspect.signature(paceline.HPSGD).parameters


def test_whatever_takes_a_group_calls_it_process_group():
    groups = {
        name: [each for each in parameters_of(call) if each.endswith("group") and each != "param_group"]
        for name, call in public_callables()
    }
    old = {"FinePruning": ["process_group", "group"], "InfoBatch": ["process_group", "group"]}
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
