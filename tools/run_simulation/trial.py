"""Simulation of one seed, from its start to its verdict."""

import logging
import secrets
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import structlog

from mrl.config.load import validate
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.exchange.limits import Limits
from mrl.processes import host_processes, unit_node
from mrl.processes.planning.plan import ProcessSpec
from run_simulation.faults import Faults
from run_simulation.hosts import HostProcess, SimulatedChild, kill, new_host, node_link
from run_simulation.network import Network
from run_simulation.witness import PATIENCE_S, Witness
from run_simulation.world import Host, Process, Violated, World

if TYPE_CHECKING:
    from mrl.exchange.client import ExchangeClient
    from run_simulation.daemons import ExchangeProcess
    from run_simulation.policies import LearnerProcess

POLICIES = ("a", "b")
FEW_RECORDS_BYTES = 16_000
"""Budget of the exchange in which eight records have room."""
BOUND_S = 150.0
"""Seconds after the last fault by which a run has ended: silent workers are given up after 60 s, back-off takes 32
s."""
SETTLED_S = 10.0
"""Age at which a process has said and heard all that it must."""
LOST_HOST_S = (2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the simulation of one seed."""

    seed: int
    violation: str
    """Description of the law that was violated, or "" when none was."""
    digest: str
    ended_s: float
    num_events: int
    counts: dict[str, int] = field(default_factory=dict)


class Run:
    """All parts of the simulated run of one seed."""

    def __init__(self, seed: int, folder: Path, *, trace: Callable[[str], object] | None = None) -> None:
        self.world = World(seed, trace=trace)
        self.network, self.witness = Network(self.world), Witness(self)
        self.folder, self.config = RunFolder(folder), _config()
        self.num_steps = self.world.rng.randint(6, 14)
        self.is_adaptive = self.world.rng.random() < 0.5
        self.staleness = self.world.rng.choice([0, 1, 1, 2])
        budget_bytes = self.world.rng.choice([FEW_RECORDS_BYTES, Limits().budget_bytes])
        self.limits = Limits(
            budget_bytes=budget_bytes, durability="written", successes_per_prompt=1, max_age_versions=6
        )
        self._num_prompts = self.world.rng.choice([10, 10, 30])
        self.places = {policy: self.world.rng.choice(["one", "two"]) for policy in POLICIES}
        """Policy -> host of its learner."""
        self.patience_s = PATIENCE_S
        self.disks: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        """Policy -> its durable state, which survives its processes."""
        self.exchange: ExchangeProcess | None = None
        self.learners: dict[str, LearnerProcess] = {}
        self.publishers: dict[str, ExchangeClient] = {}
        self.node_links: dict[Process, list[Any]] = {}
        self.hosts: dict[str, HostProcess] = {}
        self.machines: dict[str, Host] = {}
        self.journal: list[dict[str, Any]] = []
        """Every transition of a unit, as `units.jsonl` has them."""
        self.is_over = False
        self._away_s: defaultdict[str, float] = defaultdict(float)
        self.faults = Faults(self)

    def play(self) -> str:
        """Run the simulation to its end; return the violation, or ""."""
        self.world.push(self.faults.quiet_s + 2 * self.patience_s - 1.0, None, self._look)
        try:
            for name in ("one", "two"):
                self._start_host(name)
            if not self.world.run(lambda: self.is_over, self.faults.quiet_s + BOUND_S):
                alive = ", ".join(process.name for process in self.world.processes)
                return f"has not ended {BOUND_S:g} s after the last fault; there are: {alive}"
            self.witness.is_lawful(self.journal, self.folder.path / "exchange")
        except Violated as violated:
            return str(violated)
        return ""

    def prompt_at(self, position: int) -> str:
        """Prompt at a position; the order is the same for all policies."""
        return f"prompt-{position % self._num_prompts}"

    def lose_host(self, name: str, for_s: float) -> None:
        """Cut a host's power: all its processes end, and nobody hears of it."""
        self._away_s[name] = self.world.now_s + for_s
        supervisor = self.hosts[name].process
        if supervisor.code is None:
            supervisor.end(-9, with_host=True)

    def _start_host(self, name: str) -> None:
        """Start the supervisor of a host, on the first host as `--resume` does it."""
        is_first = name == "one"
        if is_first or name not in self.machines or self._away_s[name]:
            old = self.machines.get(name)
            self.machines[name] = new_host(self, name)
            self.machines[name].step_s = old.step_s if old else 0.0
        process = Process(self.world, f"supervisor/{name}", self.machines[name])
        process.on_end.append(lambda _: self._host_ended(name, process))
        specs = _specs(name, self.places)
        process.do(lambda: self._make_host(name, process, specs, is_first=is_first))

    def _make_host(self, name: str, process: Process, specs: tuple[ProcessSpec, ...], *, is_first: bool) -> None:
        self.hosts[name] = HostProcess(self, process, specs, is_first=is_first)

    def _host_ended(self, name: str, process: Process) -> None:
        first = self.hosts["one"]
        if name == "one":
            self.is_over = process.code == 0 and len(first.lifecycle.done) == len(POLICIES)
            is_late = self.world.now_s > self.faults.quiet_s + SETTLED_S
            if process.code != 0 and is_late:
                raise Violated(f"the run ends after the last fault: {first.lifecycle.reason}")
        if not self.is_over:
            back_s = max(self._away_s[name] - self.world.now_s, 0.0) + self.world.rng.uniform(*LOST_HOST_S)
            self.world.push(back_s, None, lambda: self._start_host(name))

    def _look(self) -> None:
        """Check that no wait is left in the quiet after the last fault; again while processes are still coming back."""
        exchange = self.exchange
        if not self.is_over:
            self.world.push(SETTLED_S / 2, None, self._look)
        if exchange is None or exchange.age_s < SETTLED_S:
            return
        self.witness.is_quiet([one for one in self.learners.values() if one.age_s > SETTLED_S])
        for name, client in self.publishers.items():
            self.witness.no_put_waits(name, client)


@contextmanager
def _in_place(run: Run) -> Iterator[None]:
    """Put the simulated world in place of the real one where the code names it: clocks, children, links, chance."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

    def link(_folder: RunFolder, _server: str, *, identity: str, on_message: Any, on_tick: Any, closing: Any) -> Any:
        return node_link(run, identity=identity, on_message=on_message, on_tick=on_tick)

    with ExitStack() as stack:
        for module in (host_processes, unit_node):
            stack.enter_context(patch.object(module, "time", run.world))
        stack.enter_context(patch.object(host_processes, "Child", SimulatedChild))
        stack.enter_context(patch.object(unit_node, "os", SimpleNamespace(kill=lambda number, _: kill(run, number))))
        stack.enter_context(patch.object(unit_node, "role_runtime", SimpleNamespace(link=link)))
        stack.enter_context(patch.object(secrets, "randbits", run.world.rng.getrandbits))
        stack.enter_context(patch.object(SimulatedChild, "run", run, create=True))
        stack.callback(structlog.reset_defaults)
        yield


def simulate(seed: int, *, trace: Callable[[str], object] | None = None) -> Verdict:
    """Simulate the run of one seed."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="mrl-simulated-", dir=memory if memory.is_dir() else None))
    (folder / "logs").mkdir()
    try:
        run = Run(seed, folder, trace=trace)
        with _in_place(run):
            violation = run.play()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    world = run.world
    return Verdict(seed, violation, world.digest, world.now_s, world.num_events, dict(run.witness.counts))


@lru_cache(maxsize=1)
def _config() -> RunConfig:
    tables = {
        "run": {"name": "r", "steps": 9, "folder": "runs", "min_free_mib": 0},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": {name: {"model": "m", "device": "cpu"} for name in POLICIES},
        "allocation": {
            "units": ["cpu:0", "two/cpu:0", "two/cpu:1"], "slots": 9, "ttl_s": 6.0, "grace_s": 2.0, "period_s": 1.0,
            "hung_s": 30.0,
        },
        "supervision": {"silence_s": 10.0, "start_s": 20.0, "max_restarts": 8, "max_learner_restarts": 8},
    }  # fmt: skip
    return validate(tables, where="simulation")


def _specs(name: str, places: Mapping[str, str]) -> tuple[ProcessSpec, ...]:
    """Processes that the supervisor of a host starts."""
    daemons = [ProcessSpec(role, role, "", 0, ()) for role in ("exchange", "allocator") if name == "one"]
    here = [policy for policy in POLICIES if places[policy] == name]
    learners = [ProcessSpec(f"learner/{one}", "learner", one, 0, (), restart="until_done") for one in here]
    return (*daemons, *learners)
