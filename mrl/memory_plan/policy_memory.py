"""Memory needs of the processes of one policy: ranks of its learner, workers, and engines that rest on units."""

import math
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from mrl.config.policy_tables import LearnerTable, PolicyTable
from mrl.config.schema import RunConfig
from mrl.config.task_tables import TaskTable
from mrl.errors import MissingError, ModelFolderError
from mrl.memory_plan.needs import (
    MIB,
    NEW_WEIGHTS,
    SERVER_MIB,
    TORCH_MIB,
    Need,
    element_bytes,
    engine_need,
    largest_microbatch,
    process_parts,
    rank_needs,
    server_need,
    staged_bytes,
)
from mrl.models.size import Microbatch, ModelSize
from mrl.models.tensor_header import files_of_weights
from mrl.processes.planning.hosts import is_in_memory
from mrl.processes.preparation.made_policies import cached_folder, is_made, recipe_of
from mrl.processes.preparation.model_bytes import named_parameters
from mrl.sharing.regimes import scorers
from mrl.tasks.pool import Prompt
from mrl.weights.canary_texts import largest_canary

UNKNOWN_PROMPT_TOKENS = 128
LOOKED_AT_PROMPTS = 64
BYTES_PER_TOKEN = 3
"""Bytes per token, estimated for prompts whose tokenizer is not there yet."""


class PolicyMemory:
    """The memory of one policy of a configuration, whose models are looked at once."""

    def __init__(self, config: RunConfig, name: str) -> None:
        self.name, self.table, self._config = name, config.policies[name], config

    def under(self, config: RunConfig) -> "PolicyMemory":
        """Return the policy under a configuration that differs in its microbatches and its answers at once."""
        other = copy(self)
        other.table, other._config = config.policies[self.name], config
        return other

    def with_answers(self, answers: int) -> "PolicyMemory":
        """Return the policy with `answers` answers at once."""
        rollout = self.table.rollout.model_copy(update={"answers_at_once": answers})
        table = self.table.model_copy(update={"rollout": rollout})
        return self.under(self._config.model_copy(update={"policies": self._config.policies | {self.name: table}}))

    def fewer_answers(self) -> list[int]:
        """Return numbers of answers at once that need a smaller cache, the largest first; one group is the least.

        vLLM's cache on cores does not depend on these numbers, nor does the cache of a server that the run does not
        start.
        """
        rollout, group_size = self.table.rollout, self.table.rollout.group_size
        if rollout.engine == "vllm" or rollout.server.url:
            return []
        doublings = math.ceil(math.log2(max(1.0, self._answers / group_size)))
        return [group_size * 2**power for power in reversed(range(doublings))]

    def ranks(self, table: LearnerTable) -> list[tuple[Need, Need]]:
        """Return the needs of the first rank of its learner under a table, and of another rank: each on the host, and
        on the device.
        """
        from mrl.memory_plan.pass_memory import pass_peaks
        from mrl.models.skeleton import model_size

        policy = self.table.model_copy(update={"learner": table})
        on_gpu = policy.device == "cuda"
        batch, num_passes = self.fullest_pass(table)
        peaks = pass_peaks(
            self._model_config,
            precision=table.precision,
            batch=batch,
            with_entropy=policy.objective.entropy_coefficient > 0,
            checkpointing=table.activation_checkpointing,
            offload=table.activation_offload and on_gpu,
            lora=table.lora,
            chunk_logits=table.chunk_logits,
            context_parallel=table.context_parallel,
        )
        size = model_size(self._model_config, table.lora)
        in_memory, on_device = is_in_memory(self._config, self.name), policy.rollout.weights_in == "gpu"
        return [
            rank_needs(
                size,
                peaks,
                table,
                num_passes=num_passes,
                holds_reference=bool(policy.objective.kl_coefficient) and table.lora is None,
                saves_beside_training=0 < table.checkpoint_every < self._config.run.steps,
                on_gpu=on_gpu,
                is_first=is_first,
                scoring=self._scoring(table.precision, is_learner=True),
                staged=staged_bytes(size, policy, is_first=is_first, in_memory=in_memory),
                staged_on_device=on_device * staged_bytes(size, policy, is_first=is_first, in_memory=True),
            )
            for is_first in (True, False)
        ]

    def fullest_pass(self, table: LearnerTable) -> tuple[Microbatch, int]:
        """Return the fullest pass of a rank under a table, and the number of such passes in an update."""
        policy = self.table.model_copy(update={"learner": table})
        return largest_microbatch(policy, self._prompt_tokens, self._answer_tokens(policy))

    def engine(self, gpus: int = 1) -> Need:
        """Return the need of one worker's engine; of a server on several GPUs, the need on each of them."""
        return self._engine(self._answers) if self.table.rollout.engine == "embedded" else self._server(gpus)

    @property
    def _answers(self) -> int:
        """Answers that one worker samples at once."""
        rollout, learner, allocation = self.table.rollout, self.table.learner, self._config.allocation
        if rollout.engine != "embedded":
            from mrl.processes.engines import answers_at_once

            return answers_at_once(self._config, self.name)
        wanted = learner.fresh_groups * rollout.group_size
        if not self._config.run.sync:
            share = allocation.slots - allocation.floor_slots * (len(self._config.policies) - 1)
            share = allocation.slots // len(allocation.units) if allocation.units else share
            versions_ahead = learner.max_staleness_versions - learner.reserved_versions
            wanted = min(wanted * (1 + versions_ahead), max(share, rollout.group_size))
        return min(wanted, rollout.answers_at_once or wanted)

    def _server(self, gpus: int) -> Need:
        """Return the need of a server that the run starts; empty for other servers."""
        from mrl.engines.sglang_launch import context_of
        from mrl.engines.vllm_launch import cpu_cache_gib

        server = self.table.rollout.server
        if server.url:
            return Need("sampling", {})
        cached_tokens = self._answers * context_of(self._model_config, server.context_tokens)
        return server_need(
            self._size, self.table, cached_tokens=cached_tokens, vllm_cache_gib=cpu_cache_gib(), gpus=gpus
        )

    def server_processes(self, gpus: int = 1) -> dict[str, float]:
        """Return the parts of a server's processes on the host, wherever weights and cache lie, with one more process
        for each further GPU.

        They stay while a server sleeps.
        """
        rollout = self.table.rollout
        if rollout.engine == "embedded" or rollout.server.url:
            return {}
        parts = {"server's processes": float((SERVER_MIB[rollout.engine] + (gpus - 1) * TORCH_MIB) * MIB)}
        if rollout.engine == "vllm" and self.table.device == "cuda" and rollout.weights != "adapters":
            parts[NEW_WEIGHTS] = float(element_bytes(self.table) * self._size.parameters)
        return parts

    def arriving_weights(self) -> dict[str, float]:
        """Return the parts for new weights on the host of an embedded engine on a GPU, which reads all of them there
        and then copies them.

        Weights that the engine opens on its learner's GPU are copied from there, and adapters are small.
        """
        rollout, is_given_none = self.table.rollout, self.table.frozen or self.table.rollout.weights == "adapters"
        is_embedded_on_gpu = rollout.engine == "embedded" and self.table.device == "cuda"
        if not is_embedded_on_gpu or is_given_none or rollout.weights_in == "gpu":
            return {}
        return {NEW_WEIGHTS: float(element_bytes(self.table) * self._size.parameters)}

    def resting(self, *, is_asleep: bool) -> Need:
        """Return the need of one worker on the host while another policy has its unit: the memory of the GPU is given
        back.

        An engine that sleeps keeps its processes; transformers also keep the weights that were served.
        """
        if not is_asleep:
            return Need("ended", {})
        is_server, process = self.table.rollout.engine != "embedded", self.process()
        if is_server:
            return Need("asleep", process | self.server_processes())
        return Need("asleep", process | {"weights": float(element_bytes(self.table) * self._size.parameters)})

    def process(self) -> dict[str, float]:
        """Return the parts of one worker without an engine."""
        return process_parts(self._size)

    def _engine(self, answers: int) -> Need:
        canary = self._scoring(self.table.rollout.engine_dtype, is_learner=False)
        scoring = max(canary, self._scoring_given, self._scoring_for_peers)
        prompt_tokens = max(self._prompt_tokens, self._plain_tokens)
        return engine_need(
            self._size,
            self.table,
            answers_at_once=answers,
            prompt_tokens=prompt_tokens,
            answer_tokens=self._answer_tokens(self.table),
            scoring=scoring,
            adapters=self._adapters,
            plays_episodes=bool(self._played),
        )

    def _scoring(self, dtype: str, *, is_learner: bool) -> float:
        """Return the bytes of a pass over the largest canary, where the model computes in `dtype`."""
        from mrl.memory_plan.pass_memory import scoring_peak
        from mrl.models.number_formats import coarser

        rollout, learner = self.table.rollout, self.table.learner
        num_rows = learner.prompts_per_step * rollout.group_size
        rows, tokens = largest_canary(num_rows, self._prompt_tokens, rollout.max_new_tokens)
        number_format: Any = coarser(dtype, rollout.engine_dtype) if is_learner else None  # type: ignore[arg-type]
        if number_format == "float32" and self.table.device == "cuda":
            number_format = "tf32"
        return float(
            scoring_peak(self._model_config, dtype=dtype, rows=rows, tokens=tokens, number_format=number_format)
        )

    @cached_property
    def _plain_tokens(self) -> int:
        """Tokens of the longest prompt outside of episodes; 0 where the policy answers none."""
        if self.table.frozen or not self._config.gateway.serve:
            return 0
        return min(self._config.gateway.max_prompt_tokens, self._row_tokens(self.table))

    @cached_property
    def _scoring_given(self) -> float:
        """Bytes of a scoring pass over a text of `_plain_tokens`."""
        from mrl.memory_plan.pass_memory import given_text_peak

        if self._plain_tokens < 2:
            return 0.0
        dtype = self.table.rollout.engine_dtype
        return float(given_text_peak(self._model_config, dtype=dtype, tokens=self._plain_tokens))

    @property
    def _scoring_for_peers(self) -> float:
        """Bytes of scoring an answer as long as any policy's longest, expressed in as many tokens; 0 if the policy
        scores none.

        Where that takes several forwards, keys and values stay between them (`mrl.models.scoring.last_logprobs`), and
        those of one block are there twice, and once for each of its query heads.
        """
        from mrl.memory_plan.pass_memory import answer_peak
        from mrl.models.scoring import rows_at_once

        if self.name not in scorers(self._config.sharing, self._config.policies):
            return 0.0
        size, dtype, prompt = self._size, self.table.rollout.engine_dtype, self._prompt_tokens
        longest = max(policy.rollout.max_new_tokens for policy in self._config.policies.values())
        answer = max(longest, self._answer_tokens(self.table))
        read = min(answer, rows_at_once(1, size.vocab_size))
        one_pass = answer_peak(self._model_config, dtype=dtype, prompt_tokens=prompt, answer_tokens=read)
        kept = element_bytes(self.table) * size.cached_per_token * (prompt + answer) if read < answer else 0
        return one_pass + kept * (1 + (1 + size.query_heads_per_cached) / size.num_blocks)

    @cached_property
    def _folder(self) -> Path | None:
        folder = Path(self.table.model)
        if self.table.make is not None:
            folder = cached_folder(recipe_of(self._config, self.name))
            return folder if is_made(folder) else None
        return folder if (folder / "config.json").is_file() else None

    @cached_property
    def _model_config(self) -> Any:
        """Configuration of the model as far as it is known: of its folder, its recipe, or the number in the name of its
        source.
        """
        from mrl.models.skeleton import config_of_folder, config_of_number, config_of_recipe

        if self._folder is not None:
            try:
                return config_of_folder(self._folder)
            except ModelFolderError:  # a folder that preflight let pass, and that loading will refuse
                weights = files_of_weights(self._folder)
                return config_of_number(sum(file.stat().st_size for file in weights) // 2)
        return config_of_recipe(self.table.make) if self.table.make else config_of_number(named_parameters(self.table))

    @cached_property
    def _size(self) -> ModelSize:
        from mrl.models.skeleton import model_size

        return model_size(self._model_config)

    @cached_property
    def _adapters(self) -> int:
        """Elements of the adapters that its engines are given in place of all weights; 0 where they are given all
        weights.
        """
        from mrl.models.skeleton import model_size

        if self.table.rollout.weights != "adapters":
            return 0
        return model_size(self._model_config, self.table.learner.lora).trained

    @cached_property
    def longest_example_tokens(self) -> int:
        """Tokens of the longest example: the prompt of most bytes with the longest answer, or the longest episode, all
        rows of it.
        """
        answer = self._prompts[1] + self.table.rollout.max_new_tokens
        if not self._played:
            return answer
        room = self._row_tokens(self.table)
        if self._begins_rows:  # a pass has all rows together
            room = self.table.learner.microbatch_tokens
        return max(answer, *(min(room, self._prompts[1] + (task.max_episode_tokens or room)) for task in self._played))

    @property
    def _begins_rows(self) -> bool:
        """Whether an episode may have several rows; true also where no folder shows the chat template yet."""
        from mrl.models.turn_renderer import TurnRenderer

        if self.table.prompt.history != "template" or self.table.make is not None:
            return False
        try:
            return self._folder is None or TurnRenderer(self._folder, self.table.prompt, eos_ids=()).drops_reasoning
        except ModelFolderError:  # preflight reports it
            return False

    def _answer_tokens(self, policy: PolicyTable) -> int:
        """Return the most tokens that one row has after its prompt under a table: an answer, or an episode of all
        turns.

        Messages of an environment are estimated as long as the policy's answers may be, since only a run shows them.
        """
        answer = policy.rollout.max_new_tokens
        room = self._row_tokens(policy) - self._prompt_tokens if self._played else 0
        episodes = (min(task.max_episode_tokens or room, 2 * task.max_turns * answer) for task in self._played)
        return max(answer, min(room, max(episodes, default=0)))

    @property
    def _played(self) -> list[TaskTable]:
        return [task for task in self._config.tasks.values() if task.is_played]

    def _row_tokens(self, policy: PolicyTable) -> int:
        """Return the most tokens that one row of an episode may have."""
        from mrl.models.skeleton import episode_row_tokens

        return episode_row_tokens(policy, self._model_config)

    @property
    def _prompt_tokens(self) -> int:
        return self._prompts[0]

    @cached_property
    def _prompts(self) -> tuple[int, int]:
        """Mean tokens of some prompts, and tokens of the longest.

        By the policy's tokenizer, or by their bytes where there is none yet.
        """
        from mrl.models.prompting import PromptEncoder
        from mrl.tasks.pool import build_pool

        try:
            pool = build_pool(self._config.tasks, self._config.pool)
        except MissingError:
            return UNKNOWN_PROMPT_TOKENS, UNKNOWN_PROMPT_TOKENS
        prompts = [pool.prompt_at(place) for place in range(min(LOOKED_AT_PROMPTS, len(pool)))]
        prompts = [prompt for prompt in prompts if not pool.is_episode(prompt.prompt_id)]
        longest = [one for one in pool.longest(LOOKED_AT_PROMPTS // 2) if not pool.is_episode(one.prompt_id)]
        pool.close()
        if not prompts or not longest:  # environments give their prompts later
            return UNKNOWN_PROMPT_TOKENS, UNKNOWN_PROMPT_TOKENS
        try:
            encode = None if self._folder is None else PromptEncoder(self._folder, self.table.prompt).token_ids
        except ModelFolderError:  # as above
            encode = None

        def tokens(prompt: Prompt) -> float:
            return encode(prompt.content).size if encode else len(prompt.text.encode()) / BYTES_PER_TOKEN

        return math.ceil(sum(map(tokens, prompts)) / len(prompts)), math.ceil(max(map(tokens, longest)))
