"""Records and pages of pruning: what became of each sample of a run, and what the trained model says of its label.

    simulated run   ── at its end ─────────────────> record ──> pruning.safetensors in the run's folder
    real run        ── replayed from its journal ──> record ──> kept in the folder, so that it is replayed once

    your own loop   ── at its end, paceline.pruning_page(pruning, dataset, "pruning.html", model=model) ──> page

The model looks at every training sample once, in eval mode and without augmentation.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.pruning import PruningSettings, make_policy
from paceline.files import write_file
from paceline.recipes.recipe import Recipe
from paceline.reports import pruning_page as page
from paceline.traces.pruning_record import PRUNING, PruningRecord, read_pruning
from paceline.user_code import is_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from numpy.typing import NDArray
    from torch import nn

    from paceline.data import Dataset
    from paceline.data.pruning.sampler import PrunedBatches
    from paceline.runs.cluster import WorkerOptions
    from paceline.runs.simulation import Run
    from paceline.training import Batches, PruningTotals, Training

BATCH = 512
CLASSES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "fashion-mnist": ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
}
"""The names of classes, for data sets whose labels are not digits."""


def predictions(module: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Return what a model says of labelled samples: its guess, the probabilities of guess and label, and the loss.

    >>> import torch
    >>> found = predictions(torch.nn.Flatten(), [(torch.tensor([[0.0, 2.0]]), torch.tensor([0]))])
    >>> found["guess"], found["label_probability"].round(2)
    (array([1]), array([0.12], dtype=float32))
    """
    import torch

    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    parts: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad(), _eval_mode(module):
        for inputs, labels in batches:
            logs = _log_probabilities(module(inputs.to(device)), labels)
            of_label = logs.gather(1, labels.long().reshape(-1, 1)).squeeze(1)
            of_guess, guess = logs.max(dim=1)
            for name, values in (
                ("label", labels),
                ("guess", guess),
                ("label_probability", of_label.exp().clamp(max=1.0)),
                ("guess_probability", of_guess.exp().clamp(max=1.0)),
                ("loss", (-of_label).clamp(max=torch.finfo(torch.float32).max)),
            ):
                parts.setdefault(name, []).append(values)
    return {name: torch.cat(values).numpy() for name, values in parts.items()}


def _log_probabilities(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if scores.ndim != 2 or labels.ndim != 1 or len(scores) != len(labels):
        raise ValueError(
            "the model must give a score for each class, and the data a number of a class for each sample "
            f"(scores {tuple(scores.shape)}, labels {tuple(labels.shape)})"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= scores.shape[1]:
        raise ValueError(
            f"labels must be between 0 and {scores.shape[1] - 1}, as many classes as the model gives scores for "
            f"(found {int(labels.min())} to {int(labels.max())})"
        )
    logs = scores.float().log_softmax(dim=1).cpu()
    if logs.isnan().any():
        raise ValueError("the model's outputs are not finite: training diverged, and there is nothing to tell")
    return logs


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """Put all parts in eval mode, and afterwards each back in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def make_record(
    dataset: Dataset,
    module: nn.Module,
    totals: PruningTotals,
    pruning: PruningSettings,
    *,
    source: Mapping[str, Any] | None = None,
) -> PruningRecord:
    """Return the record of a run: what was pruned (`totals`), by which settings, and what the trained module says.

    >>> import torch
    >>> from paceline.recipes.assembly import load_data, make_model
    >>> from paceline.training import PruningTotals
    >>> data = load_data(Recipe())
    >>> totals = PruningTotals(
    ...     times_pruned=np.full(1500, 2, np.uint16), passes=np.full(1500, 9), difficulty=np.zeros(1500, np.float32))
    >>> record = make_record(data, make_model(Recipe(), data), totals, PruningSettings(name="info-batch"))
    >>> record.samples, record.prunings, record.epochs, record.settings
    (1500, 3000, 9, {'ratio': 0.5, 'delta': 0.875})
    """

    train = dataset.train
    if train.labels is None:
        raise ValueError(f"data set {dataset.name!r} has no labels, of which the page of pruning tells")
    batches = ((inputs, labels.long()) for inputs, labels in train.parts(BATCH))
    names = CLASSES.get(dataset.name, ())
    return PruningRecord(
        policy=pruning.name,
        settings=dict(make_policy(pruning, 1, seed=0).settings)
        | ({} if pruning.protect is None else {"protect": pruning.protect}),
        epochs=int(totals.passes.max()),
        classes=names if len(names) == dataset.classes else tuple(map(str, range(dataset.classes))),
        times_pruned=totals.times_pruned,
        difficulty=totals.difficulty,
        source=source or {},
        **predictions(module, batches),
    )


def record_of_run(recipe: Recipe, run: Run) -> PruningRecord:
    """Return the record of a simulated run that has ended.

    >>> from paceline.runs.simulation import make_run
    >>> recipe = Recipe(rounds=10).with_settings(pruning={"name": "info-batch"}, cluster={"workers": 8})
    >>> run = make_run(recipe)
    >>> for _ in run:
    ...     pass
    >>> record_of_run(recipe, run).policy
    'info-batch'
    """
    learner = getattr(run, "learner", None)
    if learner is None:
        raise ValueError("a run without training prunes nothing")
    batches: Batches = learner.batches
    return _recorded(batches, batches.training, learner.module, recipe.to_document())


def _recorded(batches: Batches, training: Training, module: nn.Module, source: Mapping[str, Any]) -> PruningRecord:
    from paceline.training import pruning_of

    totals = pruning_of(batches, training)
    return make_record(training.dataset, module, totals, training.pruning, source=source)


def record_of_folder(
    folder: Path,
    worker_options: WorkerOptions | None = None,
    *,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    keep: bool = True,
) -> PruningRecord:
    """Return the record of the run in a folder: read if it is there, else made by replaying the run, and kept.

    >>> record_of_folder(Path("/nowhere"))
    Traceback (most recent call last):
    ValueError: there is no folder /nowhere
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if (folder / PRUNING).exists():
        return read_pruning(folder)
    record = _replayed(folder, worker_options, on_step)
    if keep:
        record.write(folder)
    return record


def _replayed(folder: Path, worker_options: WorkerOptions | None, on_step: Callable[[int, int], None]) -> PruningRecord:
    from paceline.runs.replaying import replay

    document = _recipe_of(folder)
    if not document:
        raise ValueError(f"the run in {folder} was made by a script: paceline.pruning_page makes the page there")
    if not Recipe.from_document(document).pruning.on:
        raise ValueError(f"the run in {folder} pruned nothing: its recipe has no pruning.name")
    made = list[PruningRecord]()

    def ended(batches: Batches, training: Training, module: nn.Module) -> None:
        made.append(_recorded(batches, training, module, document))

    verdict = replay(folder, worker_options, on_step=on_step, on_end=ended)
    if verdict.difference is not None and not verdict.nearly:
        raise ValueError(f"the replay of {folder} is not the run: {verdict.difference}; so it tells nothing of it")
    return made[0]


def _recipe_of(folder: Path) -> dict[str, Any]:
    """Return the recipe's document of a real run."""
    from paceline.runs.ranks import RECIPE, read_recipe_of
    from paceline.traces.journal import TRACE
    from paceline.traces.journal_files import read_journal

    if (folder / RECIPE).is_file():
        return read_recipe_of(folder).to_document()
    if not (folder / TRACE).is_file():
        raise ValueError(
            f"{folder} has no {PRUNING}, and no {TRACE} to make it from: it is not a run that pruned "
            "(`paceline simulate` writes one with --pruning.name, `paceline train` leaves a trace)"
        )
    return dict(read_journal(folder / TRACE).began.recipe)


def images_of(
    record: PruningRecord, numbers: Sequence[int], *, data_directory: str = "", data: str = ""
) -> tuple[dict[int, NDArray[Any]], str]:
    """Return the training images of a record's data set with these numbers, and a note on why there are none.

    Nothing is downloaded, no code is run that a record names, and no folder read but the default ones and
    `data_directory`. `data` is what a user gave instead of the record's data: only that may be code.

    >>> from paceline.traces.pruning_record import empty_record
    >>> images_of(empty_record(), [0])
    ({}, '')
    """
    from paceline.recipes.assembly import load_data
    from paceline.runs.cluster import ask_for_directory

    if not record.source:
        return {}, ""
    try:
        recipe = Recipe.from_document({name: record.source[name] for name in ("seed", "data") if name in record.source})
        recipe = recipe.with_settings(data={"name": data}) if data else recipe
        if recipe.data.name == "synthetic" and recipe.data.samples != record.samples:
            raise ValueError(f"the record has {record.samples:,} samples, and its recipe {recipe.data.samples:,}")
        ask_for_directory(recipe, data_directory, source="the run")
        if is_code(recipe.data.name) and not data:
            raise ValueError(
                f"{recipe.data.name} is data of your own, and no record may name code: "
                f"`paceline inspect pruning RUN --data {shlex.quote(recipe.data.name)}` shows them"
            )
        train = load_data(recipe.with_settings(data={"download": False, "directory": data_directory})).train
    except (ValueError, OSError, MemoryError) as error:
        return {}, f"Without images: {' '.join(str(error).split())}"
    if not np.array_equal(train.targets.numpy(), record.label):
        return {}, f"Without images: {recipe.data.name} as it is found here has other labels than the run had."
    return {number: train.inputs[number].numpy() for number in numbers}, ""


# -- a training loop of your own ---------------------------------------------------------------------------------------


def pruning_page(
    pruning: PrunedBatches,
    dataset: torch.utils.data.Dataset[Any],
    path: str | Path,
    *,
    model: nn.Module,
    classes: Sequence[str] = (),
    most: int = 12,
    title: str = "paceline: who is pruned",
) -> Path:
    """Write a page that shows which samples a sampler left out again and again, and whose label looks wrong.

    `dataset` gives (input, label) for each number, the same for the same number: leave random augmentation out of it.
    `model` gives a score for each class; it is asked in eval mode, where it is. `classes` are their names, 0, 1, ...
    if there are none; `most` is how many images a row may have.

    >>> import tempfile, torch, paceline
    >>> dataset = torch.utils.data.TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 4)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
    >>> pruning = paceline.InfoBatch(40, batch_size=8, epochs=8)
    >>> for epoch in range(3):
    ...     for batch in pruning:
    ...         loss = pruning.observe(torch.rand(len(batch)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = pruning_page(pruning, dataset, Path(folder, "pruning.html"), model=model)
    ...     "<h1>" in written.read_text(encoding="utf-8")
    True
    """
    record = record_of(pruning, dataset, model=model, classes=classes)
    images = {number: _as_array(dataset[number][0]) for number in page.shown_samples(record, most=most).numbers}
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"cannot write the page to {target}: give a file in a folder that is there")
    return write_file(target, page.pruning_page(record, images, title=title, most=most))


def record_of(
    pruning: PrunedBatches, dataset: torch.utils.data.Dataset[Any], *, model: nn.Module, classes: Sequence[str] = ()
) -> PruningRecord:
    """Return the record of a sampler, its data set and the trained model, which `inspect pruning` reads once written.

    >>> import torch, paceline
    >>> pruning = paceline.InfoBatch(5, batch_size=2, epochs=8)
    >>> record_of(pruning, [(torch.zeros(3), 0)] * 4, model=torch.nn.Linear(3, 2))
    Traceback (most recent call last):
    ValueError: the data set has 4 samples, and the sampler is over 5: give the data set that it drew from
    """
    from torch.utils.data import DataLoader

    samples = len(dataset)  # type: ignore[arg-type]
    if samples != len(pruning.times_pruned):
        raise ValueError(
            f"the data set has {samples:,} samples, and the sampler is over {len(pruning.times_pruned):,}: "
            "give the data set that it drew from"
        )
    found = predictions(model, DataLoader(dataset, batch_size=BATCH))
    last = int(max(found["label"].max(), found["guess"].max()))
    return PruningRecord(
        policy=pruning.policy.name,
        settings=dict(pruning.policy.settings),
        epochs=pruning.epoch - 1,
        classes=tuple(classes) or tuple(map(str, range(last + 1))),
        times_pruned=pruning.times_pruned.copy(),
        difficulty=pruning.difficulty(),
        **found,
    )


def _as_array(image: Any) -> Any:
    return image.detach().cpu().numpy() if hasattr(image, "detach") else np.asarray(image)
