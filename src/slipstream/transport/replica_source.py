"""Chooses what starts the cores of an engine: this process, processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.base.errors import InvalidOption
from slipstream.config.options import Options
from slipstream.transport.replica_start import ReplicaProcesses, num_replicas
from slipstream.transport.replicas import ReplicaSource


class CountedSource(ReplicaSource, Protocol):
    @property
    def count(self) -> int:
        """Number of replicas."""


def has_replicas(options: Sequence[Options]) -> bool:
    """Whether cores are started by `open_replicas`: several of them, or one on a Ray cluster."""
    return num_replicas(options) > 1 or _uses_ray(options)


def open_replicas(options: Sequence[Options]) -> CountedSource:
    if not _uses_ray(options):
        return ReplicaProcesses(options)
    from slipstream.transport.ray_replicas import RayReplicas

    return RayReplicas(options)


def _uses_ray(options: Sequence[Options]) -> bool:
    backends = {each.distributed_executor_backend for each in options}
    if "ray" in backends and len(backends) > 1:
        raise InvalidOption("models of one engine run in the same processes; give all distributed_executor_backend ray")
    return "ray" in backends
