"""Shell completion, as bash runs it: commands, options and choices."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from paceline.cli import main
from paceline.cli.main import COMMANDS
from paceline.strategies import STRATEGIES
from paceline.strategies.averaging import AVERAGING

WORDS = {
    "ra": ["race"],
    "plan p": ["pipeline", "pruning"],
    "race --strategies lgc --seed": ["--seeds", "--seed"],
    "train --strategy l": ["lgc", "local-sgd"],
    "train --inject-delays f": ["false"],
    "plan pruning --polic": ["--policy"],
    "plan pipeline --schedule zero": ["zero-bubble"],
    "train --model resnet5": ["resnet50"],
    "race --strategies as": ["async"],
    "help ra": ["race"],
    "help plan pr": ["pruning"],
    "--print-completion z": ["zsh"],
    "work --rounds": [],  # no option of this command
    "race my": [],  # a recipe: the shell completes names of files
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_choices(tmp_path, capsys) -> None:
    assert main(["--print-completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    every = {f"{name} --": None for name in COMMANDS} | {"race --stra": None, "train --strategy ": None} | WORDS
    complete = 'COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=(); _paceline; echo "${COMPREPLY[*]}"'
    quoted = {typed: f"{typed}''" if typed.endswith(" ") else typed for typed in every}
    calls = "\n".join(f"COMP_WORDS=(paceline {quoted[typed]}); {complete}" for typed in every)
    done = subprocess.run(
        ["bash", "--norc", "-uc", f"source {script}\n{calls}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(zip(every, (line.split() for line in done.stdout.splitlines()), strict=True))
    assert {typed: found[typed] for typed in WORDS} == WORDS
    assert "--strategy" in found["race --stra"]
    assert found["train --strategy "] == [*STRATEGIES, *AVERAGING]
    for name, command in COMMANDS.items():
        flags = {flag for option in command.table if not option.spelling.positional for flag in option.flags}
        assert set(found[f"{name} --"]) == flags | {"--help", "--help-all"}


def test_the_script_for_zsh_is_that_for_bash_with_its_emulation(capsys) -> None:
    assert main(["--print-completion", "bash"]) == 0
    bash = capsys.readouterr().out
    assert main(["--print-completion=zsh"]) == 0
    zsh = capsys.readouterr().out
    assert zsh.endswith(bash)
    assert "bashcompinit" in zsh


@pytest.mark.parametrize(
    ("shell", "said"), [(["fish"], "unknown shell 'fish'; choose from bash, zsh"), ([], "bash or zsh")]
)
def test_another_shell_is_refused(shell, said, capsys) -> None:
    assert main(["--print-completion", *shell]) == 2
    assert said in capsys.readouterr().err
