"""Which workers take part in which broadcast: the core of `BroadcastPublisher`, without sockets, clocks and tensors.

Workers ask when they are ready for a version. Workers that ask close together meet in one broadcast; a worker that
comes later gets a broadcast of its own. A worker that cannot be served by broadcast asks for files.
"""

from dataclasses import dataclass
from typing import Literal

from mrl.records.rollouts import BroadcastRendezvous, WeightsRequest
from mrl.records.version import Version

WINDOW_S = 0.1
"""Seconds that the first worker to ask waits for others, where there are others."""


@dataclass(frozen=True, slots=True)
class WaitingWorker:
    """A worker that waits for an answer."""

    client: bytes
    request: WeightsRequest
    since_s: float


@dataclass(frozen=True, slots=True)
class DueAnswers:
    """Workers that can be answered now, by kind of answer."""

    outdated: list[WaitingWorker]
    """Workers that ask for a version that is not the newest any more."""
    readers: list[WaitingWorker]
    """Workers that are to read the files of the newest version."""
    party: list[WaitingWorker]
    """Workers that are to take part in one broadcast of the newest version."""
    invited: list[tuple[WaitingWorker, BroadcastRendezvous]]
    """Workers that ask once more although they were sent to a meeting: that answer may be lost."""


class BroadcastRequests:
    """Requests that are not answered yet, one of each worker."""

    def __init__(self) -> None:
        self._asking: dict[str, WaitingWorker] = {}
        self._invited: dict[str, tuple[int, BroadcastRendezvous]] = {}
        """Worker that was sent to a meeting -> attempt of its request, and the meeting."""
        self._again: dict[str, WaitingWorker] = {}

    def ask(self, client: bytes, request: WeightsRequest, now_s: float) -> None:
        """Take in a request, which may be a repetition; a worker's newest request counts."""
        if request.worker in self._invited and self._invited[request.worker][0] == request.attempt:
            self._again[request.worker] = WaitingWorker(client, request, now_s)
            return
        before = self._asking.get(request.worker)
        is_same = before is not None and before.request == request
        self._asking[request.worker] = WaitingWorker(client, request, before.since_s if before and is_same else now_s)

    def invite(self, asking: WaitingWorker, meeting: BroadcastRendezvous) -> None:
        """Note that a worker was sent to a meeting: a repetition of its request, which may cross it, is no new one."""
        self._invited[asking.request.worker] = asking.request.attempt, meeting

    def due(
        self, newest: Version | None, now_s: float, *, num_workers: int, can_send: bool, has_files: bool
    ) -> DueAnswers:
        """Take out workers that can be answered; while there is no newest version, only those invited before.

        `num_workers` are known: once all of them have asked, no other is waited for.
        """
        invited = [(one, self._invited[worker][1]) for worker, one in self._again.items()]
        self._again.clear()
        if newest is None:
            return DueAnswers([], [], [], invited)
        asking = list(self._asking.values())
        outdated = [one for one in asking if one.request.version != newest]
        current = [one for one in asking if one.request.version == newest]
        readers = [one for one in current if not one.request.num_ranks] if has_files else []
        party = [one for one in current if one.request.num_ranks]
        waited_s = max((now_s - one.since_s for one in party), default=0.0)
        if not can_send or (len(party) < num_workers and waited_s < WINDOW_S):
            party = []
        for one in (*outdated, *readers, *party):
            del self._asking[one.request.worker]
        return DueAnswers(outdated, readers, party, invited)

    def wants_files(self, newest: Version | None) -> bool:
        """Whether any worker waits for the files of the newest version."""
        return any(one.request.version == newest and not one.request.num_ranks for one in self._asking.values())


def backend_of(party: list[WaitingWorker], own_gpu: str, own_nccl: str) -> Literal["gloo", "nccl"]:
    """Return "nccl" where every member, the learner too, has a GPU of its own and the same NCCL; otherwise "gloo"."""
    return "nccl" if _is_apart(party, own_gpu) and not other_nccl(party, own_gpu, own_nccl) else "gloo"


def other_nccl(party: list[WaitingWorker], own_gpu: str, own_nccl: str) -> set[str]:
    """Return versions of NCCL that differ from the learner's and alone prevent its use: NCCL refuses other versions."""
    return {one.request.nccl for one in party} - {own_nccl} if _is_apart(party, own_gpu) else set()


def _is_apart(party: list[WaitingWorker], own_gpu: str) -> bool:
    gpus = [own_gpu, *(one.request.gpu for one in party)]
    return all(gpus) and len(set(gpus)) == len(gpus)
