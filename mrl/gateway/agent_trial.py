"""An agent looked at before a run: its module is imported and its function found, in a process of its own."""

import importlib.util
import subprocess
import sys

from mrl.config.task_tables import TaskTable
from mrl.errors import MissingError, TaskError
from mrl.gateway.agent_children import MODULE
from mrl.tasks.environments.environment_source import OUTSIDE

TRIAL_S = 120.0


def check_agent(task: str, table: TaskTable) -> None:
    """Raises TaskError for a function that can be no agent, MissingError without the package of its client."""
    if table.dataset == OUTSIDE:
        return
    where = f"tasks.{task}.dataset"
    if importlib.util.find_spec("openai") is None:
        what = "the package openai, by which agents ask policies, is not installed"
        raise MissingError(what, where=where, cure="pip install 'mrl[agents]'")
    try:
        argv = (sys.executable, "-m", MODULE, "--check", table.dataset)
        trial = subprocess.run(argv, capture_output=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        reason = f"its module is not imported after {TRIAL_S:.0f} s"
    else:
        if trial.returncode == 0:
            return
        said = trial.stderr.decode(errors="replace").split("\n")
        reason = next((line for line in reversed(said) if line.strip()), f"exit code {trial.returncode}")
    wanted = "an async function (client, row) in a module beside the configuration, installed, or on PYTHONPATH"
    raise TaskError(f"no agent: {reason.strip()}", where=where, got=table.dataset, wanted=wanted)
