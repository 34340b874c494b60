"""The sections of a recipe, one frozen dataclass each. What a setting may be stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.codecs import CODECS
from paceline.data import DATASETS
from paceline.lookup import unknown
from paceline.models import MODELS
from paceline.settings import Checked, SettingError, refuse_settings_of_others, setting
from paceline.strategies import STRATEGIES
from paceline.strategies.averaging import AVERAGING
from paceline.strategies.averaging.members import MOST_PERIOD

CROSS_ENTROPY = "cross-entropy"
DELAYS = ("shifted-exponential", "pareto", "slow-worker", "recorded")
MOST_NUMBERS = 2**32  # of synthetic data: 16 GiB
SPLIT_KINDS = ("iid", "non-iid", "dirichlet")


@dataclass(frozen=True, kw_only=True)
class DataSection(Checked):
    """Which samples, and who holds them.

    >>> DataSection(classes_per_worker=1).name
    'digits'
    """

    name: str = setting(
        "digits", "data set, or your own as module:factory", choices=lambda: DATASETS, alias="data", code=True
    )
    directory: str = setting(
        "", "folder with the data set's files; empty: $PACELINE_DATA or ~/.cache/paceline", alias="data-directory"
    )
    download: bool = setting(True, "fetch missing files where there is a network")
    split: str = setting(
        "auto",
        "how samples are dealt to workers; auto: non-iid by their labels, iid if they have none",
        choices=lambda: ("auto", *SPLIT_KINDS),
        alias="split",
    )
    classes_per_worker: int | None = setting(
        None,
        "non-iid: classes that each worker holds; none: 3, or as many as it takes so that each class is held",
        least=1,
        most=10_000,
        alias="classes-per-worker",
    )
    alpha: float = setting(0.5, "dirichlet: small is skewed, large is even", above=0, most=1e9, alias="alpha")
    augment: bool | Literal["extended"] = setting(
        False,
        "true: random crops and flips, as is usual for CIFAR-10; extended: scale, aspect ratio and colours vary too",
        choices=lambda: ("extended",),
    )
    samples: int = setting(2000, "synthetic: training samples", least=1, most=10_000_000)
    classes: int = setting(10, "synthetic: classes", least=2, most=10_000)
    channels: int = setting(3, "synthetic: channels", least=1, most=64)
    size: int = setting(16, "synthetic: height and width", least=1, most=512)

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = self.samples * self.channels * self.size**2
        if self.name == "synthetic" and numbers > MOST_NUMBERS:
            given = f"samples={self.samples}, channels={self.channels}, size={self.size}"
            raise SettingError(
                ("samples",), f"samples x channels x size x size must be at most {MOST_NUMBERS:,} ({given})"
            )


@dataclass(frozen=True, kw_only=True)
class ModelSection(Checked):
    """Which network, and what it is trained to make small.

    >>> ModelSection().name
    'mlp'
    """

    name: str = setting("mlp", "a network by name, or your own as module:factory", alias="model", code=True)
    norm: str = setting("", "batch, group or none, where the network has the choice; empty: its default")
    loss: str = setting(
        CROSS_ENTROPY, "loss, or your own as module:function", choices=lambda: (CROSS_ENTROPY,), alias="loss", code=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if ":" not in self.name and self.name not in MODELS:
            raise SettingError(("name",), str(unknown("model", self.name, MODELS)))
        norms = MODELS[self.name].norms if self.name in MODELS else ()
        if self.norm and self.norm not in norms:
            hint = f"choose from {', '.join(norms)}" if norms else "it has no normalisation to choose; leave norm out"
            raise SettingError(("norm",), f"unknown norm {self.norm!r} for {self.name}; {hint}")


@dataclass(frozen=True, kw_only=True)
class WorkerSection(Checked):
    """What a worker does in a round.

    >>> WorkerSection(batch_size=32, blocks=5)
    Traceback (most recent call last):
    paceline.settings.SettingError: blocks must divide the batch evenly (blocks=5, batch_size=32)
    """

    batch_size: int = setting(32, "samples of a worker's batch", least=1, most=1_000_000, alias="batch-size")
    blocks: int = setting(
        4, "equal parts of a batch; a late worker stops between two", least=1, most=1_000_000, alias="blocks"
    )
    shares: Literal["equal", "speed"] = setting(
        "equal",
        "full, fastest-k, lgc: equal: the same batch for every worker; speed: a slow one gets fewer samples, a fast "
        "one more, batch_size on average",
        choices=lambda: ("equal", "speed"),
        alias="shares",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.blocks:
            raise SettingError(
                ("blocks",),
                f"blocks must divide the batch evenly (blocks={self.blocks}, batch_size={self.batch_size})",
            )


@dataclass(frozen=True, kw_only=True)
class ClusterSection(Checked):
    """How many workers; in simulated runs, what becomes of late work.

    >>> ClusterSection(workers=20).late_work
    'complete'
    """

    workers: int = setting(10, "workers", least=1, most=10_000_000, alias="workers")
    late_work: Literal["complete", "partial"] = setting(
        "complete",
        "simulated runs: complete: late gradients come whole, for nothing (the paper); partial: what really happens",
        choices=lambda: ("complete", "partial"),
        alias="late-work",
    )
    late_blocks: int | Literal["random"] | None = setting(
        None,
        "simulated runs, late_work complete: blocks that a late worker has done, or a random number; none: all",
        least=1,
        most=1_000_000,
        choices=lambda: ("random",),
        alias="late-blocks",
    )


@dataclass(frozen=True, kw_only=True)
class DelaySection(Checked):
    """How long a worker computes on a batch, in simulated runs or with inject.

    >>> DelaySection(persistence=50).name
    'shifted-exponential'
    """

    name: str = setting("shifted-exponential", "delay model", choices=lambda: DELAYS, alias="delay")
    persistence: int = setting(
        10, "batches for which a worker keeps its delay", least=1, most=10**9, alias="persistence"
    )
    shift_seconds: float = setting(0.05, "shifted-exponential, slow-worker: the fixed part", least=0, most=1e6)
    mean_seconds: float = setting(0.02, "shifted-exponential, slow-worker: mean of the random part", least=0, most=1e6)
    scale_seconds: float = setting(0.05, "pareto: the shortest delay", above=0, most=1e6)
    shape: float = setting(2.5, "pareto: smaller is a heavier tail", above=1, most=1e6)
    slow_workers: int = setting(1, "slow-worker: how many are slow for ever", least=0, most=10_000_000)
    slow_factor: float = setting(5.0, "slow-worker: how many times slower they are", above=0, most=1e6)
    fixed_seconds: float = setting(
        0.0, "the part of a batch's seconds that is the same for a batch of any size", least=0, most=1e6
    )
    inject: bool = setting(False, "real runs: slow the workers down to these times", alias="inject-delays")
    file: str = setting(
        "",
        "recorded: CSV file, a line per batch (persistence does not apply), a column of seconds per worker",
        alias="delay-file",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name in ("shifted-exponential", "slow-worker") and self.shift_seconds + self.mean_seconds == 0:
            raise SettingError(
                ("shift_seconds",), "shift_seconds and mean_seconds must not both be 0: no time would ever pass"
            )
        if self.name == "recorded" and not self.file:
            raise SettingError(("file",), "recorded delays need a file; give delay.file")
        usual = self.usual_seconds
        if usual is not None and self.fixed_seconds > usual:
            raise SettingError(("fixed_seconds",), fixed_seconds_refusal(self.fixed_seconds, usual))

    @property
    def usual_seconds(self) -> float | None:
        """The mean delay of a worker that is not slow; None where it is in a file.

        >>> DelaySection(shift_seconds=0.5, mean_seconds=0.25).usual_seconds
        0.75
        """
        if self.name == "pareto":
            return self.scale_seconds * self.shape / (self.shape - 1)
        return None if self.name == "recorded" else self.shift_seconds + self.mean_seconds


def fixed_seconds_refusal(fixed_seconds: float, usual_seconds: float) -> str:
    """Return why delays cannot have so large a fixed part."""
    return (
        f"fixed_seconds must be at most the mean delay, {usual_seconds:.6g} s, of which it is a part "
        f"(fixed_seconds={fixed_seconds:g})"
    )


@dataclass(frozen=True, kw_only=True)
class StrategySection(Checked):
    """When to step, and with whose gradients; or when to average.

    >>> StrategySection(name="fastest-k", k=3).k
    3
    """

    name: str = setting("lgc", "strategy", choices=lambda: (*STRATEGIES, *AVERAGING), alias="strategy")
    k: int | Literal["auto"] | None = setting(
        None,
        "fastest-k, lgc: gradients that close a round; none: seven tenths of the workers; auto: chosen as it goes",
        least=1,
        most=10_000_000,
        choices=lambda: ("auto",),
        alias="k",
    )
    warmup_rounds: int = setting(
        0, "fastest-k, lgc: rounds that begin as full", least=0, most=10**7, alias="warmup-rounds"
    )
    on: Literal["server", "ranks"] = setting(
        "server",
        "full, fastest-k, lgc: who adds up a round: a server, or the ranks of a launch by all-reduce; "
        "`train` also takes ray and slurm, which start processes elsewhere",
        choices=lambda: ("server", "ranks"),
        alias="on",
    )
    scale_partial: bool | Literal["samples", "auto"] = setting(
        "auto",
        "lgc: weigh late work by its samples among all that were computed (samples); true: by the share of blocks done "
        "(the paper); false: as if it were whole; auto: samples",
        choices=lambda: ("samples", "auto"),
    )
    staleness_scaling: bool = setting(True, "async: weigh a gradient down by its staleness")
    period: int | Literal["auto"] = setting(
        "auto",
        "local steps between two averages; auto: 8, for diloco 100, for hpsgd 1 and as many as one takes",
        least=1,
        most=MOST_PERIOD,
        choices=lambda: ("auto",),
        alias="period",
    )
    overlap: bool = setting(False, "bmuf, diloco: train on while an average is under way", alias="overlap")
    rebase: bool | Literal["auto"] = setting(
        "auto",
        "hpsgd; bmuf, diloco with overlap: a worker keeps its own change in flight; auto: yes; false: the paper",
        choices=lambda: ("auto",),
        alias="rebase",
    )
    normalize: bool = setting(False, "averaging: scale every change to the mean number of steps", alias="normalize")
    outer_rate: float | Literal["auto"] = setting(
        "auto", "bmuf, diloco: what a mean change is multiplied by", above=0, most=100, choices=lambda: ("auto",)
    )
    outer_momentum: float | Literal["auto"] = setting(
        "auto", "bmuf, diloco: momentum of mean changes", least=0, most=0.9999, choices=lambda: ("auto",)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "async" and self.on == "ranks":
            message = (
                "async has no rounds that ranks could add up (on=ranks); give on = server, or full, fastest-k or lgc"
            )
            raise SettingError(("on",), message)

    @property
    def rounds_on_ranks(self) -> bool:
        """Whether the ranks themselves add up the rounds of a strategy that has rounds."""
        return self.on == "ranks" and self.name in STRATEGIES

    @property
    def label(self) -> str:
        """The strategy as tables and charts name it.

        >>> StrategySection(on="ranks").label, StrategySection().label
        ('lgc@ranks', 'lgc')
        """
        return f"{self.name}@ranks" if self.rounds_on_ranks else self.name


CODEC_PLANS = ("auto", "all-reduce", "gather", "two-step")
CODEC_SETTINGS = {  # which codecs have a setting; repeated here so that reading a recipe need not load the codecs
    "levels": ("qsgd",),
    "bucket": ("qsgd", "int8-sum"),
    "norm": ("qsgd",),
    "lossless": ("qsgd", "sparsifier"),
    "fraction": ("top-k",),
    "rank": ("power-sgd",),
}


@dataclass(frozen=True, kw_only=True)
class CodecSection(Checked):
    """How gradients and parameters are encoded on the wire. A codec takes the settings it has; others are refused.

    >>> CodecSection(name="qsgd", levels=3).levels
    3
    """

    name: str = setting("identity", "codec", choices=lambda: CODECS, alias="codec")
    error_feedback: bool | Literal["auto"] = setting(
        "auto", "add what was lost to the next gradient; auto: where a codec is biased", choices=lambda: ("auto",)
    )
    levels: int = setting(7, "qsgd: levels besides zero, either sign", least=1, most=32_767, alias="levels")
    bucket: int = setting(512, "qsgd, int8-sum: elements that share a norm; 0: all", least=0, most=2**32 - 1)
    norm: str = setting("max", "qsgd: largest magnitude or Euclidean length", choices=lambda: ("max", "l2"))
    lossless: str = setting(
        "auto", "qsgd: how levels are coded; auto: as is usual", choices=lambda: ("auto", "packed", "elias", "entropy")
    )
    fraction: float = setting(0.01, "top-k: share of the elements that is sent", above=0, most=1)
    rank: int = setting(4, "power-sgd: rank of the factors", least=1, most=65_536)
    plan: str = setting(
        "auto",
        "how ranks come to the sum of what is encoded; auto: the quickest",
        choices=lambda: CODEC_PLANS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_settings_of_others(self, CODEC_SETTINGS, "codec")


@dataclass(frozen=True, kw_only=True)
class ServerSection(Checked):
    """When the server of a real run writes checkpoints, and how long it waits for workers.

    >>> ServerSection().checkpoint_every
    50
    """

    checkpoint_every: int = setting(50, "rounds between two checkpoints", least=1, most=10**7, alias="checkpoint-every")
    silence_seconds: float = setting(15.0, "a worker that is silent for so long is gone", least=1, most=86_400)
    stall_seconds: float = setting(
        120.0, "a worker that has work and gets no further for so long is gone", least=1, most=864_000
    )
    gather_seconds: float = setting(60.0, "longest wait for all workers before the first round", least=0, most=864_000)
    most_workers: int = setting(0, "workers that may be there at once; 0: twice as many as shards", least=0, most=10**6)
