"""SECURITY.md promises what tests hold: each promise names tests that are there, and nothing unpickles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
OWN_PIPES = {"runs/launch.py": 2}  # what a process and the ranks that it has forked say to each other
READERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}


def promises(text: str) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if not row.startswith("| promise |")]


def missing_tests(text: str) -> list[str]:
    """Return the promises that name no test, and the tests that are named and not there."""
    wrong = [row for row in promises(text) if not TEST.search(row)]
    for file, name in TEST.findall(text):
        path = PROJECT / file
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
        if name not in {part.name for part in body if isinstance(part, ast.FunctionDef)}:
            wrong.append(f"{file}::{name}")
    return wrong


def test_every_promise_names_tests_that_are_there():
    text = (PROJECT / "SECURITY.md").read_text(encoding="utf-8")
    assert len(promises(text)) > 15
    assert missing_tests(text) == []


def test_a_promise_without_a_test_is_found():
    here = "tests/release/test_security_promises.py"
    text = f"| promise | test |\n|---|---|\n| kept | `{here}::test_a_promise_without_a_test_is_found` |\n"
    assert missing_tests(text) == []
    assert missing_tests(f"{text}| broken | trust us |\n") == ["| broken | trust us |"]
    assert missing_tests(f"{text}| gone | `{here}::test_gone` |\n") == [f"{here}::test_gone"]


def unpicklings(code: str) -> list[str]:
    """Return the calls in a module that could run what they read."""
    found = []
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        module, _, function = name.rpartition(".")
        if (
            (module in READERS and (function.startswith(("load", "safe_load", "open")) or function == "Unpickler"))
            or name in {"Unpickler", "eval", "exec", "builtins.eval", "builtins.exec"}
            or (name.endswith("torch.load") and given.get("weights_only") != "True")
            or ("allow_pickle" in given and given["allow_pickle"] != "False")
            or function in {"recv_pickle", "read_pickle", "broadcast_object_list", "all_gather_object", "gather_object"}
        ):
            found.append(name)
    return found


def test_nothing_from_outside_is_unpickled():
    source = PROJECT / "src" / "paceline"
    found = {path.relative_to(source).as_posix(): unpicklings(path.read_text("utf-8")) for path in source.rglob("*.py")}
    assert {name: len(calls) for name, calls in found.items() if calls} == OWN_PIPES


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(data)",
        "pickle.Unpickler(file).load()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "torch.distributed.broadcast_object_list(things)",
        "eval(text)",
    ],
)
def test_an_unpickling_is_found(line):
    assert unpicklings(line)
    assert not unpicklings("torch.load(path, weights_only=True); numpy.load(path); json.loads(text); model.eval()")
