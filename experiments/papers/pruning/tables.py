"""pruning-table-1 and pruning-table-2: the same runs give the time and the accuracy with and without pruning.

Of the time is judged: training is quicker with pruning, the time saved is the share of the samples saved, and the
sampler takes less than 1 % of it. Of the accuracy: pruning is no further behind regular training than in the paper's
worst row, and ahead of a control of ours, which saves as many samples by fewer epochs.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from experiments.core.claims import ahead, percent, within
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.papers.pruning.setting import NOT_STATED, SMALLER, written
from experiments.papers.pruning.training import FEWER_EPOCHS, FINE_PRUNING, WHOLE, pruning_size, run_training
from experiments.papers.published import PRUNING_NETWORKS, PRUNING_TABLE_1, PRUNING_TABLE_2
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable

LABORATORY = {"images": 25_000, "epochs": 40, "fewer": 0.15}
WAYS = {"regular": WHOLE, "pruned": FINE_PRUNING, "fewer epochs": FEWER_EPOCHS}
COSTS = ("\npruned", "over-\nhead", "\nsaved")

points = partial(written, style="+.2f")
per_cent = partial(written, style=".2f", unit=" %")


def networks(size: Size) -> tuple[str, ...]:
    """Return the networks that are trained, by the paper's names."""
    return PRUNING_NETWORKS if size.name == "full" else PRUNING_NETWORKS[:1]


def model_of(network: str) -> str:
    """Return what paceline calls a network of the paper.

    >>> [model_of(network) for network in ("LeNet", "VGG-13", "WRN-10")]
    ['lenet', 'vgg13', 'wrn10']
    """
    return network.replace("-", "").lower()


def training_jobs(size: Size) -> dict[tuple[str, str], Job]:
    """Return the jobs of both tables, by network and way."""
    trained = pruning_size(size, **LABORATORY).document

    def job(network: str, policy: str) -> Job:
        settings = {"size": trained, "model": model_of(network), "policy": policy}
        seconds = size.pick(2.0, 85.0, 1_600.0 if network == "LeNet" else 200_000.0)
        return Job(run_training, lambda seed: {**settings, "seed": seed}, seconds)

    return {(network, way): job(network, WAYS[way]) for network, way in product(networks(size), WAYS)}


def table_remarks(size: Size) -> Telling:
    """Yield what is smaller than in the paper, and what it does not state."""
    if size.name != "full":
        yield f"{SMALLER.format(**LABORATORY)} Images are averaged to 16x16; the other networks are left out."
    yield NOT_STATED


@experiment(
    "pruning-table-1",
    source="Data fine-pruning, table 1",
    question="time with and without pruning",
    minutes=4.5,
    full_hours=1500,
    data=("cifar10",),
    timed=True,
)
def table_1(size: Size) -> Telling:
    runs = yield training_jobs(size)
    seconds, sampling, samples = map(runs.mean, ("cpu_seconds", "sampling_seconds", "samples"))
    rows, saved, paper_saved = [], {}, {}
    for place, network in enumerate(PRUNING_NETWORKS):
        theirs = {name: values[place] for name, values in PRUNING_TABLE_1.items()}
        printed = [f"{theirs[name]:,.0f}" for name in ("regular", "pruned")]
        printed += [f"{theirs['overhead']:.2f}", f"{theirs['speedup']:.2f} %"]
        if network not in networks(size):
            rows.append((network, *printed, "-", "-", "-", "-"))
            continue
        whole, pruned = (network, "regular"), (network, "pruned")
        overhead = max(sampling[pruned] - sampling[whole], 0.0)  # in this order NaN stays NaN
        share = 1 - samples[pruned] / samples[whole]
        saved[network], paper_saved[network] = 1 - seconds[pruned] / seconds[whole], theirs["speedup"] / 100
        ours = [written(seconds[whole], ".1f"), written(seconds[pruned] - overhead, ".1f"), written(overhead, ".2f")]
        rows.append((network, *printed, *ours, per_cent(100 * saved[network])))
        lanes = {"pruned": seconds[pruned], "regular": seconds[whole]}
        yield ahead(f"{network}: quicker with pruning", lanes, best="low")
        yield within(
            f"{network}: the time saved is the share of the samples saved, to 1.5 points",
            saved[network] - share,
            least=-0.015,
            most=0.015,
            kind="shape",
            write=percent,
        )
        text, relative = f"{network}: the overhead is below 1 % of the time", overhead / seconds[whole]
        yield within(text, relative, most=0.01, kind="shape", write=partial(written, style=".2%"))
        yield Numbers({network: {**lanes, "overhead": overhead, "saved": saved[network], "samples": share}})

    yield PlainTable(
        title="Seconds of training",
        headings=("network", "paper:\nregular", *COSTS, "ours:\nregular", *COSTS),
        rows=rows,
        caption="Pruned is without the overhead. Ours are seconds of one core (CPU time), the paper's those of a GTX "
        "1080 Ti.",
    )
    yield bar_chart(
        "saved",
        "Time saved",
        "By pruning, of the time without it.",
        list(saved),
        {"paper": list(paper_saved.values()), "ours": list(saved.values())},
        y="time saved",
        percent=True,
    )
    yield from table_remarks(size)
    yield "So many sit out that 15 % of the samples are saved."


@experiment(
    "pruning-table-2",
    source="Data fine-pruning, table 2",
    question="accuracy with and without pruning",
    minutes=4.5,
    full_hours=1500,
    data=("cifar10",),
    timed=True,
)
def table_2(size: Size) -> Telling:
    runs = yield training_jobs(size)
    best, last = runs.mean("best_three"), runs.mean("last_three")
    behind = [regular - pruned for regular, pruned in zip(*PRUNING_TABLE_2.values(), strict=True)]
    most = max(behind)
    rows = []
    for place, network in enumerate(PRUNING_NETWORKS):
        printed = [f"{PRUNING_TABLE_2[name][place]:.2f}" for name in ("regular", "pruned")] + [points(behind[place])]
        if network not in networks(size):
            rows.append((network, *printed, "-", "-", "-", "-"))
            continue
        regular, pruned, fewer = (best[network, way] for way in WAYS)
        ours = [written(regular, ".2f"), written(pruned, ".2f"), points(regular - pruned), points(regular - fewer)]
        rows.append((network, *printed, *ours))
        text = f"{network}: at most {most:.2f} points behind regular training"
        yield within(text, regular - pruned, most=most + 1e-9, write=points)
        text = f"{network}: above as much saved by fewer epochs"
        yield ahead(text, {"pruned": pruned, "fewer epochs": fewer}, best="high", write=per_cent)
        yield within(
            f"{network}: behind by the mean of the last three epochs, which no lucky epoch helps",
            last[network, "regular"] - last[network, "pruned"],
            most=most,
            write=points,
            judged=False,
        )
        means = {"best_three": best, "last_three": last}
        yield Numbers({network: {name: {way: each[network, way] for way in WAYS} for name, each in means.items()}})

    yield PlainTable(
        title="Test accuracy in per cent, the mean of the best three epochs",
        headings=("network", "paper:\nregular", "\npruned", "\nbehind", "ours:\nregular", "\npruned", "\nbehind",
                  "fewer epochs\nbehind"),
        rows=rows,
        caption="Behind is regular training minus this. Fewer epochs save as many samples, without a method.",
    )  # fmt: skip
    yield bar_chart(
        "accuracy",
        "Test accuracy, best three epochs",
        "Without pruning, with it, and with fewer epochs.",
        list(networks(size)),
        {way: [best[network, way] / 100 for network in networks(size)] for way in WAYS},
        y="test accuracy",
        percent=True,
    )
    yield from table_remarks(size)
    yield "The runs are those of pruning-table-1. Fewer epochs is a control of ours, with 15 % fewer."
