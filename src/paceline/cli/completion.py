"""Shell completion, as a script that knows all commands, options and choices: a key press starts no Python.

    eval "$(paceline --print-completion bash)"        in ~/.bashrc, or zsh in ~/.zshrc

zsh runs the function for bash, by its own `bashcompinit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.cli.options import Option, UsageError
from paceline.lookup import unknown

SHELLS = ("bash", "zsh")
FOR_ZSH = "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"


def completion_script(
    shell: str,
    commands: Mapping[str, Sequence[Option]],
    *,
    first: Sequence[str] = (),
    values: Mapping[str, Iterable[str]] | None = None,
) -> str:
    """Return the script for a shell; `commands` are all of them with their options, `first` what else may come first.

    `values` are words that may follow an option whose value is not only one of a few.

    >>> completion_script("fish", {})
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unknown shell 'fish'; choose from bash, zsh
    """
    if not shell:
        raise UsageError(f"--print-completion needs a value: {' or '.join(SHELLS)}")
    if shell not in SHELLS:
        raise UsageError(str(unknown("shell", shell, SHELLS)))
    groups: dict[str, list[str]] = {}
    for name in commands:
        group, _, member = name.partition(" ")
        groups.setdefault(group, []).extend([member] if member else [])
    both = "|".join(group for group, members in groups.items() if members)
    shared = [option for option in _largest(commands) if option.of_recipe]
    words = _choices(commands) | {flag: [*found] for flag, found in (values or {}).items()}
    lines = [
        "_paceline() {",
        "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=''",
        f"  local recipe='{_flags(shared)}'",
        f'  case $command in {both}) (( COMP_CWORD > 2 )) && command="$command ${{COMP_WORDS[2]}}";; esac',
        "  if (( COMP_CWORD == 1 )); then",
        f"    words='{' '.join([*groups, *first])}'",
        *_members({group: members for group, members in groups.items() if members}),
        "  elif [[ ${COMP_WORDS[1]} == help ]]; then",
        f"    (( COMP_CWORD == 2 )) && words='{' '.join(groups)}'",
        *(
            f"    [[ ${{COMP_WORDS[2]}} == {group} ]] && (( COMP_CWORD == 3 )) && words='{' '.join(members)}'"
            for group, members in groups.items()
            if members
        ),
        "  elif [[ ${COMP_WORDS[1]} == --print-completion ]]; then",
        f"    words='{' '.join(SHELLS)}'",
        "  elif [[ $word == -* ]]; then",
        '    case "$command" in',
        *(f'      "{name}") words="{_words(options)}";;' for name, options in commands.items()),
        "    esac",
        "  else",
        '    case "$before" in',
        *(f"      {flag}) words='{' '.join(choices)}';;" for flag, choices in words.items()),
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _paceline paceline",  # without a match: names of files
    ]
    return (FOR_ZSH if shell == "zsh" else "") + "\n".join(lines)


def _members(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines that complete the second word of a command."""
    lines = []
    for group, members in groups.items():
        lines.append(f"  elif (( COMP_CWORD == 2 )) && [[ $command == {group} && $word != -* ]]; then")
        lines.append(f"    words='{' '.join(members)}'")
    return lines


def _words(options: Sequence[Option]) -> str:
    own = [option for option in options if not option.of_recipe]
    recipe = " $recipe" if len(own) < len(options) else ""
    return f"{_flags(own)} --help --help-all{recipe}"


def _flags(options: Sequence[Option]) -> str:
    return " ".join(flag for option in options if not option.spelling.positional for flag in option.flags)


def _largest(commands: Mapping[str, Sequence[Option]]) -> Sequence[Option]:
    return max(commands.values(), key=len, default=())


def _choices(commands: Mapping[str, Sequence[Option]]) -> dict[str, list[str]]:
    """Return the choices of every option that has some, whichever command it is of."""
    found: dict[str, list[str]] = {}
    for options in commands.values():
        for option in options:
            for flag in option.flags if option.choices and not option.spelling.positional else ():
                found[flag] = [*dict.fromkeys([*found.get(flag, []), *option.choices])]
    return found
