"""Publishing by broadcast: the newest version stays in memory, and goes to the engines that ask for it.

The learner's thread copies a version and goes on training. The thread of its link to the workers answers requests and
never waits. A third thread sends, with a bound on every wait. For workers whose broadcast failed, it writes the version
as files, and they are told where.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import PeerLost, RoleFailed
from mrl.models.parameters import TensorSource
from mrl.models.tensor_broadcast import (
    BroadcastGroup,
    file_store,
    gpu_id,
    nccl_version,
    numbered,
    open_store,
)
from mrl.records.rollouts import BroadcastRendezvous, WeightsNotice, WeightsRequest, WeightsRoute
from mrl.records.version import Version
from mrl.transport.endpoints import reachable_host
from mrl.weights.broadcast_requests import BroadcastRequests, WaitingWorker, backend_of, other_nccl
from mrl.weights.manifest import Canary, Manifest
from mrl.weights.publish import Publisher, WhenWhole
from mrl.weights.weight_buffers import VersionBuffer, WeightBuffers

KEPT = 3
"""Newest manifests that are kept."""
CLOSE_S = 2.0

log = structlog.get_logger()


class BroadcastPublisher:
    """Publishes versions of one policy to engines that take part in broadcasts."""

    def __init__(
        self, files: Publisher, *, host: str, meets_in: Path | None = None, device: str = "cpu", dtype: str = ""
    ) -> None:
        """`files` writes folders; manifests lie beside them. `device` is the learner's.

        Members of a broadcast find each other at a port of `host`, or, where all are on this host, in a file in the
        folder `meets_in`, which is their user's alone.

        Weights are published in `dtype`, if it is given.
        """
        self._dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
        self._files, self._host, self._device = files, host, numbered(device)
        self._meets_in = meets_in
        self._met: Path | None = None
        """File of the last meeting."""
        self._held, self._requests = WeightBuffers(), BroadcastRequests()
        self._number = 0
        self._told_nccl: set[str] = set()
        """Engines' versions of NCCL that a warning has named already."""
        self._last: tuple[BroadcastGroup, dist.Store] | None = None
        self._failure: Exception | None = None
        self._lasts: threading.Event | None = None
        """Set when the version that lasts is written."""
        self._writing = threading.Lock()
        self._written: tuple[Version, Path] | None = None
        """The version written last, and its manifest."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._counting, self._num_jobs = threading.Lock(), 0
        """Number of jobs of the thread that sends, waiting or under way."""
        # Not a daemon: a thread that comes back from gloo while the interpreter ends takes the process down (SIGABRT).
        self._thread = threading.Thread(target=self._work, name="broadcast")
        self._thread.start()

    # The learner's thread.

    def begin(
        self,
        sources: Sequence[TensorSource],
        version: Version,
        canary: Canary | None,
        when_whole: WhenWhole | None = None,
        *,
        lasts: bool = False,
    ) -> None:
        """Keep a copy of a version; its manifest is there at once. Raises OSError, RoleFailed.

        A version that `lasts` is written as files, by the thread that sends: later no learner is there to send it.
        """
        assert canary is not None, "the first rank has a canary"
        if lasts:
            held = self._copied(((source.name, source.whole()) for source in sources), version, canary)
            written = self._lasts = threading.Event()
            self._begin(lambda: self._write_last(held, written, when_whole))
            return
        path = self.publish_weights(((source.name, source.whole()) for source in sources), version, canary)
        if when_whole is not None:
            when_whole(path)

    def finish(self) -> None:
        """Wait for a version that `lasts`; other versions are there at once. Raises RoleFailed."""
        while self._lasts is not None and not self._lasts.wait(CLOSE_S):
            self.check()  # the thread that writes it has bounds of its own
        self.check()

    def check(self) -> None:
        """Raises RoleFailed when the thread that sends has ended."""
        if self._failure is not None:
            raise RoleFailed(f"the thread that sends weights has failed: {self._failure!r}") from self._failure

    @property
    def progress(self) -> int:
        """See `Publisher.progress`, for a version that is being written as files."""
        return self._files.progress

    @torch.no_grad()
    def publish_weights(self, weights: Iterable[tuple[str, Tensor]], version: Version, canary: Canary) -> Path:
        """Keep a copy of weights as they come; return the path of the manifest. Raises OSError, RoleFailed."""
        self.check()
        held = self._copied(weights, version, canary)
        manifest = Manifest(
            policy=self._files.policy,
            version=version,
            tensors=held.digests,
            canary=canary,
            broadcast=held.tensors,
        )
        path = self._files.folder / f"{version}.json"
        parts = path.with_name(f".{path.name}")
        parts.write_bytes(msgspec.json.encode(manifest))
        parts.rename(path)  # not synced: a resume writes it anew
        for old in sorted(self._files.folder.glob("[0-9]*.json"), key=_version_of)[:-KEPT]:
            old.unlink()
        return path

    def close(self) -> None:
        """Stop sending. A job that does not end soon ends before the process does, within its own bounds."""
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._forget_meeting()

    def _copied(self, weights: Iterable[tuple[str, Tensor]], version: Version, canary: Canary) -> VersionBuffer:
        return self._held.take(((name, self._rounded(tensor)) for name, tensor in weights), version, canary)

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    # The thread of the link to the workers.

    def ask(self, client: bytes, request: WeightsRequest) -> None:
        """Take in a worker's request for a version; `answers` has the answer once it is due."""
        self._requests.ask(client, request, time.monotonic())

    def answers(self, notice: WeightsNotice, *, num_workers: int) -> list[tuple[bytes, WeightsRoute]]:
        """Return (client, answer) for requests that can be answered now; never waits. `num_workers` are known."""
        newest, is_idle = self._held.newest(), not self._num_jobs
        written = self._folder_of(newest)
        due = self._requests.due(
            newest.version if newest else None,
            time.monotonic(),
            num_workers=num_workers,
            can_send=is_idle,
            has_files=bool(written),
        )
        found = [_route(one, notice) for one in due.outdated]
        found += [_route(one, notice, folder=written) for one in due.readers]
        found += [_route(one, notice, meeting=meeting) for one, meeting in due.invited]
        found += self._call_together(due.party, notice) if due.party else []
        # After the broadcast: its members are on their way to a meeting, which has a bound.
        if newest and not written and is_idle and self._requests.wants_files(newest.version):
            self._begin(lambda: self._write_if_newest(newest.version))
        return found

    def _call_together(self, party: list[WaitingWorker], notice: WeightsNotice) -> list[tuple[bytes, WeightsRoute]]:
        held = self._held.use(party[0].request.version)
        if held is None:  # a newer version has just come: they will be told of it
            return [_route(one, notice) for one in party]
        self._number += 1
        name = f"{self._files.policy}-{held.version}-{self._number}"
        file = self._meets_in / f"broadcast-{name}" if self._meets_in else None
        host = reachable_host(self._host)
        try:
            store = file_store(file) if file else open_store("127.0.0.1" if host == "localhost" else host)
        except (OSError, RuntimeError) as error:
            self._held.release(held)
            log.warning("cannot open the meeting place of a broadcast", version=str(held.version), reason=str(error))
            return [_route(one, notice) for one in party]
        meeting = BroadcastRendezvous(
            host=host,
            port=store.port if isinstance(store, dist.TCPStore) else 0,
            file=str(file or ""),
            name=name,
            backend=self._backend_for(party),
            first_rank=0,
            world_size=1 + sum(one.request.num_ranks for one in party),
        )
        self._begin(lambda: self._send(held, store, meeting))
        answers, rank = [], 1
        for one in party:
            own = msgspec.structs.replace(meeting, first_rank=rank)
            self._requests.invite(one, own)
            answers.append(_route(one, notice, meeting=own))
            rank += one.request.num_ranks
        return answers

    def _backend_for(self, party: list[WaitingWorker]) -> Literal["gloo", "nccl"]:
        own_gpu, own_nccl = gpu_id(self._device), nccl_version(self._device)
        if new := other_nccl(party, own_gpu, own_nccl) - self._told_nccl:
            log.warning(
                "weights are sent by gloo: engines have another NCCL version", learner=own_nccl, engines=sorted(new)
            )
            self._told_nccl |= new
        return backend_of(party, own_gpu, own_nccl)

    def _begin(self, job: Callable[[], None]) -> None:
        with self._counting:
            self._num_jobs += 1
        self._jobs.put(job)

    # The thread that sends.

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except (PeerLost, OSError) as error:
                log.warning("weights were not sent to the engines", reason=str(error))
            except Exception as error:  # noqa: BLE001 - the thread's outer edge: the learner's thread raises it
                self._failure = error
                return
            with self._counting:
                self._num_jobs -= 1

    def _send(self, held: VersionBuffer, store: dist.Store, meeting: BroadcastRendezvous) -> None:
        try:
            group = BroadcastGroup(store, meeting, 0, device=self._device)
            for _, flat in held.buckets:
                group.send(flat)
            self._last = group, store  # kept until the next one: what is sent may still lie in the kernel
        finally:
            self._held.release(held)
            self._forget_meeting(Path(meeting.file) if meeting.file else None)

    def _forget_meeting(self, newer: Path | None = None) -> None:
        """Remove the file of the meeting before, and note the newer one, which its members may still read."""
        if self._met is not None:
            self._met.unlink(missing_ok=True)
        self._met = newer

    def _write_if_newest(self, version: Version) -> None:
        held = self._held.use(version)
        if held is None:
            return
        try:
            self._write(held)
        finally:
            self._held.release(held)

    def _write_last(self, held: VersionBuffer, written: threading.Event, when_whole: WhenWhole | None) -> None:
        """Write the last version as files. Raises RoleFailed, since this version will not be offered again."""
        try:
            path = self._write(held)
        except OSError as error:
            raise RoleFailed(f"the last version, {held.version}, cannot be written: {error}") from error
        if when_whole is not None:
            when_whole(path)
        written.set()

    def _write(self, held: VersionBuffer) -> Path:
        with self._writing:
            if self._written is None or self._written[0] != held.version:
                path = self._files.publish_weights(held.named(), held.version, held.canary)
                self._written = held.version, path
            return self._written[1]

    def _folder_of(self, held: VersionBuffer | None) -> str:
        written = self._written
        return str(written[1]) if written and held and written[0] == held.version else ""


def _route(
    asking: WaitingWorker, notice: WeightsNotice, *, meeting: BroadcastRendezvous | None = None, folder: str = ""
) -> tuple[bytes, WeightsRoute]:
    route = WeightsRoute(attempt=asking.request.attempt, weights=notice, meeting=meeting, folder=folder)
    return asking.client, route


def _version_of(manifest: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in manifest.stem.split("."))
