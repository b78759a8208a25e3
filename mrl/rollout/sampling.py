"""Sampling of one policy: prompts become requests to its engine, finished answers are verified and become groups."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrl.engines.engine import Decoding, Engine, Generation, GenerationRequest, before_stop
from mrl.engines.token_sampling import answer_seeds
from mrl.records.codec import pack_array
from mrl.records.episodes import Opening, transcript
from mrl.records.experience import MAX_COMPLETION_BYTES
from mrl.records.readable_turns import readable_turns
from mrl.records.rollouts import (
    MAX_GROUP_BYTES,
    MAX_SHOWN_CHARS,
    MAX_TEXT_BYTES,
    Answer,
    HeldOutAnswer,
    HeldOutItem,
    ScoredGroup,
    WorkItem,
)
from mrl.rollout.episode import EpisodeRequest, PlayedEpisode
from mrl.tasks.extract import choice_of
from mrl.tasks.pool import TaskPool
from mrl.tasks.source import Turn
from mrl.tasks.verify import Verdict

TEXTS_SHARE = 0.25
"""Share of a group's message that the texts of its answers may fill: tokens of white space have many bytes."""
MAX_TRANSCRIPT_BYTES = 256 * 1024
"""Limit of the transcript of one episode."""
GIVEN, SAMPLED = "(a peer's turns)", "(own turns)"
"""Lines in the transcript of an episode that goes on from a peer's turns."""
NO_PROMPT = np.zeros(0, dtype=np.int32)
"""Token ids of a prompt that the environment gives later."""


@dataclass(frozen=True)
class Sampler:
    """Turns prompts into scored answers of one policy."""

    policy: str
    run_seed: int
    engine: Engine
    pool: TaskPool
    prompt_token_ids: Callable[[str | tuple[Turn, ...]], npt.NDArray[np.int32]]
    """Content of a prompt -> ids under the policy's tokenizer."""
    completion_bytes: Callable[[npt.NDArray[np.int32]], bytes]
    """Sampled ids -> bytes; special tokens have none."""
    stop: tuple[bytes, ...] = ()
    """Texts that end an answer, beside EOS."""
    held_out_decoding: Decoding | None = None
    """Decoding of held-out answers; None: as the policy samples."""
    read_prompt: Callable[[Sequence[int]], str] | None = None
    """Ids of a prompt -> its text with special tokens, for people to read; None without episodes."""

    def request(self, item: WorkItem | HeldOutItem, request_id: str) -> GenerationRequest:
        """Return the request to the engine for an item. A held-out answer has the same seed in every evaluation, and
        may be refused.
        """
        is_held_out, decoding = isinstance(item, HeldOutItem), None
        continuation = None if isinstance(item, HeldOutItem) else item.continuation
        if isinstance(item, HeldOutItem):
            seeds = answer_seeds(self.run_seed, self.policy, "held-out|" + item.prompt_id, 0, item.sample + 1)[-1:]
            decoding = self.held_out_decoding
        else:
            where = item.prompt_id, item.step, item.group_size
            seeds = answer_seeds(self.run_seed, self.policy, *where, position=item.position)
        if self.pool.is_episode(item.prompt_id):
            given = () if continuation is None else tuple(continuation.turns)
            return EpisodeRequest(
                request_id, NO_PROMPT, seeds, decoding=decoding, prompt_id=item.prompt_id, given=given
            )
        prompt = self.prompt_token_ids(self.pool.prompt(item.prompt_id).content)
        return GenerationRequest(request_id, prompt, seeds, is_held_out, decoding, tells_prompt=not is_held_out)

    def held_out(self, item: HeldOutItem, generation: Generation, verdict: Verdict) -> HeldOutAnswer:
        """Return the scored answer to a held-out prompt."""
        episode = generation if isinstance(generation, PlayedEpisode) else None
        return HeldOutAnswer(
            ticket=item.ticket,
            versions=generation.versions,
            completion=self.completion(generation)[:MAX_TEXT_BYTES],
            reward=verdict.reward,
            choice=choice_of(verdict.extracted),
            opening=self._opening(episode) if episode else "",
            turns=readable_turns(episode.segments, MAX_SHOWN_CHARS) if episode else [],
        )

    def group(
        self,
        item: WorkItem,
        prompt_token_ids: npt.NDArray[np.int32],
        answers: Sequence[Answer],
        *,
        opening: Opening | None = None,
    ) -> ScoredGroup:
        """Return the scored group of a finished item; `opening` is that of its episodes."""
        return ScoredGroup(
            ticket=item.ticket,
            prompt_id=item.prompt_id,
            task=self.pool.prompt(item.prompt_id).task,
            prompt_token_ids=pack_array(prompt_token_ids, "i4"),
            answers=list(answers),
            continuation=item.continuation,
            opening=opening,
        )

    def verdicts(self, prompt_id: str, generations: Sequence[Generation], *, rank: int) -> "Future[list[Verdict]]":
        """Return a future of the verdicts on answers to one prompt; never waits. `rank` orders answers that queue.

        Episodes already hold their verdicts.
        """
        if played := [one.verdict for one in generations if isinstance(one, PlayedEpisode)]:
            known: Future[list[Verdict]] = Future()
            known.set_result(played)
            return known
        return self.pool.submit([(prompt_id, self._text(generation)) for generation in generations], rank=rank)

    def answers(self, generations: Sequence[Generation], verdicts: Sequence[Verdict]) -> list[Answer]:
        """Return the answers with their verdicts; texts are cut to what a message has room for."""
        most = min(MAX_TEXT_BYTES, int(TEXTS_SHARE * MAX_GROUP_BYTES) // max(1, len(generations)))
        most = max(most, MAX_COMPLETION_BYTES + 1)  # so that no cut text is published: it is too long
        return [
            Answer(
                token_ids=pack_array(generation.token_ids, "i4"),
                logprobs=pack_array(generation.logprobs, "f4"),
                versions=generation.versions,
                completion=self.completion(generation)[:most],
                finish_reason=generation.finish_reason,
                reward=verdict.reward,
                rewards=dict(verdict.rewards),
                choice=choice_of(verdict.extracted) if verdict.is_voted else "",
                failure=f"{verdict.failure}: {verdict.words}" if verdict.failure else "",
                segments=generation.segments if isinstance(generation, PlayedEpisode) else [],
                ending=generation.ending if isinstance(generation, PlayedEpisode) else "",
            )
            for generation, verdict in zip(generations, verdicts, strict=True)
        ]

    def completion(self, generation: Generation) -> bytes:
        """Return the bytes of an answer without its EOS; of an episode, its transcript."""
        if not isinstance(generation, PlayedEpisode):
            return self.completion_bytes(generation.token_ids)
        text = transcript([message for segment in generation.segments for message in segment.messages])
        if generation.given:
            given = transcript([message for turn in generation.given for message in turn.messages])
            text = f"{GIVEN}\n{given}\n{SAMPLED}\n{text}"
        return text.encode(errors="replace")[:MAX_TRANSCRIPT_BYTES]

    def _opening(self, episode: PlayedEpisode) -> str:
        shown = self.read_prompt(episode.prompt_token_ids.tolist()) if self.read_prompt else ""
        return shown[:MAX_SHOWN_CHARS]

    def _text(self, generation: Generation) -> str:
        """Return the text that is verified: that before the EOS or stop string, as a server would give it.

        A character that is cut in the middle becomes a replacement mark.
        """
        text = before_stop(self.completion_bytes(generation.token_ids), self.stop)
        return text.decode("utf-8", errors="replace")
