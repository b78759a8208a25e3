"""Episodes of one policy: the engine that plays them, and its peers' episodes rendered in its own tokens."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mrl.alignment.receiver import Receiver, load_receiver
from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.engines.engine import Engine, before_stop
from mrl.errors import ModelFolderError
from mrl.models.chat_template import read_template
from mrl.models.families.family_calls import FamilyCall
from mrl.models.families.family_renderer import FamilyTurnRenderer, turn_renderer_of
from mrl.models.skeleton import config_of_folder, episode_row_tokens
from mrl.models.turn_renderer import PROBE_CALL, TurnRenderer
from mrl.records.direct_requests import TurnChunk
from mrl.records.episodes import Message, Opening, ToolCall, ToolSpec
from mrl.records.experience import SharedTurn
from mrl.rollout.direct_codec import DirectRequestCodec, spelled_token, text_so_far
from mrl.rollout.episode import EpisodeRules
from mrl.rollout.episode_engine import EpisodeEngine, EpisodeSetup
from mrl.rollout.turn_replay import TurnCodec
from mrl.sharing.peer_episodes import RenderedEpisode
from mrl.sharing.regimes import scorers
from mrl.tasks.environments.contract import MalformedCall, PolicyTurn
from mrl.tasks.environments.tool_syntax import (
    NONE,
    Call,
    Tools,
    ToolSyntax,
    call_of,
    opened_by,
    plain_calls,
    syntax_of,
)
from mrl.tasks.pool import TaskPool

Int32s = npt.NDArray[np.int32]
HALF = "\N{REPLACEMENT CHARACTER}"
"""Character that tokenizers decode an incomplete UTF-8 sequence to."""


def own_receiver(table: PolicyTable) -> Receiver:
    """The policy's tokenizer; of several EOS ids, its chat template says which one closes an answer.

    Raises ModelFolderError and TokenizerRefused as `load_receiver` does.
    """
    template = read_template(Path(table.model), table.prompt)
    return load_receiver(Path(table.model), template.behind_answer() if template else "")


def with_episodes(
    engine: Engine,
    config: RunConfig,
    policy: str,
    pool: TaskPool,
    receiver: Receiver,
    *,
    tell: Callable[[TurnChunk], None] | None = None,
) -> Engine:
    """Return `engine`, wrapped to play episodes where a task has an environment; `tell` gets turns while they grow.

    Raises ModelFolderError where the policy's chat template has no way from one turn to the next.
    """
    if not pool.has_episodes:
        return engine
    table = config.policies[policy]
    words = peer_renderer(config, policy, receiver)
    assert words is not None, "a task has an environment"
    renderer = words.renderer
    renderer.check(has_tools=False)
    syntax, room = _as_it_is_said(own_syntax(renderer), renderer), row_tokens(table)
    in_a_pass = sys.maxsize if table.frozen else table.learner.microbatch_tokens

    def rules(prompt_id: str) -> EpisodeRules:
        task = config.tasks[pool.prompt(prompt_id).task]
        return EpisodeRules(task.max_turns, task.max_episode_tokens or in_a_pass, task.failed_reward)

    def read(text: str, is_cut: bool, tools: Sequence[ToolSpec]) -> tuple[PolicyTurn, Message]:
        said = before_stop(text.encode(), table.prompt.stop_bytes).decode(errors="replace")
        return read_turn(syntax if tools else NONE, said, is_cut=is_cut, tools=[tool.as_chat() for tool in tools])

    def so_far(text: str, has_tools: bool) -> str:
        whole = text.rstrip(HALF).encode()
        return text_so_far(whole, table.prompt.stop_bytes, syntax if has_tools and syntax is not NONE else None)

    setup = EpisodeSetup(
        open=pool.open_episode,
        rules=rules,
        codec=TurnCodec(
            renderer,
            read,
            words.turn,
            can_call=syntax is not NONE,
            so_far=so_far,
            spelled=partial(spelled_token, receiver, renderer),
        ),
        max_turn_tokens=table.rollout.max_new_tokens,
        row_tokens=room,
        pass_tokens=in_a_pass,
        in_step=config.run.sync,
        tell=tell,
        tells_opening=bool(scorers(config.sharing, config.policies)),
    )
    playing: Engine = EpisodeEngine(engine, setup)  # attributes that it lacks are those of the engine within
    return playing


def read_turn(syntax: ToolSyntax, text: str, *, is_cut: bool, tools: Tools = ()) -> tuple[PolicyTurn, Message]:
    """Return the turn for the environment, and the message to keep: the whole text where a call cannot be read."""
    turn = syntax.read(text, is_cut=is_cut, tools=tools)
    content = turn.text if turn.broken else turn.content
    return turn, Message(role="assistant", content=content, tool_calls=() if turn.broken else turn.tool_calls)


def own_syntax(renderer: TurnRenderer) -> ToolSyntax:
    """Return the policy's syntax of tool calls: its chat template's, else its family's, where its table names one."""
    syntax = syntax_of(renderer.template)
    if renderer.template and renderer.said("", (PROBE_CALL,)) is None:  # it shows calls, and renders none (SmolLM3)
        syntax = NONE
    if syntax is not NONE or not isinstance(renderer, FamilyTurnRenderer) or not renderer.mark:
        return syntax

    def calls(text: str, tools: Tools) -> list[Call]:
        return [_family_call(one) for one in renderer.calls(text, tools)]

    return opened_by(renderer.mark, renderer.family, calls, thought=renderer.thought_end)


def _as_it_is_said(syntax: ToolSyntax, renderer: TurnRenderer) -> ToolSyntax:
    """Limit a turn to one call where the template renders no more: it could not go on after several calls."""
    is_single = syntax is not NONE and renderer.said("", (PROBE_CALL,)) and not renderer.said("", (PROBE_CALL,) * 2)
    return replace(syntax, most_calls=1) if is_single else syntax


def _family_call(call: FamilyCall) -> Call:
    if call.fault:
        return MalformedCall(f"the tool call cannot be read: {call.fault}")
    return call_of({"name": call.name, "arguments": call.arguments})


def peer_renderer(config: RunConfig, policy: str, receiver: Receiver) -> "PeerEpisodeRenderer | None":
    """Return the policy's rendering of its peers' episodes; None where no task has an environment."""
    tasks = [task for task in config.tasks.values() if task.is_played]
    if not tasks:
        return None
    table, room = config.policies[policy], row_tokens(config.policies[policy])
    renderer = turn_renderer_of(Path(table.model), table.prompt, eos_ids=receiver.eos_ids)
    return PeerEpisodeRenderer(
        renderer,
        receiver.eos_id if receiver.eos_ids else None,
        table.rollout.max_new_tokens,
        max(min(room, task.max_episode_tokens or room) for task in tasks),  # the task bounds all rows
    )


def direct_codec(config: RunConfig, policy: str, receiver: Receiver) -> DirectRequestCodec:
    """Return how the policy is asked, and its answers are read, outside of episodes."""
    table = config.policies[policy]
    renderer = turn_renderer_of(Path(table.model), table.prompt, eos_ids=receiver.eos_ids)
    syntax = own_syntax(renderer)
    return DirectRequestCodec(
        policy=policy,
        receiver=receiver,
        renderer=renderer,
        syntax=None if syntax is NONE else syntax,
        stop=table.prompt.stop_bytes,
        temperature=table.rollout.temperature,
        max_new_tokens=table.rollout.max_new_tokens,
        row_tokens=row_tokens(table),
        max_prompt_tokens=config.gateway.max_prompt_tokens,
    )


def row_tokens(table: PolicyTable) -> int:
    """Return the tokens that a prompt and its episode may have together under this policy."""
    return episode_row_tokens(table, config_of_folder(Path(table.model)))


@dataclass(frozen=True)
class PeerEpisodeRenderer:
    """Renders the episodes of peers in the policy's own tokens, as they would stand in a row of the policy."""

    renderer: TurnRenderer
    eos_id: int | None
    max_turn_tokens: int
    max_episode_tokens: int

    def opening(self, opening: Opening) -> Int32s | str:
        """[P] ids of the prompt of an episode with this opening; "no_opening" where the template refuses it."""
        try:
            return self.renderer.opening(opening.messages, [tool.as_chat() for tool in opening.tools])
        except ModelFolderError:
            return "no_opening"

    def spell(self, turns: Sequence[SharedTurn]) -> RenderedEpisode | str:
        """Return the episode after its prompt in own tokens, or the reason why that is impossible.

        "tool_calls": the policy's template cannot render its calls. "no_bridge": the template cannot go on with an
        environment's messages. "too_long": a turn, or the whole, is longer than the policy's own may be; it is not cut,
        since only the whole was verified. "malformed": it does not begin with a sampled turn, or has a sampled turn
        that is no single message.
        """
        said = list[Int32s]()
        for turn in turns:
            if turn.is_sampled:
                found = self.turn(turn.messages)
                if isinstance(found, str):
                    return found
                said.append(found)
        return self.join(turns, said)

    def join(self, turns: Sequence[SharedTurn], said: Sequence[Int32s]) -> RenderedEpisode | str:
        """Return the episode with `said`, ids [T] of each sampled turn in order; or a reason, as `spell`."""
        parts, own = list[Int32s](), iter(said)
        calls: Sequence[ToolCall] = ()
        for turn in turns:
            if not parts and not turn.is_sampled:
                return "malformed"
            found = next(own) if turn.is_sampled else self._bridge(parts[-1], calls, turn.messages)
            if isinstance(found, str):
                return found
            calls = turn.messages[0].tool_calls if turn.is_sampled else ()
            parts.append(found)
        if sum(part.size for part in parts) > self.max_episode_tokens:
            return "too_long"
        is_sampled, sizes = np.array([turn.is_sampled for turn in turns]), [part.size for part in parts]
        return RenderedEpisode(np.concatenate(parts), np.repeat(is_sampled, sizes))

    def read(self, token_ids: Sequence[int]) -> str:
        """Return token ids as text, special tokens included, without the end of a turn."""
        return self.renderer.text(token_ids)

    def turn(self, messages: Sequence[Message]) -> Int32s | str:
        """[T] ids of one turn, or a reason as for an episode: "malformed", "tool_calls" or "too_long"."""
        text = self.text(messages)
        if isinstance(text, str):
            return text
        found = self.renderer.turn(text.decode(), eos_id=self.eos_id)
        return found if found.size <= self.max_turn_tokens else "too_long"

    def text(self, messages: Sequence[Message]) -> bytes | str:
        """Return one turn as the policy would write it, in UTF-8, or a reason: "malformed" or "tool_calls"."""
        if len(messages) != 1 or messages[0].role != "assistant":
            return "malformed"
        said = messages[0]
        found = self.renderer.said(said.content, said.tool_calls)
        if found is None and not self.renderer.template:
            found = "\n".join([said.content, plain_calls(said.tool_calls)]).strip("\n")
        return "tool_calls" if found is None else found.encode()

    def rest(self, text: bytes, *, is_begun: bool, is_ended: bool) -> Int32s:
        """[T] ids of the last part of a turn. `is_begun`: another part is before it. `is_ended`: EOS closes it."""
        return self.renderer.turn(text.decode(), eos_id=self.eos_id if is_ended else None, is_begun=is_begun)

    def _bridge(self, turn_ids: Int32s, calls: Sequence[ToolCall], messages: Sequence[Message]) -> Int32s | str:
        try:
            return self.renderer.bridge(turn_ids.tolist(), calls, messages)
        except ModelFolderError:
            return "no_bridge"
