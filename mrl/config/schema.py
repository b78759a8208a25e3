"""The typed tables of a run's configuration. Unknown keys are refused; every bound stands at its field.

The tables of one policy are in `policy_tables.py`, those of tasks in `task_tables.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from mrl.config.policy_tables import PolicyTable
from mrl.config.table import PluginName, Table, known_or_plugin
from mrl.config.task_tables import PoolTable, TaskTable

UNIT_TYPE_NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._+-]{0,63}$"
POLICY_NAME = r"^[a-z0-9][a-z0-9_-]{0,31}$"
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
UnitType = Annotated[str, Field(pattern=UNIT_TYPE_NAME)]
TRACKER_NAMES = ("swanlab", "tensorboard", "trackio", "wandb")
PolicyName = Annotated[str, Field(pattern=POLICY_NAME)]


class RunTable(Table):
    """The run as a whole: name, folders, seed, length, limits."""

    name: Annotated[str, Field(pattern=RUN_NAME)]
    """Name of the run; its folder is `<folder>/<name>`."""
    folder: str = "runs"
    """Folder that holds the runs."""
    modules: str = ""
    """Folder of the modules that this configuration names ("module:name"), searched after installed modules and
    PYTHONPATH. Left out: the folder of the configuration file."""
    local_folder: str = ""
    """Folder on each host's local disk or in its memory, for files shared only by processes on that host: sockets,
    status boards, rendezvous stores of ranks. The run makes a private folder in it, and removes that at the end. Empty:
    the system's temporary folder."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """Seed of prompt order, sampling and minibatches."""
    steps: int = Field(..., ge=1)
    """Learner steps of every policy."""
    success_reward: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Minimum reward of a success: in held-out accuracy, and where policies share successful answers."""
    max_verifier_failures: float = Field(default=0.5, ge=0, le=1)
    """Maximum share of a step's answers on which verifiers may fail before the run ends. With 1 it never ends for this
    reason."""
    sync: bool = False
    """Whether all policies step together. Then only groups that are trained on again are stale, and runs with equal
    seeds are identical."""
    sync_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a synchronous run waits for a policy that makes no progress; then the run ends, and names that
    policy. Left out: 60 s more for each GB of the largest model's weights."""
    max_minutes: float = Field(default=0.0, ge=0)
    """Minutes after which the run ends; 0 means no limit."""
    min_free_mib: int = Field(default=256, ge=0)
    """Free disk space in MiB that the run's folder needs before anything is written."""
    rollouts_mib: int = Field(default=1024, ge=0)
    """Compressed size in MiB of the answers of each policy that the run folder keeps; at first, all that were trained
    on. Beyond this size, the answers of every second step are deleted, then those of every second remaining step. 0
    keeps none."""
    shared_with_group: bool = False
    """Whether members of the user's group may read the run folder (0750, files 0640); otherwise only the user may."""


class ExchangeTable(Table):
    """The exchange's daemon. `host` is also where telemetry, allocator and learner links listen."""

    port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the daemon, if it has a `host`; 0 picks a free one."""
    host: str = ""
    """Address at which the exchange, the supervisor's telemetry, the allocator and the learners' links to workers
    accept TCP connections, for a run on several hosts. Empty: no TCP; processes connect through socket files on this
    host.

    The run's keys authenticate all connections, those through socket files too.
    """
    budget_mib: int = Field(default=256, ge=2)
    """Maximum total size in MiB of the records that the daemon holds, in memory and in its file; beyond it the oldest
    are removed. Left out: the maximum size of the groups of all policies over two steps, if that is larger."""
    durability: Literal["synced", "written"] = "synced"
    """Time at which a record is acknowledged: once it is on the disk ("synced"), or once it survives a crash of the
    daemon, but not a power failure ("written")."""
    successes_per_prompt: int = Field(default=4, ge=1, le=64)
    """Successes per prompt and policy that the exchange keeps, newest first."""
    max_age_versions: int = Field(default=200, ge=0)
    """Maximum age of a record in versions; older ones are evicted."""
    metrics_host: str = ""
    """Address of the daemon's page for Prometheus, /metrics, for example "127.0.0.1"; empty: no page.

    The page has no authentication: anyone who can reach the address can read it.
    """
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the page for Prometheus; 0 picks a free one, which the run's `endpoints/` names."""


class GatewayTable(Table):
    """The gateway, an HTTP server with OpenAI's API through which other programs query the run's policies."""

    host: Annotated[str, Field(pattern=r"^[^\s/]+$")] = "127.0.0.1"
    """Address at which the gateway listens. It serves HTTP without TLS: for access from other hosts, put a TLS proxy in
    front of it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gateway; 0 picks a free one, which the run's `endpoints/gateway.json` names."""
    idle_s: float = Field(default=120.0, gt=0)
    """Seconds without a request of an agent for its episode, while nothing is sampled for it, after which the episode
    is abandoned."""
    max_body_mib: int = Field(default=4, ge=1, le=64)
    """Maximum size in MiB of a request that the gateway accepts."""
    serve: bool = False
    """Whether requests outside of episodes, for example of an evaluation harness, are answered too, by the rollout
    workers of each policy while they sample. The gateway then also runs without tasks of agents. Not available in a
    synchronous run."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Maximum number of tokens of a prompt, or text to score, in a request outside of episodes; the memory plan of
    embedded engines includes it. The maximum length of the policy's own rows is a limit as well (the model's positions,
    `learner.microbatch_tokens`)."""
    share: float = Field(default=0.125, gt=0, lt=1)
    """Share of a worker's answers in flight that requests outside of episodes may take, at least one answer; also the
    share of the worker's time for scoring given text while it samples."""
    kept_versions: int = Field(default=0, ge=0, le=16)
    """Number of checkpoints that are served at the same time to clients that ask for one by its step ("qwen@120"), with
    `serve`: each by its own process on the CPU of the gateway's host, while it is in use."""


class AllocationTable(Table):
    """The allocator, which shares rollout slots, or units, between policies."""

    slots: int = Field(default=512, ge=1)
    """Requests that may run at the same time, over all policies."""
    floor_slots: int = Field(default=64, ge=1)
    """Minimum number of slots of a running policy; at least one group for each of its workers."""
    period_s: float = Field(default=2.0, gt=0)
    """Seconds between two decisions."""
    ttl_s: float = Field(default=10.0, gt=0)
    """Seconds after which a lease expires unless it is renewed."""
    objective: Literal["max_min", "weighted", "throughput", "static"] = "max_min"
    """Quantity to maximise: the lowest progress (busy share of a learner) of any policy ("max_min"), the lowest
    progress relative to `weights` ("weighted"), or the trained tokens per second of all policies ("throughput");
    "static": a fixed split."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Priority of policies under "weighted" and "static"; a policy that is not named has 1."""
    units: list[str] = Field(default=[])
    """Whole units to lease instead of slots: "gpu:0", "cpu:0-3", "HOST/gpu:0,1". Each runs one worker of one policy at
    a time, with an equal part of `slots`; `rollout.workers` is ignored."""
    unit_types: dict[UnitType, list[str]] = Field(default={})
    """Type -> its units, or hosts for all of their units, if units differ in speed: {H100 = ["gpu:0"], A10 =
    ["node2"]}.

    The type of a unit that is not listed is the device model that its driver reports, else its kind, together with its
    number of devices.
    """
    floor_units: int = Field(default=1, ge=0)
    """Minimum number of units of a policy whose learner is running."""
    grace_s: float = Field(default=5.0, gt=0)
    """Seconds that an engine has to end, or to fall asleep, when its unit goes to another policy; then it is killed.
    Left out: 1 s more for each GB of the largest model's weights."""
    residency: Literal["stop", "sleep"] = "stop"
    """Treatment of an engine whose unit goes to another policy: it ends ("stop"), or on a GPU it stays and sleeps
    ("sleep"), without its cache and without GPU memory, until its policy gets the unit again. With "sleep" every GPU
    unit keeps an engine of every policy in main memory."""
    wake_s: float = Field(default=30.0, gt=0)
    """Seconds that a sleeping engine has to wake up; then it is killed and started anew. Left out: 5 s more for each GB
    of the largest model's weights."""
    switching_share: float = Field(default=0.05, gt=0, le=1)
    """Share of their time that units may spend on starting engines, as measured; with a higher share, units change
    policies more often."""
    hung_s: float = Field(default=120.0, gt=0)
    """Seconds without a report of a policy's learner after which its units go to the others, until the learner reports
    again. A learner does not report while it publishes weights or starts a checkpoint: choose a longer time than these
    take. Left out: 20 s more for each GB of the largest model's weights."""


NO_EVALUATION = -1
"""`evaluation.every` of a run that evaluates nothing."""


class EvaluationTable(Table):
    """Held-out accuracy: the engines of a policy's own workers answer held-out prompts, ahead of their other work."""

    every: int = Field(default=40, ge=NO_EVALUATION)
    """Steps between evaluations; 0 evaluates at start and end only, -1 never."""
    prompts: int = Field(default=0, ge=0)
    """Held-out prompts of the evaluations between start and end; 0 takes all. Start and end always take all."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Share of a worker's slots that held-out answers may take while it has other work, at least one slot. With 1 no
    other work is started until all held-out answers are: almost all of their tokens come from the evaluated version."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Answers to every held-out prompt. Several give pass@k, majority votes, and intervals of both."""
    k: list[Annotated[int, Field(ge=1)]] = Field(default=[1], min_length=1, max_length=16)
    """Values of k in pass@k, none above `samples`; reported if `samples` is above 1."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Temperature of held-out answers; 0 takes the most likely token (greedy). Left out: that of the policy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Total probability of the most likely tokens from which held-out answers are sampled (nucleus sampling); 1 takes
    all tokens."""


class SupervisionTable(Table):
    """How the supervisor treats roles that crash, hang, or are to end."""

    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one role within `window_s` after which the run ends when the role fails again."""
    window_s: float = Field(default=60.0, gt=0)
    """Seconds over which restarts are counted."""
    max_learner_restarts: int = Field(default=3, ge=0)
    """Restarts of one learner within a day, or since it last got further; each resumes from the newest checkpoint."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Seconds before the first restart; doubles with every further one within the window."""
    silence_s: float = Field(default=60.0, gt=0)
    """Maximum age in seconds of the heartbeat of a role whose process is running; then the process is killed and
    restarted. Left out: 5 s more for each GB of the largest model's weights."""
    start_s: float = Field(default=300.0, gt=0)
    """Seconds that a role has to send its first heartbeat; then it counts as silent. Left out: 10 s more for each GB of
    the largest model's weights."""
    stop_s: float = Field(default=5.0, gt=0, le=3600)
    """Seconds between SIGTERM and SIGKILL when the run ends, in which learners save a checkpoint, but for those of a
    run with `run.sync`; a learner that has saved ends at once. Left out: 10 s more for each GB of the largest model's
    weights. The grace period of a batch system must be at least this long."""
    host_metrics_s: float = Field(default=15.0, ge=0)
    """Seconds between two measurements of each host's CPU, memory, disk and GPUs (`host/...`, `gpu/...`); 0 measures
    nothing. GPUs are measured with the extra `nvml`."""


class LaunchTable(Table):
    """How a run on several hosts is started and supervised. The other hosts must have access to the run folder."""

    remote: list[str] = Field(default=[])
    """Prefix of a command that runs it on another host, with "{host}" in place of the host's name: ["ssh", "{host}"].

    Empty: `srun` within a SLURM job.
    """
    hosts_join: bool = False
    """Whether the other hosts are started by `mrl join` on each of them (separate jobs), and not from the first
    host."""
    policies_on_first_host: bool = True
    """Whether policies run on the first host too; otherwise only the daemons do."""
    gpus_per_host: int = Field(default=0, ge=0)
    """Minimum number of GPUs visible on each host with policies, by which the first host places processes; 0: the
    number visible on the first host."""
    join_s: float = Field(default=3600.0, gt=0)
    """Seconds to wait for a host that joins by itself, at the start or after it was lost; then the run ends.

    A missing host that runs only engines on units does not end the run.
    """
    alone_s: float = Field(default=30.0, gt=0)
    """Seconds without contact to the first host after which the supervisor of another host ends its processes."""


class TrackerTable(Table):
    """A tracker that receives the run's metrics, in addition to `metrics.jsonl`. There may be several."""

    kind: PluginName = Field(..., json_schema_extra=known_or_plugin(TRACKER_NAMES))
    """Kind of tracker: swanlab, tensorboard, trackio or wandb, whose package is installed by the extra of this name,
    `pip install 'mrl[trackio]'`; or a plug-in, "module:name" or the name of an entry point in the group
    `mrl.trackers`."""
    project: Annotated[str, Field(pattern=RUN_NAME)] = "mrl"
    """Project of the tracker to which the run belongs."""
    name: str = ""
    """Name of the run in the tracker. Empty: `run.name`."""
    folder: str = ""
    """Folder for the tracker's files. Empty: one in the run folder; for trackio, the default folder of its
    dashboard."""
    samples: int = Field(default=0, ge=0, le=200)
    """Number of answers of each policy that the tracker shows as a table every `samples_every` steps, rescues among
    them; 0 shows none.

    Prompts and answers are then stored wherever the tracker keeps its data.
    """
    samples_every: int = Field(default=10, ge=1)
    """Steps of a policy between two tables of samples."""
    options: dict[str, Any] = Field(default={})
    """Options of this kind of tracker. Do not put keys or passwords here; set them in the environment."""


class RunConfig(Table):
    """The configuration of a whole run."""

    run: RunTable
    pool: PoolTable = PoolTable()
    tasks: dict[PolicyName, TaskTable] = Field(..., min_length=1)
    sharing: dict[str, Any] = Field(default={"regime": "independent"})
    """`regime` names the sharing regime, or a plug-in: "module:name" or the name of an entry point in the group
    `mrl.regimes`. `[sharing.<regime>]` holds the parameters of that regime, for "module:name" `[sharing.<name>]`."""
    policies: dict[PolicyName, PolicyTable] = Field(..., min_length=1)
    exchange: ExchangeTable = ExchangeTable()
    gateway: GatewayTable = GatewayTable()
    allocation: AllocationTable = AllocationTable()
    evaluation: EvaluationTable = EvaluationTable()
    supervision: SupervisionTable = SupervisionTable()
    launch: LaunchTable = LaunchTable()
    trackers: list[TrackerTable] = Field(default=[], max_length=8)

    @property
    def has_gateway(self) -> bool:
        """Whether agents, or other programs, may ask the policies over HTTP."""
        return self.gateway.serve or any(task.source == "agent" for task in self.tasks.values())

    @property
    def learning(self) -> tuple[str, ...]:
        """Names of the policies that learn; the others are frozen."""
        return tuple(name for name, policy in self.policies.items() if not policy.frozen)
