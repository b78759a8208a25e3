"""The environments of all tasks: they open an episode from a start state, and count how episodes end."""

import json
from collections import Counter
from collections.abc import Mapping

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.tasks.environments.environment_pool import EnvironmentPool, EpisodeSession
from mrl.tasks.environments.gateway_location import GatewayLocation
from mrl.tasks.games.game_names import GAMES
from mrl.tasks.source import Item

MIB = 1024**2


class Environments:
    """Pools of the tasks that have an environment; processes are started when the first episode is opened.

    Only one thread may open and close.
    """

    def __init__(self, tasks: Mapping[str, TaskTable], meeting: GatewayLocation | None = None) -> None:
        """`meeting` is the place where episodes of a run meet their agents."""
        self._tasks, self._meeting = tasks, meeting
        self._pools: dict[str, EnvironmentPool] = {}

    def has(self, task: str) -> bool:
        """Whether the prompts of a task are start states of an environment."""
        return self._tasks[task].is_played

    def open(self, task: str, item: Item) -> EpisodeSession:
        """Begin an episode from this start state; never waits. `first` of the session is its first turn."""
        return self._pool(task).open(item.number, json.loads(item.row))

    def values(self) -> dict[str, float]:
        """Return metrics over all tasks, totals since the start; empty where no task has an environment."""
        counts = [pool.counts for pool in list(self._pools.values())]
        if not counts:
            return {}
        ends = sum((one.ends.copy() for one in counts), Counter[str]())
        return {
            "environment/episodes": float(sum(one.episodes for one in counts)),
            "environment/turns": float(sum(one.turns for one in counts)),
            "environment/tool_errors": float(sum(one.tool_errors for one in counts)),
            "environment/replays": float(sum(one.replays for one in counts)),
            "environment/processes": float(sum(one.processes for one in counts)),
            **{f"environment/ends/{reason}": float(count) for reason, count in sorted(ends.items())},
        }

    def close(self) -> None:
        """End the processes, which also end with this one."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _pool(self, task: str) -> EnvironmentPool:
        if task not in self._pools:
            self._pools[task] = pool_of(self._tasks[task], self._name(task))
        return self._pools[task]

    def _name(self, task: str) -> str:
        if self._tasks[task].source != "agent":
            return environment_name(self._tasks[task])
        if self._meeting is None:
            what = "agents can only be used within a training run"
            cure = "start a run with `mrl train`, and read what it measured"
            raise TaskError(what, where=f"tasks.{task}.source", got="agent", cure=cure)
        return self._meeting.name(task)


def pool_of(table: TaskTable, name: str) -> EnvironmentPool:
    """Return the pool of one task's environment, which has this name."""
    return EnvironmentPool(
        name,
        processes=table.environment_processes,
        wall_s=table.episode_s,
        cpu_s=table.episode_cpu_s,
        memory_bytes=table.environment_memory_mib * MIB,
    )


def environment_name(table: TaskTable) -> str:
    """Return "module:Class" or the URL that a task means."""
    return GAMES.get(table.dataset, table.dataset)
