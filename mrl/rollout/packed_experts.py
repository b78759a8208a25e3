"""Experts of a mixture model that an engine told with the answers of a group, packed for the learner."""

from collections.abc import Sequence

import msgspec
import structlog

from mrl.engines.engine import Generation
from mrl.records.chosen_experts import MAX_EXPERTS_BYTES, ChosenExperts, Experts
from mrl.records.rollouts import ScoredGroup

log = structlog.get_logger()


def with_experts(group: ScoredGroup, generations: Sequence[Generation]) -> ScoredGroup:
    """Return the group with the experts of its answers and of its prompt; unchanged where the engine told none.

    It is unchanged, too, where the experts need more than `MAX_EXPERTS_BYTES`: the learner's routers choose then.
    """
    told = [generation.experts for generation in generations]
    if all(one is None for one in told):
        return group
    num_before = max(0, len(group.prompt_token_ids) // 4 - 1)
    sampled, prompts = list[ChosenExperts | None](), list[Experts]()
    for generation, experts_RX in zip(generations, told, strict=True):
        num_tokens = generation.logprobs.size
        if experts_RX is None or not num_tokens:
            sampled.append(None)
            continue
        sampled.append(ChosenExperts.packed(experts_RX[-num_tokens:]))
        if len(experts_RX) == num_before + num_tokens > num_tokens:
            prompts.append(experts_RX[:num_before])
    of_prompt = ChosenExperts.packed(prompts[0]) if prompts else None
    num_bytes = sum(len(one.ids) for one in (*sampled, of_prompt) if one is not None)
    if num_bytes > MAX_EXPERTS_BYTES:
        told_of = {"task": group.task, "prompt": group.prompt_id, "bytes": num_bytes, "most": MAX_EXPERTS_BYTES}
        cure = "lower rollout.group_size or rollout.max_new_tokens"
        log.warning("experts of a group not replayed: exceed the message size limit", **told_of, cure=cure)
        return group
    answers = [msgspec.structs.replace(a, experts=one) for a, one in zip(group.answers, sampled, strict=True)]
    return msgspec.structs.replace(group, answers=answers, prompt_experts=of_prompt)
