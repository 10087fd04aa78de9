"""Samples of one prompt: the first (the leader) computes the prompt, the others wait and share its pages."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.contracts.request import Request, Status


def join_samples(requests: Sequence[Request]) -> list[Request]:
    """Links the samples to the first. Returns those that wait for it."""
    leader = requests[0]
    leader.siblings = list(requests[1:])
    for sibling in leader.siblings:
        sibling.leader = leader
    return leader.siblings


def leader_to_fork(request: Request, step: int) -> Request | None:
    """The leader whose pages `step` can copy; None if there is none. Page copies run before the writes of the same
    step, so an earlier step must have launched the whole prompt. Leader and request must use the same rope factors."""
    leader = request.leader
    if (
        leader is not None
        and leader.status is Status.RUNNING
        and leader.computed >= leader.num_known
        and leader.known_launched_at < step
        and leader.long_rope == request.long_rope
    ):
        return leader
    return None


def detach_from_leader(request: Request) -> None:
    """The request no longer needs its leader."""
    leader, request.leader = request.leader, None
    if leader is not None and request in leader.siblings:
        leader.siblings.remove(request)


def take_siblings(leader: Request) -> list[Request]:
    """Unlinks and returns the samples that wait for this leader: its prompt is launched, or it ended."""
    siblings, leader.siblings = leader.siblings, []
    return siblings
