"""New weights for an engine: files or a broadcast, verified, loaded, and then proved by canary and digests.

A broadcast that fails costs a bounded time; the same version is then asked for in files. An update runs beside
sampling, in a thread of its own; groups that are sampled meanwhile are held until the weights are proved.
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
"""Seconds to wait for the learner's word where to meet: it may be sending to others, each bucket within a bound."""
FILES_S = 120.0
"""Seconds to wait until the learner has written the files."""
CLOSE_S = 5.0
"""Seconds to wait for an update under way when the worker ends."""
TOLD_S = 10.0
"""Seconds to wait until the learner's notice of newer weights has come, when the announced ones are gone."""

log = structlog.get_logger()


class Route(Enum):
    """Way in which a version came to an engine."""

    FILES = "files"
    ADAPTERS = "files of adapters alone"
    BROADCAST = "broadcast"
    FILES_INSTEAD = "files, after its broadcast had failed"


@dataclass(frozen=True, slots=True)
class Installed:
    """Outcome of an update: the engine serves a version, and has proved it."""

    version: Version
    gap: CanaryGap
    compared_share: float
    """Share of the tensors whose bytes in the engine were compared with the published ones."""
    seconds: float
    route: Route


@dataclass(frozen=True, slots=True)
class Refused:
    """Outcome of an update: the published weights cannot be loaded; the engine serves what it served before."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class Missed:
    """Outcome of an update: the learner does not offer the version, or no longer.

    There is a newer version, or the learner is away or has done all its steps.
    """

    version: Version
    reason: str
    lost_broadcast: bool
    """Whether a broadcast of the version failed before."""


class NotOffered(WeightsError):
    """The learner does not offer a version; see Missed."""

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
    """Load `version`, which this manifest describes, into the engine, and prove it.

    A broadcast is asked for over the `link`, as long as the version `is_wanted`. Raises WeightsError when the weights
    are not what was published, do not fit or are not offered (the old version is served on, or none), and EngineLost
    when the engine turns out to serve something else.
    """
    started_s = time.monotonic()
    manifest = read_manifest(manifest_path)
    if manifest.version != version:
        raise WeightsError(f"{manifest_path}: the manifest describes version {manifest.version}, wanted {version}")
    route = Route.ADAPTERS if manifest.base else Route.FILES
    if manifest.broadcast:
        route = _by_broadcast(engine, manifest, link, is_wanted)
    with ExitStack() as closing:
        if route is not Route.BROADCAST:
            is_here = route is not Route.FILES_INSTEAD
            folder = manifest_path.parent if is_here else _in_files(version, link, is_wanted)
            closing.enter_context(read_lock(folder))  # until the proof: some engines compare with these files
            load = engine.load_adapters if route is Route.ADAPTERS else engine.load
            load(folder, version, manifest.tensors)
        proof = prove(engine, manifest)
    return Installed(version, proof.gap, proof.compared_share, time.monotonic() - started_s, route)


def _by_broadcast(engine: Engine, manifest: Manifest, link: WorkerLink | None, is_wanted: Callable[[], bool]) -> Route:
    """Let the engine receive a broadcast; return FILES_INSTEAD where that failed.

    Raises NotOffered when the learner offers another version, or is away.
    """
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
        raise NotOffered(f"no answer from the learner about version {manifest.version} within {ROUTE_S:g} s")
    if route.meeting is None:
        raise NotOffered(f"version {manifest.version} is no longer the newest, or cannot be sent now")
    try:
        engine.receive(IncomingTensors(route.meeting, manifest.broadcast, manifest.tensors), manifest.version)
    except (PeerLost, WeightsError) as error:
        log.warning("weight broadcast failed; using files", version=str(manifest.version), reason=str(error))
        return Route.FILES_INSTEAD
    return Route.BROADCAST


def _in_files(version: Version, link: WorkerLink | None, is_wanted: Callable[[], bool]) -> Path:
    """Return the folder to which the learner writes a version whose broadcast failed. Raises NotOffered."""
    assert link is not None, "it was told of a broadcast"
    route = link.ask_weights(version, num_ranks=0, within_s=FILES_S, is_wanted=is_wanted)
    if route is None or not route.folder:
        raise NotOffered(f"version {version} is not available in files either", lost_broadcast=True)
    return Path(route.folder).parent


@dataclass(frozen=True, slots=True)
class Proof:
    """How far the canary is off, and the share of the tensors whose bytes were compared."""

    gap: CanaryGap
    compared_share: float


def prove(engine: Engine, manifest: Manifest) -> Proof:
    """Prove that an engine serves the weights that a manifest describes.

    Where the bytes of all tensors are compared, they decide, and a canary that is off only gives a warning. Elsewhere
    the canary decides, and also for adapters, whose scale is in no tensor. Weights that give scores which are no finite
    numbers are never served.

    Raises WeightsUnproved when the weights are others than published, or nothing can be proved; EngineLost.
    """
    version = manifest.version
    try:
        gap = gap_nats(manifest.canary, engine.score(manifest.canary.token_ids))
        held = engine.checksums() or {}
    except (WeightsError, ValueError) as error:  # the weights are loaded, and unproved ones are no good
        raise WeightsUnproved(f"version {version} could not be verified: {error}") from error
    if wrong := differing(manifest, held):
        raise WeightsUnproved(f"the engine's weights differ from version {version} in {wrong[:5]}")
    proof = Proof(gap, len(held.keys() & manifest.served.keys()) / max(1, len(manifest.served)))
    if gap.problem and (proof.compared_share < 1.0 or manifest.base or not math.isfinite(gap.mean_nats)):
        raise WeightsUnproved(f"canary check of version {version} failed: {gap.problem}")
    _tell(proof, manifest)
    return proof


def _tell(proof: Proof, manifest: Manifest) -> None:
    gap, version = proof.gap, str(manifest.version)
    if gap.problem:
        log.warning("canary check failed although all weight bytes match", version=version, reason=gap.problem)
    elif proof.compared_share < 1.0 and manifest.canary.previous and not gap.tells_versions:
        log.info(
            "canary check cannot tell this version from the previous one: the update is within rounding noise",
            version=version,
            noise_nats=gap.noise_nats,
            error_of_missing_share=gap.missing_error,
        )


class WeightUpdater:
    """Updates one engine to the newest announced version, one update at a time."""

    def __init__(self, engine: Engine, telemetry: Telemetry, *, link: WorkerLink | None = None) -> None:
        self._engine, self._telemetry, self._link = engine, telemetry, link
        self._is_wanted = True
        self._install = partial(install, link=link, is_wanted=lambda: self._is_wanted)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._pending: tuple[Version, Future[Installed]] | None = None
        self._gone_s: float | None = None
        """When the first of the newest, unbroken row of versions was found gone; None where the last one was there."""

    def follow(self, notice: WeightsNotice, *, to_its_end: bool = False) -> Installed | Refused | Missed | None:
        """Begin an update to the announced version, unless it is served already or an update is under way.

        Returns the outcome of an update once, after its end, and else None; `to_its_end` waits for the end. Raises
        EngineLost.
        """
        if self._pending is None and notice.version != self._engine.version:
            path = Path(notice.manifest_path)
            self._pending = notice.version, self._thread.submit(self._load, path, notice.version)
        if self._pending is None or not (to_its_end or self._pending[1].done()):
            return None
        (version, update), self._pending = self._pending, None
        try:
            with self._telemetry.awaiting("weight update", whom="the engine"):
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
        """Whether weights that are gone are old: the learner announced newer ones, or has done all its steps.

        The learner prunes old weights, and its notice of newer ones may still be on its way. That is waited for, but
        only once where version after version is gone, as for a worker that cannot see the learner's memory.
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
        pending = self._pending  # another thread may change it
        return pending is not None and pending[0] != self._engine.version

    def abandon(self) -> None:
        """End the update under way without waiting for the learner, and forget its outcome: the engine is lost."""
        if self._pending is None:
            return
        self._is_wanted = False
        if self._link is not None:
            self._link.wake()
        wait([self._pending[1]])
        self._pending, self._is_wanted = None, True

    def close(self) -> None:
        """Wait for the end of the update under way; where that takes more than `CLOSE_S`, close the engine."""
        if self._pending is not None and wait([self._pending[1]], CLOSE_S).not_done:
            self._engine.close()
        self._thread.shutdown(cancel_futures=True)

    def _load(self, manifest_path: Path, version: Version) -> Installed:
        with self._telemetry.beside("loading weights"):
            return self._install(self._engine, manifest_path, version)
