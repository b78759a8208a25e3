"""New weights for an engine: files or a broadcast, verified, loaded, and then proved by canary and digests.

A broadcast that fails costs a bounded time; the same version is then asked for in files. It happens beside sampling,
in a thread of its own; what is sampled meanwhile is held until the proof is there.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import structlog

from mrl.engines.engine import Engine
from mrl.errors import PeerLost, WeightsError, WeightsGone, WeightsUnproved
from mrl.metrics.telemetry import Telemetry
from mrl.models.tensor_broadcast import IncomingTensors
from mrl.records.rollouts import WeightsNotice
from mrl.records.version import Version
from mrl.rollout.link import WorkerLink
from mrl.weights.canary import CanaryGap, gap_nats
from mrl.weights.manifest import Manifest, differing, read_manifest
from mrl.weights.read_lock import read_lock

ROUTE_S = 60.0
"""Until the learner says where to meet: it may be sending to others, each bucket with a bound of its own."""
FILES_S = 120.0
"""Until the learner has written the files."""
CLOSE_S = 5.0
"""For an update under way when the worker ends."""
TOLD_S = 10.0
"""Until the learner's word of newer weights has come, when the ones that it told of have gone."""

log = structlog.get_logger()


class Route(Enum):
    """How a version came to an engine."""

    FILES = "files"
    ADAPTERS = "files of adapters alone"
    BROADCAST = "broadcast"
    FILES_INSTEAD = "files, after its broadcast had failed"


@dataclass(frozen=True, slots=True)
class Installed:
    """The engine serves a version, and has proved it."""

    version: Version
    gap: CanaryGap
    compared_share: float
    """Of the tensors, those whose bytes in the engine were compared with what was published."""
    seconds: float
    route: Route


@dataclass(frozen=True, slots=True)
class Refused:
    """What was published cannot be taken; the engine serves what it served before."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class Missed:
    """The learner does not hand a version over, or no longer: there is a newer one, or the learner is away or done."""

    version: Version
    reason: str
    lost_broadcast: bool
    """A broadcast of it failed before."""


class NotOffered(WeightsError):
    """See Missed."""

    def __init__(self, reason: str, *, lost_broadcast: bool = False) -> None:
        super().__init__(reason)
        self.lost_broadcast = lost_broadcast


def install(
    engine: Engine,
    manifest_path: Path,
    version: Version,
    *,
    link: WorkerLink | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Installed:
    """Let the engine serve `version`, which this manifest describes.

    What is broadcast is asked for over the `link`, as long as it `is_wanted`. Raises WeightsError when the weights are
    not what was published, do not fit or are not offered (the old version is served on, or none), and EngineLost when
    the engine turns out to serve something else.
    """
    started_s = time.monotonic()
    manifest = read_manifest(manifest_path)
    if manifest.version != version:
        raise WeightsError(f"{manifest_path}: describes version {manifest.version}, wanted {version}")
    route = Route.ADAPTERS if manifest.base else Route.FILES
    if manifest.broadcast:
        route = _by_broadcast(engine, manifest, link, is_wanted)
    with ExitStack() as closing:
        if route is not Route.BROADCAST:
            is_here = route is not Route.FILES_INSTEAD
            folder = manifest_path.parent if is_here else _in_files(version, link, is_wanted)
            closing.enter_context(read_lock(folder))  # until it is proved: some engines compare with what lies there
            load = engine.load_adapters if route is Route.ADAPTERS else engine.load
            load(folder, version, manifest.tensors)
        proof = prove(engine, manifest)
    return Installed(version, proof.gap, proof.compared_share, time.monotonic() - started_s, route)


def _by_broadcast(engine: Engine, manifest: Manifest, link: WorkerLink | None, is_wanted: Callable[[], bool]) -> Route:
    """Whether the engine has got the tensors. Raises NotOffered when the learner offers others, or is away."""
    assert link is not None, "who is told of a broadcast has a link to ask for it"
    seats = engine.broadcast_seats()
    route = link.ask_weights(
        manifest.version,
        num_ranks=seats.num_ranks,
        gpu=seats.gpu,
        nccl=seats.nccl,
        within_s=ROUTE_S,
        is_wanted=is_wanted,
    )
    if route is None:
        raise NotOffered(f"no answer about version {manifest.version} within {ROUTE_S:g} s")
    if route.meeting is None:
        raise NotOffered(f"version {manifest.version} is not the newest any more, or cannot be sent now")
    try:
        engine.receive(IncomingTensors(route.meeting, manifest.broadcast, manifest.tensors), manifest.version)
    except (PeerLost, WeightsError) as error:
        log.warning("broadcast failed", version=str(manifest.version), reason=str(error))
        return Route.FILES_INSTEAD
    return Route.BROADCAST


def _in_files(version: Version, link: WorkerLink | None, is_wanted: Callable[[], bool]) -> Path:
    """Where the learner writes a version whose broadcast failed. Raises NotOffered."""
    assert link is not None, "it was told of a broadcast"
    route = link.ask_weights(version, num_ranks=0, within_s=FILES_S, is_wanted=is_wanted)
    if route is None or not route.folder:
        raise NotOffered(f"version {version} is not offered in files either", lost_broadcast=True)
    return Path(route.folder).parent


@dataclass(frozen=True, slots=True)
class Proof:
    """How far the canary is off, and how much of the bytes was looked at."""

    gap: CanaryGap
    compared_share: float


def prove(engine: Engine, manifest: Manifest) -> Proof:
    """Look at the weights that an engine serves.

    Where the bytes of all tensors are compared they decide, and a canary that is off is only warned of. Elsewhere it
    decides, and beside bytes of adapters, whose scale is in no tensor. What scores no numbers is never served.

    Raises WeightsUnproved when these are others than published, or nothing can be said; EngineLost.
    """
    version = manifest.version
    try:
        gap = gap_nats(manifest.canary, engine.score(manifest.canary.token_ids))
        held = engine.checksums() or {}
    except (WeightsError, ValueError) as error:  # it has them by now: as long as nobody knows what, they are no good
        raise WeightsUnproved(f"version {version} cannot be proved: {error}") from error
    if wrong := differing(manifest, held):
        raise WeightsUnproved(f"the engine serves other bytes than version {version} in {wrong[:5]}")
    proof = Proof(gap, len(held.keys() & manifest.served.keys()) / max(1, len(manifest.served)))
    if gap.problem and (proof.compared_share < 1.0 or manifest.base or not math.isfinite(gap.mean_nats)):
        raise WeightsUnproved(f"the canary of version {version} is off: {gap.problem}")
    _tell(proof, manifest)
    return proof


def _tell(proof: Proof, manifest: Manifest) -> None:
    gap, version = proof.gap, str(manifest.version)
    if gap.problem:
        log.warning("every byte of the weights is right, and the canary is off", version=version, reason=gap.problem)
    elif proof.compared_share < 1.0 and manifest.canary.previous and not gap.tells_versions:
        log.info(
            "the canary cannot tell this version from the one before: the step was too small beside rounding",
            version=version,
            noise_nats=gap.noise_nats,
            error_of_missing_share=gap.missing_error,
        )


class Updates:
    """Follows the newest announced version with one update at a time."""

    def __init__(self, engine: Engine, telemetry: Telemetry, *, link: WorkerLink | None = None) -> None:
        self._engine, self._telemetry, self._link = engine, telemetry, link
        self._is_wanted = True
        self._install = partial(install, link=link, is_wanted=lambda: self._is_wanted)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._pending: tuple[Version, Future[Installed]] | None = None
        self._gone_s: float | None = None
        """Since when no version was found, one after the other; None where the last one was."""

    def follow(self, notice: WeightsNotice, *, to_its_end: bool = False) -> Installed | Refused | Missed | None:
        """Begin an update to what is announced, unless it is served already or one is under way.

        The outcome of an update is given once, when it has ended; with `to_its_end` of this one. Raises EngineLost.
        """
        if self._pending is None and notice.version != self._engine.version:
            path = Path(notice.manifest_path)
            self._pending = notice.version, self._thread.submit(self._load, path, notice.version)
        if self._pending is None or not (to_its_end or self._pending[1].done()):
            return None
        (version, update), self._pending = self._pending, None
        try:
            with self._telemetry.awaiting("weights", whom="the engine"):
                installed = update.result()
            self._gone_s = None
            return installed
        except NotOffered as error:
            return Missed(version, str(error), error.lost_broadcast)
        except WeightsError as error:
            if isinstance(error, WeightsGone) and self._has_passed(version):
                return Missed(version, str(error), lost_broadcast=False)
            return Refused(version, str(error))

    def _has_passed(self, version: Version) -> bool:
        """Whether the learner has told of newer weights than these, which have gone, or has done all its steps.

        It prunes what is old by then, and its word of what is newer may be on its way: that is waited for, but not for
        each anew where none is found, as by a worker that cannot see the learner's memory.
        """
        if self._link is None or self._link.notice is None:
            return False
        if self._gone_s is None:
            self._gone_s = time.monotonic()
        is_on_its_way = time.monotonic() - self._gone_s < TOLD_S
        return self._link.is_over or self._link.notice.version != version or is_on_its_way

    @property
    def is_loading(self) -> bool:
        """Whether an update is under way whose version the engine does not serve yet."""
        pending = self._pending  # another thread may ask
        return pending is not None and pending[0] != self._engine.version

    def abandon(self) -> None:
        """Forget the update under way, once it has ended: the engine is lost, and the learner no longer waited for."""
        if self._pending is None:
            return
        self._is_wanted = False
        if self._link is not None:
            self._link.wake()
        wait([self._pending[1]])
        self._pending, self._is_wanted = None, True

    def close(self) -> None:
        """Wait for what is under way, whatever becomes of it; an engine that does not come to its end is closed."""
        if self._pending is not None and wait([self._pending[1]], CLOSE_S).not_done:
            self._engine.close()
        self._thread.shutdown(cancel_futures=True)

    def _load(self, manifest_path: Path, version: Version) -> Installed:
        with self._telemetry.beside("loading weights"):
            return self._install(self._engine, manifest_path, version)
