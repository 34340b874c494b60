"""A cluster of Ray's: how a run comes to it, and what it has, in words.

this process has called ray.init         that cluster is used, and stays connected
address="10.0.0.7:6379", RAY_ADDRESS     that cluster, for as long as the run lasts
none of these, a cluster on this host    that one (Ray finds it by itself)
nothing at all                           a Ray of this process alone, which ends with the run
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.lazy import need_extra
from paceline.quantities import counted


class RayTrainingError(PacelineError, OSError):
    """A run on Ray that cannot go on: its workers or its server fail again and again.

    >>> raise RayTrainingError("the server died 3 times without getting further")
    Traceback (most recent call last):
    paceline.ray.connection.RayTrainingError: the server died 3 times without getting further
    """


class RayResourcesError(RayTrainingError):
    """No node of the cluster has had what a run demands, for as long as it was to wait."""


class RayMissingError(PacelineError, ModuleNotFoundError):
    """Ray is not installed here.

    >>> raise RayMissingError("paceline.ray needs ray: pip install 'paceline[ray]'")
    Traceback (most recent call last):
    paceline.ray.connection.RayMissingError: paceline.ray needs ray: pip install 'paceline[ray]'
    """


def require_ray() -> Any:
    """Return Ray's module; RayMissingError says how to install it."""
    try:
        need_extra("ray", "ray")
    except ModuleNotFoundError as error:
        raise RayMissingError(f"{error}, and the same on every node", name=error.name) from None
    import ray

    return ray


@contextmanager
def connected(address: str | None, runtime_env: Mapping[str, Any] | None, *, quiet: bool = False) -> Iterator[bool]:
    """Be connected to a cluster for the `with`, which yields whether this process has started one of its own."""
    ray = require_ray()
    named = address if address is not None else os.environ.get("RAY_ADDRESS", "")
    if named.startswith("ray://") or ray.util.client.ray.is_connected():
        raise ValueError(
            "a run cannot be called through Ray Client (ray://), whose caller is on no node: call it on a node of the "
            "cluster, or by `ray job submit`"
        )
    if ray.is_initialized():
        if address is not None or runtime_env is not None:
            what = "address" if address is not None else "runtime_env"
            raise ValueError(f"{what} is given, and this process is connected to Ray already: give it to ray.init")
        yield False
        return
    level = logging.WARNING if quiet else logging.INFO
    given = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
    try:
        context = ray.init(address=address, log_to_driver=not quiet, logging_level=level, **given)
    except ConnectionError as error:
        where = f"at {named!r}" if named else "to be found"
        raise RayTrainingError(f"there is no Ray cluster {where}: {error}") from error
    try:
        yield _is_of_this_process(context)
    finally:
        ray.shutdown()


def _is_of_this_process(context: Any) -> bool:
    """Whether `ray.init` has started a cluster; nobody else knows of it, and it ends with this process."""
    from ray._private.worker import global_worker

    node = getattr(global_worker, "node", None)
    return bool(node is not None and node.is_head())


# -- what a cluster has ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """What a living node has in all."""

    node: str
    address: str
    total: dict[str, float]

    def holds(self, demand: Mapping[str, float]) -> bool:
        """Return whether the node could ever hold what is demanded.

        >>> NodeResources(node="a", address="10.0.0.7", total={"CPU": 4.0}).holds({"CPU": 2.0, "GPU": 1.0})
        False
        """
        return all(self.total.get(name, 0.0) >= number for name, number in demand.items())


def living_nodes() -> list[NodeResources]:
    """Return the nodes of the cluster that are alive."""
    return [
        NodeResources(
            node=str(each["NodeID"]), address=str(each["NodeManagerAddress"]), total=dict(each.get("Resources", {}))
        )
        for each in require_ray().nodes()
        if each["Alive"]
    ]


def demand_text(demand: Mapping[str, float]) -> str:
    """Return a demand in words.

    >>> demand_text({"CPU": 2.0, "GPU": 0.5})
    'CPU 2, GPU 0.5'
    """
    return ", ".join(f"{name} {number:g}" for name, number in demand.items() if number) or "nothing"


def cluster_text(demand: Mapping[str, float]) -> str:
    """Return what the cluster has of the kinds that are demanded, node by node, and what of it is free."""
    nodes, free = living_nodes(), require_ray().available_resources()
    names = [name for name, number in demand.items() if number]
    each = [f"{node.address} {demand_text({name: node.total.get(name, 0.0) for name in names})}" for node in nodes]
    shown = "; ".join(each[:8]) + (f"; and {len(each) - 8} more" if len(each) > 8 else "")
    unused = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in names)
    return f"the cluster has {counted(len(nodes), 'node')} ({shown}), of which {unused or 'nothing'} is free"
