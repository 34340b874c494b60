"""Command-line options as one table: those of a command, and one for every setting of a recipe.

    class RaceOptions:                                                  command line
        seeds: int = option(1, "how many seeds")                        --seeds INT
    Recipe.strategy.k: int = setting(7, "...", alias="k")               --k INT, --strategy.k INT

Parsing, help and shell completion all read the same table. Recipe options arrive as text and are converted and checked
where those of a file are (`paceline.recipes.reading`), so that a bad value is refused in the same words wherever it was
written. What is true or false is a flag: `--timing-only`; those of a recipe may have a value too (`--inject-delays
false`), or a `--no-` in front.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.decoding import describe
from paceline.errors import PacelineError, warn
from paceline.quantities import unit_examples, with_unit
from paceline.recipes import Recipe, read_recipe
from paceline.recipes.reading import RecipeError
from paceline.renaming import RENAMED_SETTINGS
from paceline.settings import Rule, convert
from paceline.strategies import STRATEGIES, bare_name
from paceline.strategies.averaging import AVERAGING

Command = TypeVar("Command")
NUMBER_BELOW_ZERO = re.compile(r"-\.?\d")


class UsageError(PacelineError, ValueError):
    """A command line that cannot be understood or carried out.

    >>> raise UsageError("unknown option --rouds")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unknown option --rouds
    """


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How an option of a command is written: its placeholder, what the help shows as default, and other names.

    `old` are names of before, which still work with a warning; a plain number that follows one gets the unit with it.
    An option that may stand `alone` has that value then; only a number that follows is its value.
    """

    metavar: str = ""
    shown: str | None = None
    positional: bool = False
    common: bool = True
    also: tuple[str, ...] = ()
    old: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alone: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """One option of a command line: a field of a command's dataclass, or a setting of a recipe."""

    path: tuple[str, ...]
    hint: Any
    default: Any
    rule: Rule
    spelling: Spelling = Spelling()
    of_recipe: bool = False

    @property
    def name(self) -> str:
        """The field's name, or the recipe's dotted name.

        >>> next(option for option in recipe_options() if option.path == ("strategy", "k")).name
        'strategy.k'
        """
        return ".".join(self.path)

    @property
    def flags(self) -> list[str]:
        """All spellings: the option's own name, and then its short form where it has one.

        >>> next(option for option in recipe_options() if option.path == ("strategy", "k")).flags
        ['--strategy.k', '--k']
        """
        names = [self.name.replace("_", "-"), *([self.rule.alias] if self.rule.alias else []), *self.spelling.also]
        return [f"--{name}" for name in dict.fromkeys(names)]

    @property
    def is_flag(self) -> bool:
        """Whether the option stands for `true` where no value follows it."""
        return self.hint is bool or bool in get_args(self.hint)

    @property
    def choices(self) -> list[str]:
        """The words that the value may be, if there is a list of them."""
        listed = list(self.rule.choices()) if self.rule.choices else []
        return ["true", "false", *listed] if self.is_flag and self.of_recipe else listed

    @property
    def metavar(self) -> str:
        """The placeholder of the value in the help."""
        if self.spelling.metavar:
            return self.spelling.metavar
        return "NAME" if self.rule.choices and self.hint is str else _metavar(self.hint)


RECIPE_FILE = "a recipe (TOML); without one, the default"


def option(default: Any, help: str, **details: Any) -> Any:
    """Declare an option of a command: a field with its rule and its spelling.

    >>> @dataclass(frozen=True)
    ... class Example:
    ...     seeds: int = option(1, "how many seeds", common=False)
    >>> Example().seeds
    1
    """
    names = {field.name for field in dataclasses.fields(Spelling)}
    spelling = Spelling(**{name: value for name, value in details.items() if name in names})
    rule = Rule(help=help, **{name: value for name, value in details.items() if name not in names})
    return dataclasses.field(default=default, metadata={"rule": rule, "spelling": spelling})


def argument(metavar: str, help: str, *, default: Any = MISSING) -> Any:
    """Declare an argument that has a place and no name."""
    return option(default, help, metavar=metavar, positional=True)


def json_option() -> Any:
    """Declare the `--json` that every command has."""
    return option(False, "print one JSON document to stdout, and nothing else there")


def debug_option() -> Any:
    """Declare the `--debug` that every command has."""
    return option(False, "show the traceback of an error")


def out_option(files: str, folder: str) -> Any:
    """Declare the `--out` of a command that writes files into a folder."""
    return option("", f"folder for {files}", metavar="FOLDER", shown=f"{folder}, or the next that is free")


def code_option(what: str, setting: str) -> Any:
    """Declare an option for code of a user's own where no recipe is typed: a server and a run's folder name none."""
    kind = "function" if what == "loss" else "factory"
    return option("", f"the {what} as module:{kind}, if it is your own: it is never named for you", also=(setting,))


def trust_option() -> Any:
    """Declare that code which the recipe's file names may run."""
    help_text = "run code that the recipe's file names (module:name); without it, name it here: --model, ..."
    return option(False, help_text, common=False)


def data_directory_option() -> Any:
    """Declare the folder of data where no recipe is typed: a server and a run's folder name no path."""
    help_text = "folder with the data set's files, if it is one of yours: it is never named for you"
    return option("", help_text, metavar="FOLDER", also=("data.directory",))


def resume_option() -> Any:
    """Declare the run that a command goes on with."""
    return option(
        "",
        "go on with the run in this folder, from its newest checkpoint; a folder names no code and no paths, so give "
        "--model, --data, --loss, --data-directory and --delay-file again if the run has its own",
        metavar="FOLDER",
    )


def log_option() -> Any:
    """Declare where the figures of a run go beside its folder."""
    help_text = "where figures go as rounds are done: tensorboard (in the run's folder), or module:function of your own"
    return option("", help_text, metavar="NAME")


def recipe_options() -> Iterator[Option]:
    """Yield every setting of a recipe.

    >>> len(list(recipe_options())) > 30
    True
    """
    hints = get_type_hints(Recipe)
    for field in dataclasses.fields(Recipe):
        kind = hints[field.name]
        of_one: list[tuple[tuple[str, ...], dataclasses.Field[Any], Any]] = [((field.name,), field, kind)]
        if dataclasses.is_dataclass(kind):
            inner = get_type_hints(kind)
            of_one = [((field.name, each.name), each, inner[each.name]) for each in dataclasses.fields(kind)]
        for path, each, hint in of_one:
            old = {f"--{'.'.join(was)}": "" for was, now in RENAMED_SETTINGS.items() if now == path}
            yield Option(
                path=path,
                hint=hint,
                default=each.default,
                rule=each.metadata["rule"],
                spelling=Spelling(old=old),
                of_recipe=True,
            )


def options_of(command: Any, *, with_recipe: bool) -> tuple[Option, ...]:
    """Return all options of a command, its own first."""
    hints = get_type_hints(command)
    own = [
        Option(
            path=(field.name,),
            hint=_without_none(hints[field.name]),
            default=field.default,
            rule=field.metadata.get("rule", Rule(help="")),
            spelling=field.metadata.get("spelling", Spelling()),
        )
        for field in dataclasses.fields(command)
    ]
    taken = {each.name.replace("_", "-") for each in own}
    return (*own, *(_unless_taken(each, taken) for each in (recipe_options() if with_recipe else ())))


def _unless_taken(option: Option, taken: Collection[str]) -> Option:
    """Return a setting of a recipe without its short form where the command has an option of that name."""
    if option.rule.alias not in taken:
        return option
    return dataclasses.replace(option, rule=dataclasses.replace(option.rule, alias=""))


def _without_none(hint: Any) -> Any:
    """Return the type of what can be typed: an option that is None unless it is given is not given as `none`."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    return Union[tuple(part for part in get_args(hint) if part is not type(None))]  # noqa: UP007 - made of values


def _metavar(hint: Any) -> str:
    """Return the placeholder of a value in the help.

    >>> from typing import Literal
    >>> _metavar(int | Literal["auto"]), _metavar(tuple[float, ...]), _metavar(bool)
    ('INT|auto', 'LIST', 'true|false')
    """
    meaning = describe(hint)
    if meaning.startswith("a list"):
        return "LIST"
    for words, short in (("a whole number", "INT"), ("a number", "NUMBER"), ("text", "TEXT"), (" or ", "|")):
        meaning = meaning.replace(words, short)
    return meaning.replace("'", "")


# -- what was typed ----------------------------------------------------------------------------------------------------


def given_recipe(file: str, overrides: dict[str, str], *, trust: bool = False) -> Recipe:
    """Return the recipe of a file, or the default one, with the settings that were typed."""
    refuse_strategies(file, "--strategy")
    return read_recipe(Path(file) if file else None, overrides, trust=trust)


def refuse_strategies(file: str, flag: str) -> None:
    """Refuse names of strategies in the place of a recipe's file, and say where they belong.

    >>> refuse_strategies("full,lgc", "--strategies")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: there is no recipe 'full,lgc'; for a strategy give --strategies full,lgc
    """
    if all(map(_is_strategy, file.split(","))) and not Path(file).exists():
        raise UsageError(f"there is no recipe {file!r}; for a strategy give {flag} {file}")


def _is_strategy(word: str) -> bool:
    return bare_name(word) in (*STRATEGIES, *AVERAGING)


def parse(
    command: type[Command], arguments: Sequence[str], *, with_recipe: bool = True
) -> tuple[Command, dict[str, str]]:
    """Return the options of a command, and the recipe's settings among them as {dotted name: text}.

    >>> @dataclass(frozen=True)
    ... class Example:
    ...     json: bool = False
    >>> parse(Example, ["--json", "--k", "3", "--inject-delays"])
    (Example(json=True), {'strategy.k': '3', 'delay.inject': 'true'})
    >>> parse(Example, ["--rouds", "3"])
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unknown option --rouds; did you mean --rounds?
    """
    table = options_of(command, with_recipe=with_recipe)
    found = dict(_read(table, deque(arguments)))
    values = {
        option.name: _converted(option, flag, text) for option, (flag, text) in found.items() if not option.of_recipe
    }
    for each in table:
        if each.spelling.positional and each.default is MISSING and each.name not in values:
            raise UsageError(f"{each.metavar} is missing: {each.rule.help}")
    return command(**values), {option.name: text for option, (_, text) in found.items() if option.of_recipe}


def _read(table: Sequence[Option], words: deque[str]) -> Iterator[tuple[Option, tuple[str, str]]]:
    """Yield the options that are there: each, as it was spelt, and its text."""
    spelt = {flag: option for option in table for flag in option.flags if not option.spelling.positional}
    places, placed = deque(option for option in table if option.spelling.positional), list[str]()
    while words:
        word = words.popleft()
        if not _is_option(word):
            if not places:
                raise _one_too_many([*placed, word, *words], spelt)
            place = places.popleft()
            placed.append(word)
            yield place, (place.metavar, word)
            continue
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-")
        if (renamed := next((option for option in table if flag in option.spelling.old), None)) is not None:
            warn(f"{flag} is now {renamed.flags[0]}; the old name goes with the next release")
            text, unit = text if equals else _value(renamed, flag, words), renamed.spelling.old[flag]
            yield renamed, (flag, text + (unit if text[-1:].isdigit() else ""))
        elif flag in spelt:
            yield spelt[flag], (flag, text if equals else _value(spelt[flag], flag, words))
        elif not equals and (positive := spelt.get(flag.replace("--no-", "--", 1))) is not None and positive.is_flag:
            yield positive, (flag, "false")
        else:
            raise _unknown_option(flag, spelt)


def _one_too_many(words: Sequence[str], spelt: Mapping[str, Option]) -> UsageError:
    """Return the error for an argument that has no place; names of strategies are told theirs.

    >>> raise _one_too_many(["lgc", "full", "--json"], {"--strategies": None})
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unexpected argument 'full'; for strategies give --strategies lgc,full
    """
    named = list(itertools.takewhile(_is_strategy, words))
    text = f"unexpected argument {words[1] if named else words[-1]!r}; "
    if len(named) < 2 or not {"--strategies", "--strategy"} & set(spelt):
        return UsageError(f"{text}--help shows what may be given")
    many = "--strategies" in spelt
    return UsageError(
        text + (f"for strategies give --strategies {','.join(named)}" if many else f"give one: --strategy {named[0]}")
    )


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not NUMBER_BELOW_ZERO.match(word)


def _value(option: Option, flag: str, words: deque[str]) -> str:
    """Take the text that follows an option.

    A word after a setting of a recipe that is true or false is its value, unless it must be the recipe's file.
    """
    follows = bool(words) and not _is_option(words[0])
    if option.is_flag:
        is_value = follows and option.of_recipe and not _may_be_file(words[0], option)
        return words.popleft() if is_value else "true"
    if option.spelling.alone and not (follows and words[0].isdecimal()):
        return option.spelling.alone
    if not follows:
        raise UsageError(f"{flag} needs a value: {option.metavar}")
    return words.popleft()


def _may_be_file(word: str, option: Option) -> bool:
    try:
        convert(word, option.hint)
    except ValueError:
        return word.endswith(".toml") or Path(word).exists()
    return False


def _converted(option: Option, flag: str, text: str) -> Any:
    """Return the value of a command's own option; an empty word is most often a variable that is not set."""
    if not text and option.hint is str:
        wanted = f"{flag.strip('[]')} is empty: give {option.metavar.strip('[]')}"
        may_go = ", or leave it out" if flag.startswith(("-", "[")) else ""
        raise UsageError(f"{wanted}{may_go} (is a variable not set?)")
    try:
        value = convert(with_unit(option.name, text), option.hint)
    except ValueError:
        expected = describe(option.hint) + unit_examples(option.name)
        raise UsageError(f"{flag}: expected {expected}, got {text!r:.60}") from None
    option.rule.check(option.name, value)
    return value


@contextmanager
def naming_typed_flags(table: Sequence[Option], arguments: Sequence[str]) -> Iterator[None]:
    """Let an error about a setting name the flag that was typed: --data, where --data.name is its full name.

    >>> with naming_typed_flags(list(recipe_options()), ["--k", "many"]):
    ...     read_recipe(None, {"strategy.k": "many"})
    Traceback (most recent call last):
    paceline.cli.options.UsageError: --k: expected a whole number or 'auto' or 'none', got 'many'
    """
    try:
        yield
    except (RecipeError, UsageError) as error:
        typed, text = {word.partition("=")[0].replace("_", "-") for word in arguments}, str(error)
        for full, *others in (option.flags for option in table if option.of_recipe):
            found = next((flag for flag in others if flag in typed), None)
            if found is not None and full not in typed:
                text = re.sub(rf"(?<![\w.-]){re.escape(full)}(?![\w.-])", found, text)
        if text != str(error):
            raise UsageError(text) from error
        raise


CALLED_ELSEWHERE = {
    "--learning-rate": "--lr",
    "--steps": "--rounds",
    "--iterations": "--rounds",
    "--latency": "--network.latency-seconds",
    "--bandwidth": "--network.server-bits-per-second",
    "--batch": "--batch-size",
    "--bs": "--batch-size",
    "--dataset": "--data",
    "--data-dir": "--data-directory",
    "--data.path": "--data.directory",
    "--delay.path": "--delay.file",
    "--delay.csv": "--delay.file",
    "--network": "--model",
    "-n": "--workers",
    "--nproc": "--workers",
    "--nproc-per-node": "--workers",
    "--num-workers": "--workers",
    "--world-size": "--workers",
    "--host": "--listen",
    "--port": "--listen",
    "-o": "--out",
    "--output": "--out",
    "--output-dir": "--out",
}
"""What other tools call an option -> the name that it has here."""
DEVICES = ("--device", "--gpu", "--gpus", "--cuda", "--accelerator")
NEAR = 0.75  # of the letters must agree: a guess that is wrong misleads


def _unknown_option(flag: str, known: Mapping[str, Option]) -> UsageError:
    """Return the error for an option that there is not, with the one that is meant.

    >>> raise _unknown_option("--momentum", {flag: each for each in recipe_options() for flag in each.flags})
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unknown option --momentum; did you mean --optimizer.momentum?
    >>> raise _unknown_option("--cluster.size", {flag: each for each in recipe_options() for flag in each.flags})
    Traceback (most recent call last):
    paceline.cli.options.UsageError: unknown option --cluster.size; choose from --cluster.workers, ...
    """
    if flag in DEVICES:
        return UsageError(f"unknown option {flag}; recipes run on the CPU; in a script of your own, any device does")
    section, dot, key = flag.partition(".")
    beside = [each for each in known if dot and each.startswith(f"{section}.")]  # all begin alike: keys are compared
    near = [f"{section}.{each}" for each in difflib.get_close_matches(key, [each.partition(".")[2] for each in beside])]
    word = flag.removeprefix("--")
    in_sections = [each for each in known if each.partition(".")[2] == word]
    longer = [each for each in known if each.startswith(f"{flag}-")]
    meant = [
        *([CALLED_ELSEWHERE[flag]] if CALLED_ELSEWHERE.get(flag) in known else []),
        *(in_sections if len(in_sections) == 1 else []),
        *(longer if len(longer) == 1 else []),
        *(near if beside else difflib.get_close_matches(flag, known, n=1, cutoff=NEAR)),
    ]
    if not meant and beside:
        return UsageError(f"unknown option {flag}; choose from {', '.join(beside)}")
    if not meant:
        return UsageError(f"unknown option {flag}; --help-all lists all")
    unit = " (a round is a step of the model)" if meant[0] == "--rounds" and flag in CALLED_ELSEWHERE else ""
    return UsageError(f"unknown option {flag}; did you mean {meant[0]}?{unit}")
