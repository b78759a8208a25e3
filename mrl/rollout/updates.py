"""Taking new weights into an engine: fetch and verify, load, then let the canary decide whether they may be served."""

import time
from dataclasses import dataclass
from pathlib import Path

from mrl.engines.engine import Engine
from mrl.errors import WeightsError
from mrl.records.version import Version
from mrl.weights.canary import gap_nats
from mrl.weights.fetch import fetch_weights
from mrl.weights.manifest import read_manifest


@dataclass(frozen=True, slots=True)
class Installed:
    """What an update of the weights cost and how well the canary agreed."""

    gap_nats: float
    seconds: float


def install(engine: Engine, manifest_path: Path, version: Version) -> Installed:
    """Let the engine serve `version`, which this manifest describes.

    Raises WeightsError when the files are not what was published or do not fit (the old version is served on), or when
    the canary fails (nothing is served until the next install).
    """
    started_s = time.monotonic()
    manifest = read_manifest(manifest_path)
    if manifest.version != version:
        raise WeightsError(f"{manifest_path}: describes version {manifest.version}, wanted {version}")
    engine.load(fetch_weights(manifest_path, manifest))
    gap = gap_nats(manifest.canary, engine.score(manifest.canary.token_ids))
    if gap > manifest.canary.tolerance_nats:
        allowed = manifest.canary.tolerance_nats
        raise WeightsError(f"canary of version {manifest.version} is off by {gap:.2e} nats, allowed {allowed:.0e}")
    engine.release(manifest.version)
    return Installed(gap, time.monotonic() - started_s)
