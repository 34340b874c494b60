"""`paceline train --on ray`: the command's view, table and report page of a run whose processes are Ray's.

The cluster is the one that --ray-address or RAY_ADDRESS names (`ray job submit` sets it), one that runs on this host,
or else a Ray that ends with the command. Code of the user's own (`--model module:name`) is what Ray's nodes find:
--ray-working-dir sends it, as does `ray job submit --working-dir .`.
"""

from __future__ import annotations

import functools
import shlex

from paceline.cli.cluster import RAY_OPTIONS, TrainOptions, check_resume_alone, recipe_to_begin, train_served
from paceline.cli.options import UsageError
from paceline.cli.output import is_ranks_run
from paceline.lazy import need_extra


def train(options: TrainOptions, overrides: dict[str, str]) -> None:
    """Train on a cluster of Ray's; show and leave what `paceline train` does."""
    try:
        need_extra("ray", "ray")
    except ModuleNotFoundError as error:
        raise UsageError(f"--on ray: {error}, and the same on every node") from None
    if options.listen != TrainOptions().listen:
        raise UsageError("--listen is for a server on this machine: on Ray it listens at the address of its node")
    check_resume_alone(options, overrides)
    if options.resume and is_ranks_run(options.resume):
        raise UsageError(f"{options.resume} is a run of ranks, which Ray does not carry out: leave out --on ray")
    recipe = recipe_to_begin(options, overrides)
    from paceline.ray.run import Demands
    from paceline.ray.training import refuse_elsewhere, train_on_ray

    if not options.resume:
        refuse_elsewhere(recipe)  # before a folder is made
    train_served(
        options,
        recipe,
        functools.partial(
            train_on_ray,
            address=options.ray_address or None,
            runtime_env={"working_dir": options.ray_working_dir} if options.ray_working_dir else None,
            demands=Demands(cpus_per_worker=options.ray_cpus_per_worker),
            quiet=True,
        ),
        command="train",
        greeting="server at {address}, on Ray; waiting for {workers} workers",
        overrides=overrides,
        to_repeat=_repeated(options),
    )


def _repeated(options: TrainOptions) -> str:
    """Return the options that name the cluster and its use: a run that goes on is given them again.

    >>> _repeated(TrainOptions(ray_address="10.0.0.7:6379"))
    ' --on ray --ray-address 10.0.0.7:6379'
    """
    given = {
        f"--{name.replace('_', '-')}": str(getattr(options, name))
        for name in RAY_OPTIONS
        if getattr(options, name) != getattr(TrainOptions(), name)
    }
    return " " + shlex.join(["--on", "ray", *(word for pair in given.items() for word in pair)])
