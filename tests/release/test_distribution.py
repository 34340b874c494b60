"""The wheel and the sdist hold what they must, and what is installed from them works where nothing of the tree is."""

from __future__ import annotations

import ast
import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import paceline
from paceline.drivers.pipelining import torch_internals

PROJECT = Path(__file__).parents[2]
VERSION = paceline.__version__
NOT_SHIPPED = re.compile(r"__pycache__|\.pyc$|\.venv|_cache/|\.egg-info|\.hypothesis|^runs/|^dist/|^site/")
SECONDS = 300

pytestmark = [pytest.mark.xdist_group("distribution"), pytest.mark.slow]


def build(source: Path, out: Path) -> Path:
    """Build a tree's wheel and sdist, as `make dist` does; return the folder with both."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=SECONDS)
    assert built.returncode == 0, built.stderr
    return out


def in_wheel(folder: Path) -> dict[str, bytes]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def in_sdist(folder: Path) -> dict[str, bytes]:
    """Return the files of an sdist, by their names below its one folder."""
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        files = [member for member in opened.getmembers() if member.isfile()]
        return {member.name.split("/", 1)[1]: opened.extractfile(member).read() for member in files}


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    return build(PROJECT, tmp_path_factory.mktemp("dist"))


def test_one_version_everywhere(dist):
    assert {file.name for file in dist.iterdir()} == {
        f"paceline-{VERSION}-py3-none-any.whl",
        f"paceline-{VERSION}.tar.gz",
    }
    changelog = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.search(r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert released.group(1) == VERSION
    citation = (PROJECT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {VERSION}\n" in citation
    assert f"\ndate-released: {released.group(2)}\n" in citation


def test_the_sdist_has_what_it_takes_to_build_and_test(dist):
    files = in_sdist(dist)
    assert [name for name in files if NOT_SHIPPED.search(name)] == []
    assert max(map(len, files.values())) < 1_000_000  # no data set
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    if tracked.returncode == 0:
        present = [name for name in tracked.stdout.split("\0") if name and (PROJECT / name).is_file()]
        assert [name for name in present if name not in files] == []
    for name, content in files.items():
        if name != "PKG-INFO":
            assert content == (PROJECT / name).read_bytes(), name


def test_the_wheel_has_every_module_and_all_data(dist):
    files, source = in_wheel(dist), PROJECT / "src"
    ours = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    ours = {name for name in ours if not NOT_SHIPPED.search(name)}
    assert {name for name in files if name.startswith("paceline/")} == ours
    assert {"paceline/py.typed", "paceline/reports/assets/page.js"} <= ours
    about = f"paceline-{VERSION}.dist-info"
    licences = {f"{about}/licenses/LICENSE", f"{about}/licenses/src/paceline/reports/assets/plotly-LICENSE.txt"}
    rest = {f"{about}/METADATA", f"{about}/WHEEL", f"{about}/RECORD", f"{about}/entry_points.txt"}
    assert set(files) - ours == licences | rest
    assert "paceline = paceline.cli:main" in files[f"{about}/entry_points.txt"].decode()


def test_the_metadata_say_what_pyproject_says(dist):
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = email.message_from_bytes(in_wheel(dist)[f"paceline-{VERSION}.dist-info/METADATA"])
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == project["license"]
    assert metadata["Requires-Python"] == project["requires-python"]
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {name_of(line) for line in needed} == {name_of(line) for line in project["dependencies"]}
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True).decode()
    assert text == (PROJECT / "README.md").read_text(encoding="utf-8")


TORCH = ">=2.13,<2.14"


def test_pip_takes_a_torch_that_was_tested(dist):
    """Parts use what torch does not promise: a release that nobody tried is refused, and pages say which one it is."""
    metadata = email.message_from_bytes(in_wheel(dist)[f"paceline-{VERSION}.dist-info/METADATA"])
    (asked,) = [line for line in metadata.get_all("Requires-Dist") if name_of(line) == "torch"]
    allowed = SpecifierSet(TORCH)
    assert SpecifierSet(asked.removeprefix("torch")) == allowed
    pinned = re.search(r"^torch==(.+)$", (PROJECT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned.group(1) in allowed
    assert torch_internals.TRIED in allowed
    assert f"`torch{TORCH}`" in (PROJECT / "README.md").read_text(encoding="utf-8")


def name_of(requirement: str) -> str:
    """Return the name of a requirement as PyPI compares it: "Scikit_Learn>=1.4" is scikit-learn."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def imported_by(source: str, *, lazily: bool = False) -> set[str]:
    """Return the packages that a module imports, by the names of their imports, those for types alone left out.

    With `lazily=True` those that it imports only when a function is called.
    """
    found, at_once, nodes = set(), set(), [(node, False) for node in ast.parse(source).body]
    for node, inside in nodes:
        if isinstance(node, ast.Import):
            names = {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {node.module}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            names, node = set(), ast.Module(node.orelse, [])
        else:
            names = set()
        (found if inside else at_once).update(name.split(".")[0] for name in names)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        nodes += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found - at_once if lazily else found | at_once


def test_whatever_is_imported_is_a_dependency():
    """The environment of the tests below has all packages of this one, and would not miss a dependency."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed, extras = {name_of(line) for line in project["dependencies"]}, project["optional-dependencies"]
    provided, source, missing = packages_distributions(), PROJECT / "src/paceline", {}
    of_extras = {name_of(line) for lines in extras.values() for line in lines}
    for path in source.rglob("*.py"):
        place = path.relative_to(source)
        if place.parts[0] in extras:  # paceline.huggingface, of the extra with this name, ...
            continue
        text = path.read_text(encoding="utf-8")
        for name in imported_by(text) - sys.stdlib_module_names - {"paceline"}:
            fine = needed & {name_of(each) for each in provided.get(name, ())}
            if not fine and not (name in of_extras and name in imported_by(text, lazily=True)):
                missing.setdefault(name, []).append(place.as_posix())
    assert missing == {}


def test_imports_are_found_wherever_they_stand():
    text = """
import a.b, sys
from c.d import e
if TYPE_CHECKING:
    import for_types
else:
    import f
try:
    from . import beside
    import g
except ImportError:
    pass
def lazy():
    import h
    import a
"""
    assert imported_by(text) == {"a", "sys", "c", "f", "g", "h"}
    assert imported_by(text, lazily=True) == {"h"}
    assert name_of("Scikit_Learn>=1.4") == name_of("scikit-learn") == "scikit-learn"


def test_the_wheel_built_from_the_sdist_is_the_same(dist, tmp_path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path, filter="data")
    again = build(tmp_path / f"paceline-{VERSION}", tmp_path / "again")
    first, second = in_wheel(dist), in_wheel(again)
    assert list(first) == list(second)
    assert [name for name in first if first[name] != second[name]] == []


# -- installed --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(dist, tmp_path_factory) -> Path:
    """Make an environment that has paceline from its wheel, and else what this one has; return its folder of commands.

    A line of a .pth file puts this environment's packages on the path and runs none of its .pth files: so the editable
    paceline that is here is not there.
    """
    folder = tmp_path_factory.mktemp("environment") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=SECONDS)
    (packages,) = folder.glob("lib/python*/site-packages")
    paths = sysconfig.get_paths()
    lines = dict.fromkeys([paths["purelib"], paths["platlib"]])
    (packages / "dependencies.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(environment: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment elsewhere, without a path of the tree."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(environment / command[0]), *command[1:]]
    return subprocess.run(words, cwd=cwd, env=inherited, capture_output=True, text=True, timeout=SECONDS)


def test_the_command_is_there(environment, tmp_path):
    done = run(environment, "paceline", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"paceline {VERSION}\n"), done.stderr


USE = """
import paceline
from paceline.cli import main

assert main(["race", "--rounds", "20", "--out", "raced"]) == 0
result = paceline.simulate(paceline.Recipe(rounds=20))
print("found", paceline.__file__, result.rounds, result.loss < 2)
"""


def test_a_script_and_a_race_run_on_what_was_installed(environment, tmp_path):
    done = run(environment, "python", "-c", USE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fastest-k" in done.stdout
    _, file, *rest = done.stdout.splitlines()[-1].split()
    assert Path(file).is_relative_to(environment.parent)
    assert rest == ["20", "True"]
    page = (tmp_path / "raced" / "report.html").read_text(encoding="utf-8")
    assert "plotly" in page
    assert len(page) > 300_000  # the charts' code is in it


TYPED = """
import paceline

result = paceline.simulate(paceline.Recipe(rounds=20))
loss: str = result.rounds
strategy = paceline.LGC(k=7)
paceline.Recipe(rounds="twenty")
paceline.LGC(kay=7)
"""


def test_types_are_checked_in_a_users_script(environment, tmp_path):
    (tmp_path / "mine.py").write_text(TYPED, encoding="utf-8")
    # torch's own types take a minute, and are not what is asked here
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,numpy.*,sklearn.*,numba.*,constriction.*,scipy.*]\n"
        "follow_imports = skip\nignore_missing_imports = true\n",
        encoding="utf-8",
    )
    options = ["--python-executable", str(environment / "python"), "--cache-dir", str(tmp_path / "cache")]
    done = run(environment, "python", "-m", "mypy", *options, "mine.py", cwd=tmp_path)
    wrong = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if line.startswith("mine.py:")}
    lines = TYPED.splitlines()
    assert [lines[number - 1].split("(")[0] for number in sorted(wrong) if ": error:" in wrong[number]] == [
        "loss: str = result.rounds",
        "paceline.Recipe",
        "paceline.LGC",
    ], done.stdout + done.stderr
