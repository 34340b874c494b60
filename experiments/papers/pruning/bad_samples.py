"""pruning-bad-samples, the paper's future work: do other trainings and other networks prune the same samples?

Of each training, the tenth of the samples that sat out most often is taken. Judged is whether the tenths of two seeds
overlap more than two that are drawn by chance; whether other networks prune other samples is reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from experiments.core.claims import ahead, figure
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.papers.pruning.setting import PAPER_BATCH, trainings
from experiments.papers.published import PRUNING_EPOCHS
from paceline.recipes import Recipe
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.runs.simulation import make_run, result_of
from paceline.traces.pruning_overlap import PruningOverlap, overlap_of
from paceline.training import pruning_of

SAME, OTHER = "the same network, another seed", "another network"


def run_pruned_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a recipe of one worker that prunes; return how often each sample sat out."""
    run: Any = make_run(Recipe.from_document(settings["recipe"]))
    for _ in run:
        pass
    totals = pruning_of(run.batches, run.batches.training)
    return {"times_pruned": totals.times_pruned.tolist(), "accuracy": result_of(run).accuracy}


def bad_recipe(size: Size, network: str, seed: int) -> Recipe:
    """Return the recipe of a training whose pruned samples are looked at.

    >>> bad_recipe(Size(), "mlp", 200).pruning.window
    12
    """
    epochs = size.pick(10, 40, PRUNING_EPOCHS)
    window = int(0.3 * epochs)
    full = size.name == "full"
    return Recipe(seed=seed, epochs=epochs, evaluate_every=10**6, target_loss=None).with_settings(
        data={"name": "cifar10" if full else "digits", "split": "iid", "augment": full},
        model={"name": network},
        cluster={"workers": 1},
        worker={"batch_size": PAPER_BATCH if full else 32},
        optimizer={"lr": 0.05, "decay": 0.2, "decay_at": [0.3, 0.6, 0.8]},
        strategy={"name": "full"},
        pruning={"name": "fine-pruning", "window": window, "starting_point": window // 2},
    )


@experiment(
    "pruning-bad-samples",
    source="Data fine-pruning, section 6",
    question="whether other trainings and networks prune the same samples",
    minutes=0.6,
    full_hours=100,
    full_data=("cifar10",),
    seeds=2,
)
def bad_samples(size: Size) -> Telling:
    networks = ("lenet", "vgg13", "resnet18") if size.name == "full" else ("mlp", "lenet")

    def job(network: str, above: int) -> Job:
        def settings(seed: int) -> dict[str, Any]:
            return {"recipe": bad_recipe(size, network, seed + above).to_document()}

        return Job(run_pruned_recipe, settings, size.pick(2.0, 9.0, 60_000.0))

    later = trainings(size)
    runs = yield {(network, name): job(network, later[name]) for network in networks for name in later}
    trained = [
        (network, seed + later[name], outcome["times_pruned"])
        for (network, name), outcomes in runs.items()
        for seed, outcome in zip(size.seeds, outcomes, strict=True)
    ]
    found: dict[str, list[tuple[str, PruningOverlap]]] = {SAME: [], OTHER: []}
    for (network, seed, times), (other, again, others) in itertools.combinations(trained, 2):
        pair = f"{network} {seed}, {other} {again}", overlap_of(times, others)
        found[SAME if network == other else OTHER].append(pair)
    means = {kind: fmean(each.jaccard for _, each in pairs) for kind, pairs in found.items()}
    chance = fmean(each.chance for pairs in found.values() for _, each in pairs)

    yield PlainTable(
        title="Overlap of the most pruned tenths of two trainings",
        headings=("two trainings of", "", "paper", "ours:\noverlap", "by\nchance", "samples\nin both"),
        rows=[
            (kind, name, "-", f"{each.jaccard:.3f}", f"{each.chance:.3f}", figure(each.shared))
            for kind, pairs in found.items()
            for name, each in pairs
        ],
        caption="Overlap is samples in both tenths, of those in either. The paper leaves the question open.",
    )
    text = "some data are commonly identified as bad: other seeds prune the same ones"
    yield ahead(text, {"another seed": means[SAME], "chance": chance}, best="high")
    yield ahead(
        "bad data relate to the type of the network: other networks prune others",
        {"another seed": means[SAME], "another network": means[OTHER]},
        best="high",
        judged=False,
    )
    yield bar_chart(
        "overlap",
        "Overlap of the most pruned tenths",
        "Means over pairs of trainings.",
        [*means, "chance"],
        {"ours": [*means.values(), chance]},
        y="overlap",
        percent=True,
    )
    if size.name != "full":
        yield "An mlp and LeNet learn the digits in 40 epochs. The paper names neither networks nor data for this."
    yield Numbers({**means, "chance": chance})
