"""Build the engine of a policy's worker: transformers in the worker's process, or a server (vLLM, SGLang)."""

import os
from collections.abc import Callable, Sized
from pathlib import Path

from mrl.alignment.receiver import Receiver
from mrl.config.policy_tables import PolicyTable
from mrl.config.rules.unit_rules import may_sleep
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.config.unit_names import parse_units
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Decoding, Engine, Sampling, StopStrings
from mrl.engines.environment import engine_python
from mrl.engines.family_limits import check_learning
from mrl.engines.server_backend import AdapterShape, Launch, ServerBackend
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import timeouts_of
from mrl.engines.sglang import SGLang
from mrl.engines.sglang_launch import SPARE_TOKENS
from mrl.engines.vllm import VLLM
from mrl.errors import ConfigError
from mrl.models.skeleton import adapted_layers, config_of_folder, most_positions
from mrl.processes.planning.unit_workers import UNIT
from mrl.rollout.time_shared_engine import Movable
from mrl.sharing.regimes import scorers
from mrl.tasks.pool import TaskPool
from mrl.tasks.source import Turn

PROMPTS_LOOKED_AT = 32
DIALECTS: dict[str, type[ServerBackend]] = {"vllm": VLLM, "sglang": SGLang}


def build_engine(config: RunConfig, policy: str, receiver: Receiver, folder: RunFolder, role: str) -> Engine:
    """Start the engine of one worker and return it. Raises UserError when it cannot be started."""
    table = config.policies[policy]
    if table.rollout.engine == "embedded":
        return build_embedded(config, policy, receiver)
    server = table.rollout.server
    if not table.frozen:
        check_learning(
            table.rollout.engine,
            Path(table.model),
            config_of_folder(Path(table.model)),
            device=table.device,
            adapters=table.rollout.weights == "adapters",
        )
    return ServerEngine(
        DIALECTS[table.rollout.engine](),
        _sampling(table, receiver),
        launch=None if server.url else _launch(config, policy),
        log=folder.logs / "engines" / f"{role.replace('/', '-')}.log",
        url=server.url,
        bounds=timeouts_of(server, Path(table.model)),
    )


def movable(engine: Engine) -> Movable:
    """Return an engine together with the calls by which its memory leaves its device and comes back."""
    if isinstance(engine, EmbeddedEngine):
        return Movable(engine, engine.pause, engine.resume)
    return Movable(engine, engine.sleep, engine.wake, keeps_weights=False)


def build_embedded(config: RunConfig, policy: str, receiver: Receiver) -> EmbeddedEngine:
    """Return an engine that runs transformers in this process."""
    table = config.policies[policy]
    return EmbeddedEngine(
        Path(table.model),
        _sampling(table, receiver),
        device=table.device,
        max_running=answers_at_once(config, policy),
        dtype=table.rollout.embedded_dtype,
    )


def check_lengths(
    config: RunConfig, policy: str, pool: TaskPool, token_ids: Callable[[str | tuple[Turn, ...]], Sized]
) -> None:
    """Raises ConfigError where a prompt and its answer have more tokens than a learner's pass or an engine may hold.

    Checks the PROMPTS_LOOKED_AT prompts with the most bytes, which are the longest in tokens or nearly so.
    """
    prompts = [prompt for prompt in pool.longest(PROMPTS_LOOKED_AT) if not pool.is_episode(prompt.prompt_id)]
    if not prompts:  # messages of environments are measured during their episodes
        return
    longest = max(prompts, key=lambda prompt: len(token_ids(prompt.content)))
    table, prompt = config.policies[policy], len(token_ids(longest.content))
    row = prompt + table.rollout.max_new_tokens - 1  # the last token is predicted and is no input
    if not table.frozen and row > table.learner.microbatch_tokens:
        raise ConfigError(
            f"policies.{policy}.learner.microbatch_tokens: smaller than one row",
            got=table.learner.microbatch_tokens,
            wanted=f">= {row}, for a prompt of {longest.task} with {prompt} tokens and its answer",
            cure=f"raise it, or lower tasks.{longest.task}.max_prompt_chars or rollout.max_new_tokens",
        )
    _check_context(table, policy, longest.task, prompt)


def _check_context(table: PolicyTable, policy: str, task: str, prompt: int) -> None:
    """Check the context of an engine that the run starts; the longest prompt, of `task`, has `prompt` tokens."""
    server, answer = table.rollout.server, table.rollout.max_new_tokens
    if server.url:
        return
    room = readable = most_positions(config_of_folder(Path(table.model)))
    key = "max_new_tokens"
    if table.rollout.engine != "embedded":
        readable -= SPARE_TOKENS if table.rollout.engine == "sglang" else 0
        room, key = min(server.context_tokens, readable), "server.context_tokens"
    if prompt + answer > room:
        cure = f"lower tasks.{task}.max_prompt_chars or rollout.max_new_tokens"
        raise ConfigError(
            f"policies.{policy}.rollout.{key}: a prompt and its answer do not fit",
            got=f"{room}" + (", the context length of the model" if room == readable else ""),
            wanted=f">= {prompt + answer}, for a prompt of {task} with {prompt} tokens and an answer of {answer}",
            cure=cure if room == readable else f"raise it, or {cure}",
        )


def answers_at_once(config: RunConfig, policy: str) -> int:
    """Return the number of answers that the engine of one worker samples at a time."""
    table = config.policies[policy]
    in_flight = config.allocation.slots // max(1, len(config.allocation.units))
    if config.run.sync:
        in_flight = table.learner.fresh_groups * table.rollout.group_size
    return max(table.rollout.answers_at_once or in_flight, table.rollout.group_size)


def held_out_decoding(config: RunConfig, policy: str) -> Decoding | None:
    """Return temperature and top_p for held-out answers; None where the policy's own sampling is used."""
    table, own = config.evaluation, config.policies[policy].rollout.temperature
    if table.temperature in (None, own) and table.top_p == 1:
        return None
    return Decoding(own if table.temperature is None else table.temperature, table.top_p)


def _sampling(table: PolicyTable, receiver: Receiver) -> Sampling:
    texts = table.prompt.stop_bytes
    stop = StopStrings(texts, receiver.completion_bytes, receiver.table.join) if texts else None
    rollout, ends = table.rollout, tuple(receiver.eos_ids)
    return Sampling(rollout.temperature, rollout.max_new_tokens, ends, stop=stop, tells_experts=table.replays_routers)


def _adapters(table: PolicyTable) -> AdapterShape | None:
    lora = table.learner.lora
    if lora is None or table.rollout.weights != "adapters":
        return None
    return AdapterShape(lora.rank, adapted_layers(config_of_folder(Path(table.model)), lora))


def _gpus(table: PolicyTable) -> int:
    """Return the number of GPUs of a server: all GPUs of its worker's unit (1 on cores), or else `rollout.gpus`."""
    if UNIT not in os.environ:
        return table.rollout.gpus
    (unit,) = parse_units([os.environ[UNIT]])
    return len(unit.devices) if unit.kind == "gpu" else 1


def _launch(config: RunConfig, policy: str) -> Launch:
    table = config.policies[policy]
    server = table.rollout.server
    return Launch(
        python=engine_python(table.rollout.engine, device=table.device, configured=server.python),
        model_folder=Path(table.model),
        host="127.0.0.1",
        port=0,
        device=table.device,
        dtype=server.dtype,
        threads=int(os.environ.get("OMP_NUM_THREADS", table.rollout.threads)),  # on a unit of cores: one per core
        max_running=answers_at_once(config, policy),
        max_context_tokens=server.context_tokens,
        seed=config.run.seed,
        options=tuple(server.options),
        gpus=_gpus(table),
        adapters=_adapters(table),
        may_sleep=table.turns or may_sleep(config, policy),
        tells_experts=table.replays_routers,
        scores=policy in scorers(config.sharing, config.policies),
    )
