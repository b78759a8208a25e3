"""New weights for an engine: the files verified, loaded, and then proved by canary and digests.

It happens beside sampling, in a thread of its own; what is sampled meanwhile is held until the proof is there.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mrl.engines.engine import Engine
from mrl.errors import EngineLost, WeightsError
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import WeightsNotice
from mrl.records.version import Version
from mrl.weights.canary import CanaryGap, gap_nats
from mrl.weights.manifest import Manifest, differing, read_manifest
from mrl.weights.spares import hold


@dataclass(frozen=True, slots=True)
class Installed:
    """The engine serves a version, and has proved it."""

    version: Version
    gap: CanaryGap
    seconds: float


@dataclass(frozen=True, slots=True)
class Refused:
    """What was published cannot be taken; the engine serves what it served before."""

    version: Version
    reason: str


def install(engine: Engine, manifest_path: Path, version: Version, *, tolerance_nats: float = 0.0) -> Installed:
    """Let the engine serve `version`, which this manifest describes; its canary may be off by `tolerance_nats` or more.

    Raises WeightsError when the files are not what was published or do not fit (the old version is served on), and
    EngineLost when the engine turns out to serve something else.
    """
    started_s = time.monotonic()
    manifest = read_manifest(manifest_path)
    if manifest.version != version:
        raise WeightsError(f"{manifest_path}: describes version {manifest.version}, wanted {version}")
    with hold(manifest_path.parent):
        engine.load(manifest_path.parent, version, manifest.tensors)
        gap = prove(engine, manifest, tolerance_nats)
    return Installed(version, gap, time.monotonic() - started_s)


def prove(engine: Engine, manifest: Manifest, tolerance_nats: float) -> CanaryGap:
    """How far the engine's canary is off. Raises EngineLost when it, or a digest, says that these are other weights."""
    gap = gap_nats(manifest.canary, engine.score(manifest.canary.token_ids))
    allowed = max(manifest.canary.tolerance_nats, tolerance_nats)
    if gap.max_nats > allowed:
        raise EngineLost(
            f"canary of version {manifest.version} is off by {gap.max_nats:.2e} nats, allowed {allowed:.0e}"
        )
    if wrong := differing(manifest, engine.checksums() or {}):
        raise EngineLost(f"the engine serves other bytes than version {manifest.version} in {wrong[:5]}")
    return gap


class Updates:
    """Follows the newest announced version with one update at a time."""

    def __init__(self, engine: Engine, telemetry: Telemetry, *, tolerance_nats: float = 0.0) -> None:
        """`tolerance_nats` is what the engine's number format allows a canary to be off."""
        self._engine, self._telemetry = engine, telemetry
        self._install = partial(install, tolerance_nats=tolerance_nats)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._pending: tuple[Version, Future[Installed]] | None = None

    def follow(self, notice: WeightsNotice, *, to_its_end: bool = False) -> Installed | Refused | None:
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
                return update.result()
        except WeightsError as error:
            return Refused(version, str(error))

    def abandon(self) -> None:
        """Forget the update under way, once it has ended: the engine is lost."""
        if self._pending is not None:
            wait([self._pending[1]])
            self._pending = None

    def close(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        self._thread.shutdown(cancel_futures=True)

    def _load(self, manifest_path: Path, version: Version) -> Installed:
        with self._telemetry.beside("loading weights"):
            return self._install(self._engine, manifest_path, version)
