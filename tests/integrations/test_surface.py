"""The public names of what stands inside frameworks: listed, documented, and found with `import paceline` alone."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import paceline

FRAMEWORKS = ("huggingface", "lightning", "ray")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_public_names_are_there_and_say_what_they_are(framework):
    package = getattr(paceline, framework)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert inspect.getdoc(getattr(package, name)), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_parameter_of_a_public_function_has_a_name_and_a_type(framework):
    package = getattr(paceline, framework)
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isfunction(value):
            parameters = inspect.signature(value).parameters.values()
            assert [each.name for each in parameters if each.kind is each.VAR_KEYWORD] == [], name
            assert [each.name for each in parameters if each.annotation is each.empty] == [], name


def test_no_framework_is_imported_before_it_is_used():
    frameworks = ("torch", "transformers", "accelerate", "lightning", "ray", "tensorboard", "wandb", "mlflow")
    program = (
        f"import sys, paceline, paceline.cli.main; dir(paceline); print([n for n in {frameworks} if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(("framework", "module"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_an_extra_that_is_not_installed_is_named(framework, module):
    hide = "import importlib.util, sys; found = importlib.util.find_spec; "
    hide += f"importlib.util.find_spec = lambda name, *more: None if name == {module!r} else found(name, *more); "
    program = hide + f"import paceline; paceline.{framework}"
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert f"paceline.{framework} needs {module}: pip install 'paceline[{framework}]'" in ended.stderr
