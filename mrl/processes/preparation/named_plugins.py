"""Checks and descriptions of the plug-ins that a configuration names."""

from collections.abc import Iterator
from pathlib import Path

from mrl.config.schema import TRACKER_NAMES, RunConfig
from mrl.config.task_tables import SOURCE_NAMES
from mrl.plugins import REGIME, SOURCE, TRACKER, VERIFIER, PluginKind, check_shadow, find_plugin
from mrl.sharing.context import sharing_context
from mrl.sharing.regimes import REGIMES, build_regime


def check_shadows(config: RunConfig, *, where: str) -> None:
    """Raises PluginError where a distribution offers a plug-in under a name of mrl's own that the run uses."""
    for kind, name, built_in, key in _names(config):
        if name in built_in:
            check_shadow(kind, name, where=f"{where}: {key}")


def try_regime(config: RunConfig, policy: str) -> None:
    """Raises PluginError for a regime of the user's own that cannot be built for `policy`, whose model is there."""
    from mrl.alignment.receiver import load_receiver

    if config.sharing["regime"] not in REGIMES and not config.policies[policy].frozen:
        receiver = load_receiver(Path(config.policies[policy].model))
        build_regime(config.sharing, sharing_context(config, policy, receiver))


def plugin_lines(config: RunConfig, *, where: str) -> Iterator[str]:
    """Return one line for each plug-in of a checked configuration. Raises PluginError for a missing plug-in."""
    found = [
        find_plugin(kind, name, built_in, where=f"{where}: {key}").described
        for kind, name, built_in, key in _names(config)
        if name not in built_in
    ]
    return iter(dict.fromkeys(found))


def _names(config: RunConfig) -> Iterator[tuple[PluginKind, str, tuple[str, ...], str]]:
    """Yield (kind, name, mrl's own names, key) for every name that may be a plug-in's."""
    yield REGIME, str(config.sharing.get("regime", "independent")), tuple(REGIMES), "sharing.regime"
    for task, table in config.tasks.items():
        yield SOURCE, table.source, SOURCE_NAMES, f"tasks.{task}.source"
        if table.own_verifier:
            yield VERIFIER, table.own_verifier, (), f"tasks.{task}.verifier"
    for place, tracker in enumerate(config.trackers):
        yield TRACKER, tracker.kind, TRACKER_NAMES, f"trackers.{place}.kind"
