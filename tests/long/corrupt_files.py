"""The kinds of files that `corrupt` damages: how each is recorded, damaged, read, and held against what it was."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import random
import shutil
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.data.pruning import PruningSettings
from paceline.drivers.averaging.job import AveragingJob, AveragingRun
from paceline.drivers.ranks.checkpoints import RankCheckpoints, agreed_start
from paceline.drivers.ranks.launch import STORE, Place
from paceline.drivers.ranks.rendezvous import joined
from paceline.drivers.served.keys import make_keys
from paceline.drivers.served.run import open_run
from paceline.drivers.served.security import read_pair, read_side
from paceline.drivers.simulated.delays import read_recorded
from paceline.events import Share, Step
from paceline.files import MANIFEST, write_folder
from paceline.pipeline.plan import Plan
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_member, make_training, resolved
from paceline.recipes.reading import read_recipe
from paceline.runs.cluster import make_served
from paceline.runs.ranks import RECIPE, read_recipe_of, write_recipe
from paceline.traces.checked_lines import checked_line, checksum_of
from paceline.traces.checkpoints import STATE, TENSORS, Checkpoint, read_newest, write_checkpoint
from paceline.traces.history import trace_of
from paceline.traces.journal import TRACE
from paceline.traces.journal_files import read_journal
from paceline.traces.pruning_record import KINDS as ARRAYS
from paceline.traces.pruning_record import PRUNING, PruningRecord, read_pruning
from paceline.traces.run_settings import OF_THE_MACHINE, difference, with_defaults

ROOT = Path(__file__).parents[2]
SERVED = Recipe().with_settings(
    rounds=40,
    data={"split": "iid"},
    cluster={"workers": 3},
    strategy={"name": "lgc", "k": 2},
    optimizer={"name": "lars", "lr": 1.0, "schedule": "poly", "warmup": 0.2},
    codec={"name": "qsgd"},
)
RANKS = Recipe().with_settings(
    rounds=6,
    data={"split": "iid"},
    cluster={"workers": 1},
    strategy={"name": "diloco", "k": 1, "period": 2},
    optimizer={"name": "adam", "lr": 0.01},
    pruning={"name": "fine-pruning"},
)
SMALL = "tests.golden.network:tiny"
HUGE = (10**400, 2**63, 2**64, 10**18, -1, -(10**400), 0, 1, 1e308, -1e308, 0.5, -0.0, 999, 50)


@dataclass(frozen=True)
class Kind:
    """One row: a kind of files, its share of all cases, and whether a changed one may be taken for another that is."""

    name: str
    share: int
    target: Callable[[Path, Path], Any]
    may_be_valid: bool = False

    @contextlib.contextmanager
    def opened(self, recorded: Path, folder: Path) -> Iterator[Target]:
        """Yield a target that works in `folder` on copies of what was recorded."""
        target = self.target(recorded, folder)
        with target.ready() if hasattr(target, "ready") else contextlib.nullcontext():
            yield target


class Target:
    """Something to be damaged (`corrupt`) and read back (`read`: "same" or "valid"; an error refuses it)."""

    def corrupt(self, dice: random.Random) -> str:
        raise NotImplementedError

    def read(self) -> str:
        raise NotImplementedError


# -- damage ------------------------------------------------------------------------------------------------------------


def damaged(data: bytes, dice: random.Random) -> tuple[str, bytes]:
    """Return how a file was damaged, and its new content."""
    altered, size = bytearray(data), max(1, len(data))
    place, length = dice.randrange(size), 1 + int(dice.expovariate(1 / 40))
    how = dice.choice(("flip", "flip", "flips", "byte", "cut", "insert", "take out", "repeat", "lines", "zeros"))
    if how.startswith("flip"):
        for _ in range(1 if how == "flip" else dice.randint(2, 9)):
            altered[dice.randrange(size)] ^= 1 << dice.randrange(8)
    elif how == "byte":
        altered[place] = dice.choice(b'\x00\xff\n"{}[]0-9.,e ')
    elif how == "cut":
        del altered[place:]
    elif how == "insert":
        altered[place:place] = dice.choice((dice.randbytes(length), b"[" * length * 50, b"9" * length, b'"', b"\n"))
    elif how == "take out":
        del altered[place : place + length]
    elif how == "repeat":
        altered[place:place] = altered[place : place + length] * dice.choice((1, 2, 100))
    elif how == "zeros":
        altered[place : place + length] = bytes(length)
    else:
        lines = data.splitlines(keepends=True)
        one, other = dice.randrange(len(lines)), dice.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one] if dice.random() < 0.7 else lines[other]
        altered = bytearray(b"".join(lines))
    return f"{how} at {place}", bytes(altered)


def mutated(document: Any, dice: random.Random) -> str:
    """Change one place in nested plain values, and say which."""
    places = list(_places(document, ""))
    holder, key, path = dice.choice(places)
    value = holder[key]
    changes: list[tuple[str, Callable[[], None]]] = [
        ("text", lambda: holder.__setitem__(key, dice.choice(("", "x", "3", "nan", "../../etc", "\x00", "a" * 5000)))),
        ("number", lambda: holder.__setitem__(key, dice.choice(HUGE))),
        ("none", lambda: holder.__setitem__(key, None)),
        ("true", lambda: holder.__setitem__(key, True)),
        ("list", lambda: holder.__setitem__(key, dice.choice(([], [value], [1, 2], [[1, 2]] * 50, [None])))),
        ("table", lambda: holder.__setitem__(key, dice.choice(({}, {"a": value}, {"=tensor": "parameters"})))),
        ("nest", lambda: holder.__setitem__(key, _nested(value, dice.choice((3, 100, 400))))),
    ]
    if isinstance(holder, dict):
        changes += [("missing", lambda: holder.pop(key))] * 2
        changes += [("renamed", lambda: holder.__setitem__(dice.choice(string.ascii_letters), holder.pop(key)))]
    else:
        changes += [("missing", lambda: holder.pop(key)), ("repeated", lambda: holder.extend([value] * 50))]
    if isinstance(value, int | float) and not isinstance(value, bool):
        changes += [("nearby", lambda: holder.__setitem__(key, value + dice.choice((-1, 1, 7, 0.5, 1000))))] * 3
        changes += [("number", changes[1][1])] * 4
    how, change = dice.choice(changes)
    change()
    return f"{how} for {path}"


def _places(value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key, f"{path}.{key}"
        yield from _places(inner, f"{path}.{key}")


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def json_bytes(document: Any) -> bytes:
    return json.dumps(document).encode()


# -- journals ----------------------------------------------------------------------------------------------------------


class JournalFile(Target):
    """A trace, damaged as a disk or an editor does it."""

    def __init__(self, recorded: Path, folder: Path) -> None:
        self._data, self._file = (recorded / "journal.jsonl").read_bytes(), folder / TRACE
        self._file.write_bytes(self._data)
        self._records = read_journal(self._file).records

    def corrupt(self, dice: random.Random) -> str:
        lines = self._data.splitlines()
        if dice.random() < 0.6:
            how, data = damaged(self._data, dice)
        else:
            number = dice.randrange(len(lines))
            document = json.loads(lines[number])
            how = mutated(document, dice)
            lines[number] = json_bytes(document).replace(b": ", b":").replace(b", ", b",")
            data = b"\n".join(lines) + b"\n"
        self._file.write_bytes(data)
        return how

    def read(self) -> str:
        journal = read_journal(self._file)
        trace_of(journal)
        Recipe.from_document(journal.began.recipe)
        return "same" if journal.records == self._records[: len(journal.records)] else "valid"


class EditedLines(JournalFile):
    """A trace of which a whole line was deleted or doubled, two were swapped, or one was moved."""

    def corrupt(self, dice: random.Random) -> str:
        lines = self._data.splitlines(keepends=True)
        one, other = dice.randrange(len(lines)), dice.randrange(len(lines))
        how = dice.choice(("deleted", "doubled", "swapped", "moved"))
        if how == "deleted":
            del lines[one]
        elif how == "doubled":
            lines.insert(other, lines[one])
        elif how == "swapped":
            lines[one], lines[other] = lines[other], lines[one]
        else:
            lines.insert(other, lines.pop(one))
        self._file.write_bytes(b"".join(lines))
        return f"{how} {one} {other}"


class ForgedJournal(JournalFile):
    """A trace of which one record was changed, and all lines sealed again, as anybody can."""

    def corrupt(self, dice: random.Random) -> str:
        documents = [json.loads(line) for line in self._data.splitlines()]
        for document in documents:
            del document["crc"]
        how = mutated(dice.choice(documents), dice)
        before, lines = 0, []
        for document in documents:
            lines.append(checked_line(document, before))
            before = checksum_of(lines[-1])
        self._file.write_bytes(b"".join(lines))
        return how


# -- checkpoints -------------------------------------------------------------------------------------------------------


class CheckpointFiles(Target):
    """A served run's checkpoint, damaged as a disk does it."""

    source = "served"

    def __init__(self, recorded: Path, folder: Path) -> None:
        shutil.copytree(recorded / self.source, folder, dirs_exist_ok=True)
        (self._folder,) = self.holder(folder).glob("checkpoint-*")
        self._files = {name: (self._folder / name).read_bytes() for name in (TENSORS, STATE, MANIFEST)}
        self._whole = self.checkpoint()
        assert self._whole is not None

    def holder(self, folder: Path) -> Path:
        return folder

    def checkpoint(self) -> Checkpoint | None:
        found, refused = read_newest(self._folder.parent)
        if refused:
            raise ValueError(refused[0])
        return found

    def corrupt(self, dice: random.Random) -> str:
        for name, data in self._files.items():
            (self._folder / name).write_bytes(data)
        name = dice.choice((TENSORS, STATE, STATE, MANIFEST, MANIFEST))
        if name == TENSORS or dice.random() < 0.6:
            how, data = damaged(self._files[name], dice)
        else:
            document = json.loads(self._files[name])
            how = mutated(document, dice)
            data = json.dumps(document, indent=1).encode() if name == MANIFEST else json_bytes(document)
        (self._folder / name).write_bytes(data)
        return f"{name}: {how}"

    def read(self) -> str:
        found = self.checkpoint()
        return "same" if found is not None and _equal(found, self._whole) else "valid"


class RankCheckpointFiles(CheckpointFiles):
    """A rank's checkpoint, damaged as a disk does it."""

    source = "ranks"

    def holder(self, folder: Path) -> Path:
        return folder / "rank-0"


def _equal(one: Checkpoint, other: Checkpoint) -> bool:
    return one.state == other.state and _equal_tensors(one.tensors, other.tensors)


def _equal_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype is other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def forged(
    files: dict[str, bytes], whole: Checkpoint, dice: random.Random
) -> tuple[str, dict[str, bytes], dict[str, Any]]:
    """Return a changed state or changed tensors, to be sealed again, and what the manifest says of them."""
    about = {"version": whole.version, "tensors": list(whole.tensors)}
    kind = dice.choice(("state", "state", "state", "tensor", "bytes", "about"))
    files = {name: files[name] for name in (TENSORS, STATE)}
    if kind == "state":
        state = copy.deepcopy(whole.state)
        how = ", ".join(mutated(state, dice) for _ in range(dice.choice((1, 1, 2))))
        files[STATE] = json_bytes(state)
    elif kind == "tensor":
        from safetensors.torch import save

        how, tensors = _other_tensors(whole.tensors, dice)
        files[TENSORS], about["tensors"] = save(tensors), list(tensors)
    elif kind == "about":
        how = mutated(about, dice)
    else:
        name = dice.choice((TENSORS, STATE))
        how, files[name] = damaged(files[name], dice)
        how = f"{name}: {how}"
    return f"{kind}: {how}", files, about


def _other_tensors(tensors: dict[str, torch.Tensor], dice: random.Random) -> tuple[str, dict[str, torch.Tensor]]:
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    name = dice.choice(list(tensors))
    tensor, flat = tensors[name], tensors[name].reshape(-1)
    how = dice.choice(("nan", "inf", "double", "half", "int", "longer", "shorter", "flat", "gone", "zeros", "negative"))
    if how in ("nan", "inf") and tensor.is_floating_point() and flat.numel():
        flat[dice.randrange(flat.numel())] = math.nan if how == "nan" else math.inf
    elif how == "gone":
        del tensors[name]
    else:
        changed = {
            "double": lambda: tensor.double(),
            "half": lambda: tensor.half(),
            "int": lambda: tensor.long(),
            "longer": lambda: torch.cat([flat, flat[:1]]),
            "shorter": lambda: flat[1:].clone(),
            "flat": lambda: tensor.reshape(1, -1).clone(),
            "negative": lambda: -1 - tensor if tensor.dtype is not torch.bool else ~tensor,
        }
        tensors[name] = changed.get(how, lambda: torch.zeros_like(tensor))()
    return f"{how} {name}", tensors


class ForgedCheckpoint(CheckpointFiles):
    """A served run's checkpoint, changed and sealed again; if it is loaded, a step is taken."""

    def __init__(self, recorded: Path, folder: Path) -> None:
        super().__init__(recorded, folder)
        recipe = Recipe.from_document(read_journal(folder / TRACE).began.recipe)
        self._served, self._trace = make_served(recipe, folder), (folder / TRACE).read_bytes()

    def corrupt(self, dice: random.Random) -> str:
        how, files, about = forged(self._files, self._whole, dice)
        write_folder(self._folder.parent, self._folder.name, files, about=about)
        return how

    def read(self) -> str:
        (self._folder.parent / TRACE).write_bytes(self._trace)
        run = open_run(self._served, resume=True)
        run._journal.close()
        state = run.coordinator.train_state
        outcome = "same" if torch.equal(state.model.parameters, self._whole.tensors["parameters"]) else "valid"
        if not _equal(read_newest(self._folder.parent)[0], self._whole):  # type: ignore[arg-type]
            outcome = "valid"
        step = Step(version=state.version, fresh=(Share(worker=0, version=state.version, weight=1.0),))
        state.take(step, lambda share: torch.zeros_like(state.model.parameters), [])
        json.dumps(run.coordinator.boundary, allow_nan=False)
        return outcome


class ForgedRankCheckpoint(RankCheckpointFiles):
    """A rank's checkpoint, changed and sealed again; if it is loaded, a step is taken."""

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        folder = self._folder.parents[1]
        os.environ[STORE] = str(folder / "store")
        job = rank_job(folder)
        with joined(Place(rank=0, world=1), timeout_seconds=60) as ranks:
            self._ranks, self._job = ranks, job
            yield

    def corrupt(self, dice: random.Random) -> str:
        how, files, about = forged(self._files, self._whole, dice)
        self._folder.parent.mkdir(exist_ok=True)
        write_folder(self._folder.parent, self._folder.name, files, about=about)
        return how

    def read(self) -> str:
        found = self.checkpoint()
        outcome = "same" if found is not None and _equal(found, self._whole) else "valid"
        defaults = Recipe().to_document()
        checkpoints = RankCheckpoints(self._folder.parents[1], 0)
        state = agreed_start(checkpoints, self._ranks, resume=True, recipe=self._job.recipe, defaults=defaults)
        run = AveragingRun(self._job, self._ranks)
        with run.connected():
            run._load(state or {})
            run.step()
        return outcome


def rank_job(folder: Path) -> AveragingJob:
    recipe = resolved(RANKS)
    return AveragingJob(
        training=make_training(recipe, load_data(recipe)),
        member=make_member(recipe),
        rounds=recipe.rounds,
        folder=folder,
        checkpoint_every=4,
        recipe=recipe.to_document(),
    )


# -- other files -------------------------------------------------------------------------------------------------------


class PlainFile(Target):
    """One file, or one of several, damaged; `texts` that are JSON are also mutated."""

    names: tuple[str, ...] = ()
    is_json = False

    def __init__(self, recorded: Path, folder: Path) -> None:
        self.folder = folder
        self._data = {name: (recorded / name).read_bytes() for name in self.names}
        for name, data in self._data.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        self.whole = self.value()

    def corrupt(self, dice: random.Random) -> str:
        for name, data in self._data.items():
            (self.folder / name).write_bytes(data)
        name = dice.choice(self.names)
        if self.is_json and dice.random() < 0.6:
            document = json.loads(self._data[name])
            how, data = mutated(document, dice), b""
            data = json_bytes(document)
        else:
            how, data = damaged(self._data[name], dice)
        (self.folder / name).write_bytes(data)
        return f"{name}: {how}"

    def value(self) -> Any:
        raise NotImplementedError

    def same(self, found: Any) -> bool:
        return bool(found == self.whole)

    def read(self) -> str:
        return "same" if self.same(self.value()) else "valid"


class PruningFile(PlainFile):
    """The record of who was pruned."""

    names = (PRUNING,)

    def value(self) -> PruningRecord:
        return read_pruning(self.folder)

    def same(self, found: PruningRecord) -> bool:
        plain = ("policy", "epochs", "classes", "settings", "source")
        return all(getattr(found, name) == getattr(self.whole, name) for name in plain) and all(
            getattr(found, name).tobytes() == getattr(self.whole, name).tobytes() for name in ARRAYS
        )


class KeyFiles(PlainFile):
    """The CA and a server's certificate and key."""

    names = ("keys/ca.crt", "keys/ca.key", "keys/server.crt", "keys/server.key")

    def value(self) -> Any:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        bare = serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (server, authority), own = (
            read_side(self.folder / "keys/server", role="server"),
            read_pair(self.folder / "keys/ca"),
        )
        authorities = [each.public_bytes(bare[0]) for each in x509.load_pem_x509_certificates(authority)]
        return [
            authorities,
            *((pair.certificate.public_bytes(bare[0]), pair.key.private_bytes(*bare)) for pair in (server, own)),
        ]


class RecipeOfRanks(PlainFile):
    """recipe.json of a run of ranks, which is held against the recipe in the checkpoints."""

    names = (RECIPE, "kept.json")
    is_json = True

    def corrupt(self, dice: random.Random) -> str:
        names, self.names = self.names, (RECIPE,)
        try:
            return super().corrupt(dice)
        finally:
            self.names = names

    def value(self) -> Any:
        recipe = read_recipe_of(self.folder).to_document()
        kept = json.loads((self.folder / "kept.json").read_bytes())
        different = difference(with_defaults(kept, Recipe().to_document()), recipe)
        if different:
            raise ValueError(different)
        for path in OF_THE_MACHINE:
            section, name = path.split(".")
            recipe[section].pop(name)
        return recipe


class RecipeFile(PlainFile):
    """A recipe in TOML, written by hand."""

    names = ("my.toml",)

    def value(self) -> Recipe:
        return read_recipe(self.folder / "my.toml", trust=True)


class PlanFile(PlainFile):
    """A plan of a pipeline, and the step that it predicts."""

    names = ("plan.json",)
    is_json = True

    def value(self) -> Any:
        plan = Plan.load(self.folder / "plan.json")
        plan.timeline  # noqa: B018 - the step that it predicts is computed here
        return plan


class DelayFile(PlainFile):
    """Recorded delays."""

    names = ("delays.csv",)

    def value(self) -> Any:
        return read_recorded(self.folder / "delays.csv")


KINDS = (
    Kind("journal", 15, JournalFile),
    Kind("journal, whole lines", 8, EditedLines),
    Kind("journal, sealed again", 5, ForgedJournal, may_be_valid=True),
    Kind("checkpoint", 12, CheckpointFiles),
    Kind("checkpoint, sealed again", 15, ForgedCheckpoint, may_be_valid=True),
    Kind("rank's checkpoint", 6, RankCheckpointFiles),
    Kind("rank's checkpoint, sealed again", 9, ForgedRankCheckpoint, may_be_valid=True),
    Kind("pruning record", 8, PruningFile),
    Kind("keys", 6, KeyFiles),
    Kind("recipe of ranks", 5, RecipeOfRanks),
    Kind("recipe", 5, RecipeFile, may_be_valid=True),
    Kind("plan", 4, PlanFile, may_be_valid=True),
    Kind("delays", 2, DelayFile, may_be_valid=True),
)


# -- what is recorded first --------------------------------------------------------------------------------------------


def record(folder: Path) -> None:
    """Write one of each kind of file into a folder."""
    golden = ROOT / "tests" / "golden" / "served-stopped" / TRACE
    shutil.copy(golden, folder / "journal.jsonl")
    _record_served(folder / "served")
    _record_ranks(folder / "ranks")
    shutil.copy(folder / "ranks" / RECIPE, folder / RECIPE)
    (folder / "kept.json").write_text(json.dumps(resolved(RANKS).to_document()))
    _record_pruning(folder)
    make_keys(folder / "keys")
    shutil.copy(ROOT / "tests" / "golden" / "plan" / "plan.json", folder / "plan.json")
    shutil.copy(ROOT / "tests" / "golden" / "served.toml", folder / "my.toml")
    (folder / "delays.csv").write_text("".join(f"1.{n},0.{n}5,{n + 1}\n" for n in range(20)))


def _record_served(folder: Path) -> None:
    """A server that has taken three steps."""
    folder.mkdir()
    run = open_run(make_served(resolved(SERVED), folder))
    state = run.coordinator.train_state
    generator = torch.Generator().manual_seed(0)
    for version in range(3):
        step = Step(version=version, fresh=(Share(worker=0, version=version, weight=1.0),))
        gradient = torch.randn(state.model.parameters.shape, generator=generator)
        state.take(step, lambda share, gradient=gradient: gradient, [])
    run.coordinator.strategy.version = 3
    run.coordinator.seats.drawn(0, 2)
    run.coordinator.boundary = run.coordinator._boundary_state()
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    write_checkpoint(folder, run._checkpoint(1.5))
    run._journal.close()


def _record_ranks(folder: Path) -> None:
    """A rank that averages with nobody, after a few rounds."""
    folder.mkdir()
    os.environ[STORE] = str(folder / "store")
    write_recipe(resolved(RANKS), folder)
    with joined(Place(rank=0, world=1), timeout_seconds=60) as ranks:
        agreed_start(RankCheckpoints(folder, 0), ranks, resume=False, recipe=rank_job(folder).recipe)
        run = AveragingRun(rank_job(folder), ranks)
        run.run(None)
    (folder / "store").unlink(missing_ok=True)
    for path in sorted((folder / "rank-0").glob("checkpoint-*"))[1:]:
        shutil.rmtree(path)  # the one in the middle of the run stays: there is something left to do after it


def _record_pruning(folder: Path) -> None:
    dice = random.Random(0)
    labels = [dice.randrange(3) for _ in range(200)]
    shares = [dice.random() for _ in labels]
    PruningRecord(
        policy="fine-pruning", epochs=60, classes=("cat", "dog", "sea lion"), label=labels, guess=labels[::-1],
        times_pruned=[dice.randrange(20) for _ in labels], difficulty=shares, label_probability=shares,
        guess_probability=shares, loss=shares, settings=dataclasses.asdict(PruningSettings(name="fine-pruning")),
        source=Recipe().to_document(),
    ).write(folder)  # fmt: skip
