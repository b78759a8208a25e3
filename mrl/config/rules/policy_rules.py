"""Rules that span several keys of one policy."""

import re

from mrl.config.policy_tables import LearnerTable, MakeTable, PolicyTable, RolloutTable, ServerTable
from mrl.config.rules.objective_rules import check_objective
from mrl.errors import ConfigError

OWN_OPTIONS = {
    "--port": "each server gets a free port",
    "--host": "servers of a run listen on loopback",
    "--model": "set policies.X.model",
    "--model-path": "set policies.X.model",
    "--dtype": "set server.dtype",
    "--max-model-len": "set server.context_tokens",
    "--context-length": "set server.context_tokens",
    "--tensor-parallel-size": "set rollout.gpus, or lease a unit of several GPUs",
    "--tp-size": "set rollout.gpus, or lease a unit of several GPUs",
    "-tp": "set rollout.gpus, or lease a unit of several GPUs",
    "--data-parallel-size": "set rollout.workers",
    "--dp-size": "set rollout.workers",
    "-dp": "set rollout.workers",
    "--logprobs-mode": "log-probabilities must be those of the distribution that is sampled from",
    "--max-logprobs": "peers ask for at most 20, which is the servers' default",
    "--preferred-sampling-params": "answers would be sampled and scored with different distributions",
    "--speculative-accept-threshold-single": "answers would be sampled and scored with different distributions",
    "--speculative-accept-threshold-acc": "answers would be sampled and scored with different distributions",
}
"""Option of a server's command line -> why it is refused: another key sets it, or by it tokens would come with
log-probabilities of another distribution than they are sampled from."""
_SPECULATION = re.compile(r"--spec(?!ial)|-sc(?=$|[.=])")


def check_policy(name: str, policy: PolicyTable) -> None:
    """Raises ConfigError for the first pair of keys of a policy that contradict each other."""
    key = f"policies.{name}"
    if not policy.model and policy.make is None:
        raise ConfigError(
            f"{key}: no model and no recipe",
            wanted=f'{key}.model = "FOLDER", or a table [{key}.make]',
        )
    if policy.model and policy.make is not None:
        raise ConfigError(f"{key}: both a model and a recipe", cure=f"remove {key}.model or [{key}.make]")
    if not re.fullmatch(r"cpu|cuda", policy.device):
        raise ConfigError(f"{key}.device: invalid value", got=policy.device, wanted="'cpu' or 'cuda'")
    if policy.make is not None:
        _check_recipe(f"{key}.make", policy.make)
    if policy.rollout.workers < 1:
        raise ConfigError(f"{key}.rollout.workers: a policy needs at least one worker", got=0, wanted=">= 1")
    _check_server(f"{key}.rollout", policy)
    _check_weights(f"{key}.rollout", policy)
    _check_gpus(f"{key}.rollout", policy)
    if policy.turns:
        _check_turns(key, policy)
    if not policy.frozen:
        _check_learner(key, policy)
        check_objective(name, policy)


def _check_server(key: str, policy: PolicyTable) -> None:
    """Check that a server table is in use, that the server can do what the table asks, and that it has one worker."""
    rollout = policy.rollout
    if rollout.engine != "embedded" and "embedded_dtype" in rollout.model_fields_set:
        raise ConfigError(
            f"{key}.embedded_dtype: has no effect, because the engine is a server",
            got=rollout.embedded_dtype,
            cure=f"set {key}.server.dtype instead",
        )
    if rollout.engine == "embedded" and rollout.server != ServerTable():
        raise ConfigError(
            f"{key}.server: the embedded engine has no server",
            got=sorted(rollout.server.model_fields_set),
            cure=f'set {key}.engine = "vllm" or "sglang", or remove the table',
        )
    for option in rollout.server.options:
        if why := _why_not(option, on_cpu=policy.device == "cpu"):
            raise ConfigError(f"{key}.server.options: this option is not allowed", got=option, cure=f"remove it; {why}")
    if rollout.engine != "embedded" and not rollout.server.url:
        _check_context(key, rollout)
    for own in ("options", "python") if rollout.server.url else ():
        if getattr(rollout.server, own):
            raise ConfigError(
                f"{key}.server.{own}: the run does not start the server at server.url",
                got=getattr(rollout.server, own),
                cure="remove this key, and pass its value where that server is started; or remove url",
            )
    if rollout.server.url and rollout.workers > 1:
        raise ConfigError(
            f"{key}.server.url: several workers cannot share one server",
            got=f"{rollout.workers} workers",
            wanted=f"{key}.workers = 1, or no url, so that each worker starts a server",
        )


def _why_not(option: str, *, on_cpu: bool) -> str:
    """Return why a server may not be given this option; empty where it may.

    Servers take an option with underscores too, and any beginning of it that is the beginning of no other.
    """
    word = option.partition("=")[0].replace("_", "-")
    if on_cpu and _SPECULATION.match(word):  # SGLang takes the likeliest token; vLLM tells -9999 of some
        return "on a CPU, speculative decoding gives other log-probabilities than those of the sampled distribution"
    begins = len(word) > 2 and word.startswith("--")
    return next((why for own, why in OWN_OPTIONS.items() if own == word or (begins and own.startswith(word))), "")


def _check_gpus(key: str, policy: PolicyTable) -> None:
    """Check that only a server that the run starts on GPUs has several."""
    rollout = policy.rollout
    if rollout.gpus == 1 or (rollout.engine != "embedded" and policy.device == "cuda" and not rollout.server.url):
        return
    engine = f"{rollout.engine} on {policy.device}" + " given by url" * bool(rollout.server.url)
    raise ConfigError(
        f"{key}.gpus: only a server that the run starts on GPUs can use several",
        got=f"{rollout.gpus} for {engine}",
        wanted=f'{key}.gpus = 1, or {key}.engine = "vllm" or "sglang" with device = "cuda"',
        cure=f"set {key}.workers = {rollout.workers * rollout.gpus}, for engines on one GPU each"
        if policy.device == "cuda" and not rollout.server.url
        else "",
    )


def _check_turns(key: str, policy: PolicyTable) -> None:
    """Check that the processes of a policy that takes turns are on one host, and can leave their device."""
    rollout, learner = policy.rollout, policy.learner
    is_server = rollout.engine != "embedded"
    refusals = {
        "learner.hosts": (learner.hosts > 1, learner.hosts, "1, because policies take turns within one host"),
        "rollout.server.url": (
            bool(rollout.server.url),
            rollout.server.url,
            "no url, because the run cannot move that server",
        ),
        "rollout.engine": (
            policy.frozen and is_server,
            f"{rollout.engine} of a frozen policy",
            "'embedded', because a server drops its weights, and those of a frozen policy are never published",
        ),
        "rollout.weights": (
            rollout.weights == "broadcast" or (rollout.weights == "adapters" and is_server),
            rollout.weights,
            "'files', because learner and engine are never on the device together, and a server drops its base weights",
        ),
        "rollout.weights_in": (
            rollout.weights_in == "gpu",
            "gpu",
            "'memory', because engines read new weights after the learner has left its GPU",
        ),
        "rollout.gpus": (
            learner.processes % rollout.gpus > 0,
            rollout.gpus,
            f"a divisor of learner.processes = {learner.processes}, because learner and server use the same GPUs",
        ),
    }
    for name, (is_refused, got, wanted) in refusals.items():
        if is_refused:
            raise ConfigError(
                f"{key}.{name}: cannot be combined with turns = true",
                got=got,
                wanted=wanted,
                cure=f"set {key}.turns = false, if that cannot be changed",
            )


def _check_context(key: str, rollout: RolloutTable) -> None:
    """Check that an answer leaves room for a prompt; only the worker knows how long the prompts are."""
    if rollout.server.context_tokens <= rollout.max_new_tokens:
        raise ConfigError(
            f"{key}.server.context_tokens: no room for a prompt before the answer",
            got=rollout.server.context_tokens,
            wanted=f"at least max_new_tokens = {rollout.max_new_tokens} plus the longest prompt",
        )


def _check_weights(key: str, policy: PolicyTable) -> None:
    """Check how weights reach the engine: a broadcast reaches an embedded one, and an own server on a CPU."""
    rollout = policy.rollout
    can_receive = rollout.engine == "embedded" or (policy.device == "cpu" and not rollout.server.url)
    if rollout.weights == "broadcast" and not can_receive:
        raise ConfigError(
            f"{key}.weights: this engine loads weights only from files",
            got=f"{rollout.engine} on {policy.device}" + (" given by url" if rollout.server.url else ""),
            wanted=f'{key}.weights = "files"; "broadcast" needs an embedded engine, or a CPU server started by the run',
        )
    if rollout.weights == "broadcast" and rollout.weights_in == "memory":
        raise ConfigError(
            f"{key}.weights_in: weights that replace a failed broadcast are files on the disk",
            got="memory",
            wanted=f'{key}.weights_in = "disk" or "auto"; {key}.weights = "files" for files in memory',
        )
    lies_open = policy.device == "cuda" and rollout.engine != "sglang" and not rollout.server.url
    if rollout.weights_in == "gpu" and not (lies_open and rollout.weights == "files"):
        raise ConfigError(
            f"{key}.weights_in: this engine cannot read new weights from its learner's GPU",
            got=f'"gpu" for {rollout.weights}, {rollout.engine} on {policy.device}'
            + (" given by url" if rollout.server.url else ""),
            wanted=f'{key}.weights_in = "memory" or "auto"; "gpu" needs {key}.weights = "files", and an embedded '
            'engine or a vLLM started by the run on device = "cuda"',
        )
    if rollout.weights == "adapters":
        _check_adapters(key, policy)


def _check_adapters(key: str, policy: PolicyTable) -> None:
    """Check that there are adapters and an engine for them: vLLM is started with room, SGLang lacks it on a CPU."""
    rollout = policy.rollout
    if policy.learner.lora is None:
        raise ConfigError(
            f"{key}.weights: the policy trains no adapters",
            got="adapters",
            wanted=f'{key}.weights = "files", or a table {key.removesuffix("rollout")}learner.lora',
        )
    if rollout.engine == "sglang" or rollout.server.url:
        raise ConfigError(
            f"{key}.weights: this engine cannot load adapters",
            got=f"adapters for {rollout.engine}" + (" given by url" if rollout.server.url else ""),
            wanted=f'{key}.weights = "files"; "adapters" needs an embedded engine, or a vLLM started by the run',
        )


def _check_recipe(key: str, make: MakeTable) -> None:
    width, heads = make.hidden_size, make.num_heads
    shared = max(1, heads // 2)
    spot = f"{key}.num_heads"
    if width % heads:
        raise ConfigError(f"{spot}: does not divide hidden_size", got=heads, wanted=f"a divisor of {width}")
    if width // heads % 2:  # rotary embeddings turn pairs
        raise ConfigError(
            f"{spot}: the width of a head is odd",
            got=f"{width} / {heads} = {width // heads}",
            wanted="an even hidden_size / num_heads",
        )
    if heads % shared:
        raise ConfigError(
            f"{spot}: not a multiple of its {shared} key-value heads",
            got=heads,
            wanted="1, 3 or an even number",
        )


def _check_learner(key: str, policy: PolicyTable) -> None:
    learner = policy.learner
    if learner.minibatches > learner.prompts_per_step:
        raise ConfigError(
            f"{key}.learner.minibatches: more minibatches than prompts in a step",
            got=learner.minibatches,
            wanted=f"<= prompts_per_step = {learner.prompts_per_step}",
        )
    if learner.microbatch_tokens <= policy.rollout.max_new_tokens:  # a row is an answer behind a prompt
        raise ConfigError(
            f"{key}.learner.microbatch_tokens: smaller than one row",
            got=learner.microbatch_tokens,
            wanted=f"> rollout.max_new_tokens = {policy.rollout.max_new_tokens}",
            cure="raise it, or lower rollout.max_new_tokens",
        )
    if any(not 0 <= beta < 1 for beta in learner.betas):
        raise ConfigError(f"{key}.learner.betas: invalid value", got=list(learner.betas), wanted="0 <= beta < 1")
    if learner.activation_offload and not learner.activation_checkpointing:
        raise ConfigError(
            f"{key}.learner.activation_offload: requires activation_checkpointing",
            got="true, with activation_checkpointing = false",
            cure=f"set {key}.learner.activation_checkpointing = true",
        )
    if learner.parameter_dtype == "bfloat16" and learner.lora is not None and policy.make is not None:
        raise ConfigError(
            f"{key}.learner.parameter_dtype: bfloat16 would round weights under adapters, as recipes make float32",
            got="bfloat16, with lora and make",
            cure=f'set {key}.learner.parameter_dtype = "float32"',
        )
    _check_reuse(f"{key}.learner", learner)
    _check_kernels(key, policy)
    _check_hosts(key, policy)
    _check_sharding(key, learner)
    _check_shared_passes(key, learner)
    if learner.router_replay:
        _check_replay(f"{key}.learner.router_replay", policy)


def _check_reuse(key: str, learner: LearnerTable) -> None:
    """Check that own groups can fill their part of every step: used often enough, while fresh enough."""
    share, most = learner.reuse_share, learner.max_reuses
    if not share:
        if "max_reuses" in learner.model_fields_set:
            what, cure = f"{key}.max_reuses: has no effect", f"set {key}.reuse_share > 0, or remove this key"
            raise ConfigError(what, got=most, wanted=f"{key}.reuse_share > 0", cure=cure)
        return
    refusals = {
        "reuse_share": (
            learner.reused_groups == 0,
            f"less than one group of prompts_per_step = {learner.prompts_per_step}",
            f">= {1 / learner.prompts_per_step:.2g}, or 0 for none",
        ),
        "max_reuses": (
            learner.reused_groups > most * learner.fresh_groups,
            f"too few to reuse {learner.reused_groups} groups per step with {learner.fresh_groups} fresh groups",
            f"reuse_share <= {most / (most + 1):.2g} with max_reuses = {most}",
        ),
        "router_replay": (
            learner.router_replay,
            "not possible with reuse_share, because the experts of reused groups would fill every checkpoint",
            "false",
        ),
        "max_staleness_versions": (
            learner.max_staleness_versions < most,
            f"a group becomes too stale before it is used {most + 1} times, once per step",
            f">= max_reuses = {most}, or {most + 1} and more if sampling is to run ahead of training",
        ),
    }
    for name, (is_refused, what, wanted) in refusals.items():
        if is_refused:
            raise ConfigError(f"{key}.{name}: {what}", got=getattr(learner, name), wanted=wanted)


def _check_replay(spot: str, policy: PolicyTable) -> None:
    """Check, as far as the configuration tells, that the engine says where tokens went and the learner can follow."""
    rollout = policy.rollout
    if policy.make is not None and policy.make.architecture != "qwen3_moe":
        wanted = 'a mixture of experts, such as make.architecture = "qwen3_moe"'
        raise ConfigError(f"{spot}: the policy has no routers", got=policy.make.architecture, wanted=wanted)
    if policy.learner.compile:
        what, cure = f"{spot}: compiled blocks cannot replay routers", "set one of them to false"
        raise ConfigError(what, got="true, with compile = true", cure=cure)
    if rollout.engine == "vllm" and policy.device == "cpu" and not rollout.server.url:
        raise ConfigError(
            f"{spot}: vLLM on a CPU does not report the chosen experts",
            wanted='rollout.engine = "sglang" or "embedded", or vllm with device = "cuda"',
            cure=f"remove {spot}, if that cannot be changed",
        )


def _check_kernels(key: str, policy: PolicyTable) -> None:
    learner = policy.learner
    if policy.device == "cuda" and learner.precision == "bfloat16":
        return
    for name, chosen, other in (("logprob_kernel", "liger", "chunked"), ("attention_kernel", "varlen", "rows")):
        if getattr(learner, name) == chosen:
            raise ConfigError(
                f"{key}.learner.{name}: the kernel {chosen} requires a GPU and bfloat16",
                got=f"{policy.device}, {learner.precision}",
                wanted=f'{key}.device = "cuda" and {key}.learner.precision = "bfloat16"',
                cure=f'set {key}.learner.{name} = "{other}"',
            )


def _check_hosts(key: str, policy: PolicyTable) -> None:
    """Check that ranks are dealt out evenly, and that no engine is to read the memory of a learner on several hosts."""
    learner, rollout = policy.learner, policy.rollout
    if learner.processes % learner.hosts:
        raise ConfigError(
            f"{key}.learner.hosts: does not divide learner.processes",
            got=f"{learner.hosts} hosts for processes = {learner.processes}",
            wanted=f"the same number of ranks on each host, for example a total of processes = "
            f"{learner.hosts * max(1, round(learner.processes / learner.hosts))}",
        )
    if learner.hosts > 1 and rollout.weights_in in ("memory", "gpu"):
        raise ConfigError(
            f"{key}.rollout.weights_in: engines cannot open the memory of a learner on {learner.hosts} hosts",
            got=rollout.weights_in,
            wanted=f'{key}.rollout.weights_in = "disk" or "auto"',
        )


def _check_shared_passes(key: str, learner: LearnerTable) -> None:
    if learner.ranks_per_host % learner.context_parallel:
        raise ConfigError(
            f"{key}.learner.context_parallel: ranks that split a pass must be on one host",
            got=f"{learner.context_parallel} for {learner.ranks_per_host} ranks on each host",
            wanted=f"a divisor of {learner.ranks_per_host}",
        )
    if learner.context_parallel > 1 and learner.compile:
        raise ConfigError(
            f"{key}.learner.compile: compiled blocks do not support context parallelism",
            got=f"true, with context_parallel = {learner.context_parallel}",
            cure="set compile = false or context_parallel = 1",
        )


def _check_sharding(key: str, learner: LearnerTable) -> None:
    if learner.shard_size and learner.sharding == "replicate":
        raise ConfigError(
            f'{key}.learner.shard_size: has no effect with sharding = "replicate"',
            got=learner.shard_size,
            cure=f'set {key}.learner.sharding = "shard", or remove this key',
        )
    if learner.shard_size and learner.processes % learner.shard_size:
        raise ConfigError(
            f"{key}.learner.shard_size: does not divide learner.processes",
            got=learner.shard_size,
            wanted=f"a divisor of processes = {learner.processes}, or 0 for {learner.ranks_per_host}",
        )
    size, per_host = learner.shard_size, learner.ranks_per_host
    if size and per_host % size and size % per_host:
        raise ConfigError(
            f"{key}.learner.shard_size: the ranks of a copy would span parts of hosts",
            got=f"{size} for {per_host} ranks on each host",
            wanted=f"a divisor or a multiple of {per_host}, or 0 for {per_host}",
        )
