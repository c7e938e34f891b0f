"""The units of a study: one after the other, or spread over the workers of a Ray cluster.

Each result is handed on as soon as it is there, so that whoever asked can write it at once. A unit depends on nothing
but its arguments: where it runs changes no number, as long as the machines and their numbers of threads are alike.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from latedrop.errors import ArgumentError

__all__ = ["Cluster", "cluster_options", "spread"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cluster:
    """Where units run.

    Attributes:
        ray: `"local"`, `"auto"` or an address; None: here, one after the other.
        gpus: that each unit takes of a worker; a part of one where several share it.
    """

    ray: str | None = None
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.gpus <= 64:
            raise ArgumentError(f"expected --gpus from 0 to 64 for each unit; found {self.gpus}.")
        if self.gpus and self.ray is None:
            raise ArgumentError("expected --gpus with --ray; found it alone. Here --device says what a study runs on.")

    def resources(self) -> dict[str, float]:
        """What Ray gives each unit."""
        return {"num_cpus": 1, **({"num_gpus": self.gpus} if self.gpus else {})}


def cluster_options(parser: ArgumentParser) -> None:
    """Add what asks for a cluster."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="spread the units over Ray's workers: on this machine, or of the cluster at an address or auto",
    )
    parser.add_argument(
        "--gpus", type=float, default=0.0, help="with --ray, GPUs that each unit takes; 0.5 is half of one"
    )


def spread(jobs: Mapping[str, Callable[[], Result]], cluster: Cluster) -> Iterator[tuple[str, Result]]:
    """Names and results, each when it is there; on a cluster that is in no order."""
    if cluster.ray is None:
        for name, job in jobs.items():
            yield name, job()
        return
    from latedrop.adapters.ray import cause, connected

    with connected(cluster.ray) as ray:
        there = ray.cluster_resources().get("GPU", 0)
        if there < cluster.gpus:
            raise ArgumentError(
                f"expected a cluster with {cluster.gpus:g} GPUs or more for each unit; found {there:g} in all. Leave "
                "--gpus out, or start workers that have some."
            )
        run: Any = ray.remote(**cluster.resources(), max_retries=3)(_run)
        waiting = {run.remote(job): name for name, job in jobs.items()}
        try:
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                yield waiting.pop(done), ray.get(done)
        except ray.exceptions.RayError as error:
            raise cause(error) from error
        finally:
            for left in waiting:
                ray.cancel(left, force=True)


def _run(job: Callable[[], Result]) -> Result:
    return job()
