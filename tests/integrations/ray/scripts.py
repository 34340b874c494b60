"""Scripts that call `paceline.ray.train` on the cluster that RAY_ADDRESS names; what came of them is the last line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
import torch

import paceline
import paceline.ray
from paceline.recipes import Recipe
from tests.docs.pages import blocks


def failing_data():
    """Return data in the server's process, and fail in that of every worker."""
    if "paceline worker" in Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode():
        raise ValueError("no data here")
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return (inputs, (inputs[:, 0] > 0).long()), (inputs[:16], (inputs[:16, 0] > 0).long())


def net():
    return torch.nn.Linear(4, 2)


def error_of(recipe, **settings):
    try:
        return repr(paceline.ray.train(recipe, **settings).outcome)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    ray.init(logging_level="warning", log_to_driver=False)
    found, names = {}, {}
    for block in blocks("ray.md"):
        if "trained = paceline.ray.train(" in block:
            exec(compile(block, "docs/ray.md", "exec"), names)
            trained = names["trained"]
            found.setdefault("page", []).append([trained.result.rounds, trained.outcome.finished])
    # With `full` and nothing to be late, what is computed depends on the recipe alone, wherever it is computed.
    here = paceline.train(names["recipe"], data=names["data"], model=names["net"], out="runs/here")
    found["same"] = bool(torch.equal(trained.result.parameters, here.result.parameters))
    recipe = Recipe(rounds=12).with_settings(cluster={"workers": 1}, strategy={"name": "full"})
    found["resources"] = error_of(recipe, out="runs/room", cpus_per_worker=64, resources_seconds=2)
    found["failing"] = error_of(recipe, data=failing_data, model=net, out="runs/failing")
    found["code"] = error_of(recipe.with_settings(model={"name": "nowhere_at_all:net"}), out="runs/code")
    found["folders"] = sorted(path.name for path in Path("runs").iterdir())
    print("found " + json.dumps(found), flush=True)


if __name__ == "__main__":
    from tests.integrations.ray import scripts  # so that Ray sends functions by their names

    sys.exit(scripts.main())
