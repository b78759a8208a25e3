"""Pair cards of a run: the error that two policies' tokenizers alone cause in a log-ratio, the floor of its residuals.

A process of the lowest priority measures them beside the run, and ends with it. They lie in `pair_cards/` of the run's
folder, where the report finds them. `mrl align floors RUN` measures missing cards.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.config.run_folder import RunFolder, read_run_config, write_json
from mrl.config.schema import RunConfig
from mrl.parent_death import command
from mrl.processes.planning.plan import environment
from mrl.sharing.regimes import aligns

LOWEST_PRIORITY = 19


@contextmanager
def measured_beside(config: RunConfig, folder: RunFolder, log_path: Path) -> Iterator[None]:
    """Measure the floors of the run in another process during the block; end the process with the block."""
    if not aligns(config.sharing):
        yield
        return
    argv = (sys.executable, "-m", "mrl", "align", "floors", str(folder.path))
    with log_path.open("wb") as said:
        process = subprocess.Popen(
            command(os.getpid(), argv),
            env=os.environ | environment(1),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()


def write_pair_cards(run: Path) -> list[Path]:
    """Measure the pairs of a run that have no card yet; return the files of all cards.

    This process gets the lowest priority, so that it takes nothing from a running run. Raises RunFolderError for a
    folder that is no run, ModelFolderError for a tokenizer that cannot be read any more.
    """
    from mrl.alignment.pair_card import PairCard, make_card
    from mrl.alignment.receiver import load_receiver

    config, folder = read_run_config(run), RunFolder(run)
    os.nice(LOWEST_PRIORITY)
    folder.pair_cards.mkdir(exist_ok=True)
    receivers = {name: load_receiver(Path(policy.model)) for name, policy in config.policies.items()}
    written = []
    for pair in pairs_of(config):
        sides = (receivers[pair[0]], receivers[pair[1]])
        prints = (sides[0].fingerprint, sides[1].fingerprint)
        path = folder.pair_cards / f"pair_card_{pair[0]}_{pair[1]}.json"
        if _fingerprints(path) != list(prints):
            card = PairCard(pair, prints, (), ()) if prints[0] == prints[1] else make_card(pair, sides, {})
            write_json(path, card.to_json())
        written.append(path)
    return written


def pairs_of(config: RunConfig) -> list[tuple[str, str]]:
    """Return every pair of policies of which at least one learns, where the regime aligns tokenizers; else []."""
    pairs = itertools.combinations(config.policies, 2) if aligns(config.sharing) else ()
    return [pair for pair in pairs if any(name in config.learning for name in pair)]


def _fingerprints(path: Path) -> object:
    """Return the fingerprints of the two tokenizers in a card's file; None where there is no card."""
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return card.get("fingerprints") if isinstance(card, dict) else None
