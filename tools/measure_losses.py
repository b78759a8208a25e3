#!/usr/bin/env python3
"""Time that a learner over hosts is gone when a part of it is lost, or resumed elsewhere, for those who run on hosts.

    .venv/bin/python tools/measure_losses.py CONFIG [--policy P] [--losses first,rank,agent,host,cut-30,for-good]
                                             [--resumes 1,3] [--ranks 2] [--runs FOLDER] [KEY VALUE ...]

The policy's learner spans two hosts, which are network namespaces of this machine, with so many ranks on each; the
other policies are those of the configuration. One process after the other is killed by SIGKILL on the second host
("first" is the learner's first rank, which is on the first host), and the second host is cut off for so many seconds.
Then the run is ended and resumed on so many hosts, and at last on two, of which the second is cut off for good.

Prints a line for each: seconds from the loss until all other ranks of that life have ended, and until its next life
has trained a step and published it. Of a resume, seconds from the command. Only root makes network namespaces.
"""

import argparse
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_drill.trial import TURN_S, Trial
from network_namespaces import Namespaces, namespaces

KILLED = ("first", "rank", "agent", "host")
CUT, FOR_GOOD = "cut-", "for-good"
WANTED = ", ".join((*KILLED, "cut-SECONDS", FOR_GOOD))
LIMIT_S = 1800.0
OFTEN = ("--supervision.max_restarts", "1000", "--supervision.max_learner_restarts", "1000")
"""Overrides for losses that come far more often than in life. A host's loss for good is measured without them."""


@dataclass(frozen=True)
class Spread:
    """Settings of a run in which one policy's learner spans hosts."""

    config: Path
    runs: Path
    policy: str
    ranks: int
    """Number of ranks on each host."""
    words: tuple[str, ...]

    def launched(self, hosts: Namespaces, count: int, *words: str, before: Trial | None = None) -> Trial:
        """Make the trial of the run on the first `count` hosts, or of its resume as it was `before`."""
        pairs = list(zip(hosts.hosts, hosts.addresses, strict=True))[:count]
        learner = f"--policies.{self.policy}.learner"
        argv = ["ip", "netns", "exec", hosts.hosts[0], sys.executable, "-m", "mrl", "launch", str(self.config)]
        argv += ["--run.name", "losses", "--run.folder", str(self.runs), "--exchange.host", "0.0.0.0"]
        argv += ["--hosts", ",".join(f"{name}={address}" for name, address in pairs)]
        argv += ["--launch.remote", '["ip", "netns", "exec", "{host}"]', f"{learner}.hosts", str(count)]
        argv += [f"{learner}.processes", str(count * self.ranks), f"{learner}.checkpoint_every", "1"]
        argv += ["--run.steps", "1000000", "--evaluation.every", "0", *self.words, *words]
        if before is None:
            return Trial(self.runs / "losses", tuple(argv))
        return Trial(self.runs / "losses", (*argv, "--resume"), seen=before.seen, versions=before.versions)


def until(trial: Trial, condition: Callable[[dict[str, int]], object], *, limit_s: float = LIMIT_S) -> float | None:
    """Look at a run until a condition on its processes holds; return seconds, or None if it ended or took too long."""
    began_s = time.monotonic()
    while not condition(trial.look()):
        assert trial.process is not None
        if trial.process.poll() is not None or time.monotonic() - began_s > limit_s:
            return None
        time.sleep(TURN_S)
    return time.monotonic() - began_s


def has_trained(versions: Sequence[tuple[int, int]], after_epoch: int) -> bool:
    """Whether a life after that of `after_epoch` has published more than the version with which it began."""
    later = [version for version in versions if version[0] > after_epoch]
    return any(one[0] == other[0] and other[1] > one[1] for one in later for other in later)


def ranks_of(policy: str, pids: dict[str, int]) -> dict[str, int]:
    """Living ranks of the policy's learner: title -> pid."""
    return {title: pid for title, pid in pids.items() if f"{title}/".startswith(f"learner/{policy}/")}


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lose(spread: Spread, trial: Trial, hosts: Namespaces, loss: str) -> tuple[float | None, float | None]:
    """Cause the loss; return the seconds until all ranks of that life have ended, and until a later life trains.

    None: they did not end, or the run did.
    """
    pids, second, versions = trial.look(), hosts.hosts[1], trial.versions[spread.policy]
    ranks = ranks_of(spread.policy, pids)
    there = ranks[f"learner/{spread.policy}/rank{spread.ranks}"]
    epoch, began_s = versions[-1][0], time.monotonic()
    ended_s: list[float] = []

    def passed_s() -> float:
        if not ended_s and not any(map(lives, ranks.values())):
            ended_s.append(time.monotonic() - began_s)
        return time.monotonic() - began_s

    if loss == FOR_GOOD or loss.startswith(CUT):
        hosts.cut(second)
    else:
        killed = {"first": ranks[f"learner/{spread.policy}"], "rank": there, "host": pids[f"supervisor/{second}"]}
        killed["agent"] = psutil.Process(there).ppid()
        psutil.Process(killed[loss]).kill()
    if loss.startswith(CUT):
        until(trial, lambda _: passed_s() > float(loss.removeprefix(CUT)))
        hosts.cut(second, whole=True)
    told = len(versions)
    spared = 2 if loss.startswith(CUT) else sys.maxsize  # steps after which a cut had no effect
    again = until(trial, lambda _: passed_s() and (has_trained(versions, epoch) or len(versions) - told >= spared))
    return (ended_s[0] if ended_s else None), (None if again is None else passed_s())


def seconds(value: float | None) -> str:
    """Seconds as the table shows them."""
    return "-" if value is None else f"{value:.1f}"


def end(trial: Trial) -> None:
    """End the run as a batch system does."""
    assert trial.process is not None
    trial.process.send_signal(signal.SIGTERM)
    trial.process.wait(LIMIT_S)


def begin(spread: Spread, hosts: Namespaces, count: int, *words: str, before: Trial | None = None) -> Trial:
    """Start or resume the run on `count` hosts, wait until its learner has trained a step, and print the seconds."""
    found = [] if before is None else before.versions[spread.policy]
    epoch = found[-1][0] if found else -1
    trial = spread.launched(hosts, count, *words, before=before)
    trial.start()
    began_s = until(trial, lambda _: has_trained(trial.versions.get(spread.policy, ()), epoch))
    what = "start" if before is None else "resume"
    print(f"| {what} on {count} of {count * spread.ranks} ranks | - | {seconds(began_s)} |", flush=True)
    if began_s is None:
        raise SystemExit(f"the run ended or did not train; its log is {trial.folder.with_suffix('.log')}")
    return trial


def main() -> int:
    asked, words = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces would outlive the process
    runs = asked.runs or Path(tempfile.mkdtemp(prefix="losses_"))
    spread = Spread(asked.config, runs, asked.policy, asked.ranks, tuple(words))
    losses, counts = asked.losses, [int(count) for count in asked.resumes.split(",") if count]
    print("| what | siblings ended after s | trains again after s |\n|---|--:|--:|", flush=True)
    with namespaces(max(2, *counts) if counts else 2) as hosts:
        trial = begin(spread, hosts, 2, *OFTEN)
        for loss in losses:
            if loss != FOR_GOOD:
                ended_s, again_s = lose(spread, trial, hosts, loss)
                print(f"| {loss} | {seconds(ended_s)} | {seconds(again_s)} |", flush=True)
        for count in counts:
            end(trial)
            trial = begin(spread, hosts, count, *OFTEN, before=trial)
        end(trial)
        if FOR_GOOD in losses:
            trial = begin(spread, hosts, 2, before=trial)
            began_s = time.monotonic()
            ended_s, _ = lose(spread, trial, hosts, FOR_GOOD)
            print(f"| {FOR_GOOD} | {seconds(ended_s)} | run over after {time.monotonic() - began_s:.1f} |", flush=True)
    return 0


def losses_of(words: str) -> list[str]:
    """Parse names of losses. Raises argparse's error for an unknown one."""
    names = words.split(",")
    for name in names:
        if name not in (*KILLED, FOR_GOOD) and not re.fullmatch(CUT + r"\d+", name):
            raise argparse.ArgumentTypeError(f"there is no loss {name!r}; wanted {WANTED}")
    return names


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="How long a learner over hosts is gone when a part of it is lost")
    parser.add_argument("config", type=Path)
    parser.add_argument("--policy", default="qwen", help="policy whose learner spans hosts (qwen)")
    every = ",".join((*KILLED, "cut-10", "cut-30", FOR_GOOD))
    parser.add_argument("--losses", type=losses_of, default=every, help=f"losses, of {WANTED} ({every})")
    parser.add_argument("--resumes", default="1,3", help="numbers of hosts to resume on (1,3)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each host (2)")
    parser.add_argument("--runs", type=Path, help="folder to write the run to (a temporary folder)")
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
