"""The samples of one prompt: the first leads and computes it, the others wait for its pages."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.request import Request, Status


def join_samples(requests: Sequence[Request]) -> list[Request]:
    """Returns those that wait for the first."""
    leader = requests[0]
    leader.siblings = list(requests[1:])
    for sibling in leader.siblings:
        sibling.leader = leader
    return leader.siblings


def leader_to_fork(request: Request, step: int) -> Request | None:
    """Its leader, if `step` may copy from its pages: copies are made before the step's own writes, so all of the
    prompt must have been launched by an earlier one. The leader's keys must have the request's rope factors."""
    leader = request.leader
    if (
        leader is not None
        and leader.status is Status.RUNNING
        and leader.computed >= leader.num_known
        and leader.caught_up < step
        and leader.long_rope == request.long_rope
    ):
        return leader
    return None


def leave_leader(request: Request) -> None:
    """It needs its leader no more."""
    leader, request.leader = request.leader, None
    if leader is not None and request in leader.siblings:
        leader.siblings.remove(request)


def take_siblings(leader: Request) -> list[Request]:
    """Those that need not wait for it any longer, for better or worse."""
    siblings, leader.siblings = leader.siblings, []
    return siblings
