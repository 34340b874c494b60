"""Every benchmark by its name on the command line. A new one is its file and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.options import Options


@dataclass(frozen=True)
class Benchmark:
    """One line of the table: where the benchmark is ('module:function') and what it measures."""

    location: str
    description: str

    def load(self) -> Callable[[Options], None]:
        """The function that runs it; only now is torch imported."""
        module, function = self.location.split(":")
        run: Callable[[Options], None] = getattr(importlib.import_module(module), function)
        return run


BENCHMARKS = MappingProxyType(
    {
        "claims": Benchmark("benchmarks.claims:run", "the paper's claims: time saved by lgc, and at what loss"),
        "choice-of-k": Benchmark("benchmarks.choice_of_k:run", "k=auto against every fixed K, by time to target"),
        "late-weights": Benchmark(
            "benchmarks.late_weights:run", "partial late work: scaled, unscaled or by samples, by loss and accuracy"
        ),
        "gradients": Benchmark("benchmarks.gradients:run", "all workers' gradients in one pass against a loop"),
        "timing": Benchmark("benchmarks.timing:run", "seconds and memory for the times of 100,000 workers"),
        "cluster": Benchmark("benchmarks.cluster:run", "real runs: time saved by lgc, replayed, and as simulated"),
        "overhead": Benchmark("benchmarks.overhead:run", "a round of the parameter server against gloo's all-reduce"),
        "server-memory": Benchmark("benchmarks.server_memory:run", "the server's memory in multiples of its model"),
        "diagnosis": Benchmark(
            "benchmarks.diagnosis:run", "one of four is slowed down: does diagnose name it, and where"
        ),
        "false-alarms": Benchmark(
            "benchmarks.false_alarms:run", "synthetic runs: whom diagnose names where nobody is slow"
        ),
        "slow-link": Benchmark("benchmarks.slow_link:run", "rounds of the server over links of 512 kbit/s"),
        "codecs": Benchmark("benchmarks.codecs:run", "quantising codecs against a plain copy and against eager torch"),
        "corrupt": Benchmark(
            "benchmarks.corrupt:run", "damaged and forged files of every kind, refused or as they were"
        ),
        "hostile": Benchmark("benchmarks.hostile:run", "altered and made-up payloads, refused or borne by every codec"),
        "links": Benchmark("benchmarks.links:run", "a DDP step at 2, 4, 8 ranks, 200 Mbit/s each: codecs, torch hooks"),
        "plans": Benchmark("benchmarks.plans:run", "every plan of every codec against the one that compress chooses"),
        "codec-losses": Benchmark("benchmarks.codec_losses:run", "losses of four ranks by plan and codec, same steps"),
        "averaging": Benchmark("benchmarks.averaging:run", "four ranks over 200 Mbit/s: hpsgd, its sisters, DDP"),
        "scale": Benchmark("benchmarks.scale:run", "scale efficiency of averaging at 4 to 1,024 simulated workers"),
        "averaging-accuracy": Benchmark(
            "benchmarks.averaging_accuracy:run", "accuracy of hpsgd and local-sgd beside ssgd's, same samples"
        ),
        "optimizers": Benchmark("benchmarks.optimizers:run", "a step of LARS against torch's SGD and others' LARS"),
        "large-batch": Benchmark("benchmarks.large_batch:run", "LARS against SGD at large batches: tuned, then tested"),
        "pruning": Benchmark("benchmarks.pruning:run", "samples and time that pruning saves, and at what accuracy"),
        "pruning-overhead": Benchmark(
            "benchmarks.pruning_overhead:run", "the bookkeeping of an epoch of pruning: time, memory, a loader's epoch"
        ),
        "pipeline-balance": Benchmark(
            "benchmarks.pipeline_balance:run", "the slowest stage of our cut against equal counts and torchgpipe's"
        ),
        "pipeline-idle": Benchmark(
            "benchmarks.pipeline_idle:run", "idle share of a pipeline: by formula, counted, predicted, measured"
        ),
        "pipeline-placement": Benchmark(
            "benchmarks.pipeline_placement:run", "seconds for the exact cut of 1,000 layers over 64 devices"
        ),
        "plan-beside-load": Benchmark(
            "benchmarks.plan_beside_load:run", "cuts planned beside busy loops against those of a quiet machine"
        ),
        "lgc-ranks": Benchmark(
            "benchmarks.lgc_ranks:run", "lgc without a server beside DDP, all-reduce and the server"
        ),
        "shares": Benchmark("benchmarks.shares:run", "batches by speed under DDP: pace against the ideal, overhead"),
        "shares-lgc": Benchmark(
            "benchmarks.shares_lgc:run", "one rank always slow, all now and then: shares by speed, lgc, and both"
        ),
        "trainer": Benchmark(
            "benchmarks.trainer:run", "Hugging Face's Trainer over 200 Mbit/s: hpsgd with qsgd against its DDP"
        ),
        "watch": Benchmark("benchmarks.watch:run", "processor time that paceline.watch adds to a step of DDP"),
        "what-if": Benchmark("benchmarks.what_if:run", "alternatives of recorded runs: predicted, and run for real"),
        "soak": Benchmark("benchmarks.soak:run", "random faults against one real run, which must go on"),
    }
)
