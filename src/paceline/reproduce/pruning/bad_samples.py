"""pruning-bad-samples, the paper's future work: do other trainings and other networks prune the same samples?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.recipes import Recipe
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, figure, mean
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.pruning.setting import PAPER_BATCH, at_least_two_seeds
from paceline.reproduce.published import PRUNING_EPOCHS


def run_pruned_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a recipe of one worker that prunes; return how often each sample sat out."""
    from paceline.runs.simulation import make_run, result_of
    from paceline.training import pruning_of

    recipe = Recipe.from_document(settings["recipe"])
    run: Any = make_run(recipe)
    for _ in run:
        pass
    totals = pruning_of(run.batches, run.batches.training)
    return {"times_pruned": totals.times_pruned.tolist(), "accuracy": result_of(run).accuracy}


def bad_networks(plan: ExperimentPlan) -> tuple[str, ...]:
    return ("lenet", "vgg13", "resnet18") if plan.size == "full" else ("mlp", "lenet")


def bad_recipe(plan: ExperimentPlan, network: str, seed: int) -> Recipe:
    """Return the recipe of a training whose pruned samples are looked at.

    >>> bad_recipe(ExperimentPlan(), "mlp", 200).pruning.window
    12
    """
    epochs = plan.choose(toy=10, laboratory=40, full=PRUNING_EPOCHS)
    window = int(0.3 * epochs)
    return Recipe(seed=seed, epochs=epochs, evaluate_every=10**6, target_loss=None).with_settings(
        data={"name": plan.choose(toy="digits", laboratory="digits", full="cifar10"), "split": "iid",
              "augment": plan.size == "full"},
        model={"name": network},
        cluster={"workers": 1},
        worker={"batch_size": plan.choose(toy=32, laboratory=32, full=PAPER_BATCH)},
        optimizer={"lr": 0.05, "decay": 0.2, "decay_at": [0.3, 0.6, 0.8]},
        strategy={"name": "full"},
        pruning={"name": "fine-pruning", "window": window, "starting_point": window // 2},
    )  # fmt: skip


def jobs_of_bad_samples(plan: ExperimentPlan) -> list[Job]:
    return [
        Job(
            name=f"{network}, seed {seed}",
            run=run_pruned_recipe,
            settings={"recipe": bad_recipe(plan, network, seed).to_document()},
            seconds=plan.choose(toy=2.0, laboratory=9.0, full=60_000.0),
        )
        for seed in at_least_two_seeds(plan)
        for network in bad_networks(plan)
    ]


def conclude_bad_samples(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    from paceline.traces.pruning_overlap import overlap_of

    found: dict[str, list[tuple[str, Any]]] = {"the same network, another seed": [], "another network": []}
    runs = [(network, seed) for network in bad_networks(plan) for seed in at_least_two_seeds(plan)]
    for place, (network, seed) in enumerate(runs):
        for other, again in runs[place + 1 :]:
            pair = (outcomes[f"{network}, seed {seed}"], outcomes[f"{other}, seed {again}"])
            kind = "the same network, another seed" if network == other else "another network"
            name = f"{network} {seed}, {other} {again}"
            found[kind].append((name, overlap_of(pair[0]["times_pruned"], pair[1]["times_pruned"])))
    means = {kind: mean([each.jaccard for _, each in pairs]) for kind, pairs in found.items()}
    chance = mean([each.chance for pairs in found.values() for _, each in pairs])
    rows = [
        (kind, name, "-", f"{each.jaccard:.3f}", f"{each.chance:.3f}", figure(each.shared))
        for kind, pairs in found.items()
        for name, each in pairs
    ]
    same, other_network = means.values()
    return Findings(
        tables=(
            PlainTable(
                title="Overlap of the most pruned tenths of two trainings",
                headings=("two trainings of", "", "paper", "ours:\noverlap", "by\nchance", "samples\nin both"),
                rows=rows,
                caption="Overlap is samples in both tenths, of those in either. The paper leaves the question open.",
            ),
        ),
        claims=(
            ahead(
                "some data are commonly identified as bad: other seeds prune the same ones",
                {"another seed": same, "chance": chance},
                best="high",
            ),
            ahead(
                "bad data relate to the type of the network: other networks prune others",
                {"another seed": same, "another network": other_network},
                best="high",
                judged=False,
            ),
        ),
        charts=(
            bar_chart(
                "overlap",
                "Overlap of the most pruned tenths",
                "Means over pairs of trainings.",
                [*means, "chance"],
                {"ours": [*means.values(), chance]},
                y="overlap",
                percent=True,
            ),
        ),
        series=("ours",),
        remarks=() if plan.size == "full" else (
            "An mlp and LeNet learn the digits in 40 epochs. The paper names neither networks nor data for this.",
        ),
        numbers={**means, "chance": chance},
    )  # fmt: skip
