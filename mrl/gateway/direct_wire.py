"""Requests outside of episodes, in the forms of OpenAI's API and of vLLM's for token ids <-> messages to workers.

The forms of OpenAI are https://platform.openai.com/docs/api-reference/chat and /completions. A key that no engine of a
run can follow is refused.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from mrl.errors import RecordError
from mrl.gateway.chat_wire import (
    MAX_CHOICES,
    SAMPLING,
    ChatCall,
    ChatRefusal,
    answered_choice,
    read_flag,
    read_messages,
    read_tools,
)
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.records.direct_requests import MAX_DIRECT_MESSAGES, DirectAnswer, DirectRequest, TokenLogprob, direct_message
from mrl.records.episodes import Message
from mrl.tasks.environments.contract import RawPrompt

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
}
"""Keys that no engine of a run heeds -> values that are accepted, since they change nothing."""
MAX_ANSWERS, MAX_STOPS, MAX_TEMPERATURE = 256, 64, 100.0
COLDEST = 1e-5
"""Temperatures below this count as 0: logits divided by a tiny one overflow float32. vLLM has the same bound."""
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 256
"""Bytes of a request as a message to a worker, at most; leaves room for the number of the try in its name."""


@dataclass(frozen=True, slots=True)
class DirectCall:
    """One HTTP request outside of episodes, as one DirectRequest for each answer, in the order of the answers."""

    model: str
    requests: tuple[DirectRequest, ...]
    wants_logprobs: bool
    echoes: bool
    is_streamed: bool
    includes_usage: bool
    """Whether the last chunk of a stream is to have the count of tokens."""


def read_direct_chat(body: Mapping[str, Any]) -> DirectCall:
    """Read a request to `/v1/chat/completions`. Raises ChatRefusal."""
    try:
        messages, tools = read_messages(body.get("messages")), read_tools(body.get("tools"))
    except RecordError as error:
        raise ChatRefusal(str(error)) from None
    if len(messages) > MAX_DIRECT_MESSAGES:
        raise ChatRefusal(f"messages: {len(messages)} messages; at most {MAX_DIRECT_MESSAGES}")
    if body.get("tool_choice") == "none":
        body, tools = {**body, "tool_choice": None}, ()
    asked = {"messages": messages, "tools": tuple(json.dumps(tool.as_chat()) for tool in tools)}
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    return _call(body, [asked], _sampling(body, limit, least=1), wants_logprobs=read_flag(body, "logprobs"))


def read_completion(body: Mapping[str, Any]) -> DirectCall:
    """Read a request to `/v1/completions`, with text or token ids of the policy. Raises ChatRefusal."""
    echoes, logprobs = read_flag(body, "echo"), body.get("logprobs")
    wants_logprobs = logprobs is not None and logprobs is not False
    if wants_logprobs and logprobs not in (0, 1):
        raise ChatRefusal(f"logprobs = {logprobs!r:.40}: at most 1 (the most likely token beside each given token)")
    prompts = [_asked(prompt) for prompt in _prompts(body.get("prompt"))]
    sampling = _sampling(body, body.get("max_tokens"), least=0 if echoes else 1) | {"scores_given": echoes}
    return _call(body, prompts, sampling, wants_logprobs=wants_logprobs, echoes=echoes)


def read_generate(body: Mapping[str, Any]) -> DirectCall:
    """Read a request to `/inference/v1/generate`: token ids, and vLLM's `sampling_params`. Raises ChatRefusal."""
    parameters = body.get("sampling_params") or {}
    if not isinstance(parameters, Mapping):
        raise ChatRefusal("sampling_params: wanted an object")
    whole = {**parameters, **{key: body.get(key) for key in ("model", "stream", "stream_options")}}
    asked = _asked(body.get("token_ids"))
    if "token_ids" not in asked:
        raise ChatRefusal("token_ids: wanted a list of ids of the policy's tokenizer")
    return _call(whole, [asked], _sampling(whole, parameters.get("max_tokens"), least=1), wants_logprobs=True)


def of_session(call: DirectCall, body: Mapping[str, Any]) -> ChatCall:
    """Return a call with text or token ids as a request for the next turn of a session. Raises ChatRefusal."""
    if len(call.requests) != MAX_CHOICES:
        raise ChatRefusal("n, or several prompts: a session takes one prompt and gives one answer at a time")
    if call.echoes:
        raise ChatRefusal("echo: given tokens are not scored in a session; omit echo")
    (asked,) = call.requests
    given = body.get("sampling_params")
    told = {**(given if isinstance(given, Mapping) else {}), **body}
    unheeded = {key: told[key] for key in (*SAMPLING, "stop_token_ids") if told.get(key) is not None}
    try:
        bare = RawPrompt(asked.text, asked.token_ids)
    except RecordError as error:
        raise ChatRefusal(f"prompt: {error}") from None
    return ChatCall((), (), call.is_streamed, call.wants_logprobs, unheeded, bare)


def chat_answer(
    call_id: str, call: DirectCall, answers: Sequence[DirectAnswer], head: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON body that answers a chat request."""
    choices = []
    for index, one in enumerate(answers):
        said = Message("assistant", one.text, one.tool_calls)
        choice = answered_choice(f"{call_id}-{index}", said, is_cut=one.is_cut) | {"index": index}
        if call.wants_logprobs:
            choice["logprobs"] = as_contents(one.sampled) | {"refusal": None}
        choices.append(choice)
    kind = {"id": call_id, "object": "chat.completion"}
    return kind | dict(head) | {"choices": choices, "usage": usage_of(answers)}


def completion_answer(
    call_id: str, call: DirectCall, answers: Sequence[DirectAnswer], head: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON body that answers a completions request; with `echo`, the given text stands before the sampled text."""
    choices = []
    for index, one in enumerate(answers):
        given = one.given if call.echoes else ()
        text = b"".join(token.spelled for token in given).decode(errors="replace") + one.text
        reason = "length" if one.is_cut else "stop"
        logprobs = as_lists((*given, *one.sampled)) if call.wants_logprobs else None
        choices.append({"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs})
    kind = {"id": call_id, "object": "text_completion"}
    return kind | dict(head) | {"choices": choices, "usage": usage_of(answers)}


def generate_answer(
    call_id: str, call: DirectCall, answers: Sequence[DirectAnswer], head: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON body that answers a request with token ids."""
    choices = [
        {
            "index": index,
            "token_ids": [token.token_id for token in one.sampled],
            "logprobs": as_id_contents(one.sampled),
            "finish_reason": "length" if one.is_cut else "stop",
        }
        for index, one in enumerate(answers)
    ]
    return {"request_id": call_id} | dict(head) | {"choices": choices, "usage": usage_of(answers)}


def _call(
    body: Mapping[str, Any],
    prompts: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    *,
    wants_logprobs: bool,
    echoes: bool = False,
) -> DirectCall:
    for key, allowed in NEUTRAL.items():
        if body.get(key) is not None and body[key] not in allowed:
            raise ChatRefusal(f"{key} = {body[key]!r:.80}: not supported by the engines of a run; omit {key}")
    num_each = _whole(body, "n", 1, MAX_ANSWERS) or 1
    if num_each * len(prompts) > MAX_ANSWERS:
        raise ChatRefusal(f"{num_each * len(prompts)} answers in one request; at most {MAX_ANSWERS}")
    seed, call_id = body.get("seed"), secrets.token_hex(8)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ChatRefusal(f"seed {seed!r:.40}: wanted an integer")
    is_streamed, includes_usage = read_flag(body, "stream"), _includes_usage(body)
    requests = [
        DirectRequest(
            request_id=f"{call_id}-{place}-{index}",
            seed=secrets.randbits(64) if seed is None else _seed_of(seed, index),
            streams=is_streamed and not echoes,  # given tokens stand first in the answer, and come with its end
            **prompt,
            **sampling,
        )
        for place, prompt in enumerate(prompts)
        for index in range(num_each)
    ]
    for request in requests[::num_each]:
        _check_sent(request)
    model = body.get("model") if isinstance(body.get("model"), str) else ""
    return DirectCall(str(model), tuple(requests), wants_logprobs, echoes, is_streamed, includes_usage)


def _includes_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if body.get("stream") is not True or not isinstance(options, Mapping):
        raise ChatRefusal("stream_options: wanted an object, and only together with stream = true")
    return read_flag(options, "include_usage")


def _check_sent(request: DirectRequest) -> None:
    """Check that a request can be sent to a worker. Raises ChatRefusal for a lone surrogate, or too many bytes."""
    try:
        num_bytes = len(direct_message(request))
    except UnicodeEncodeError:
        raise ChatRefusal("prompt or stop: not valid UTF-8 (it has an unpaired surrogate)") from None
    if num_bytes > MAX_REQUEST_BYTES:
        words = f"prompt and stop: {num_bytes:,} bytes together; at most {MAX_REQUEST_BYTES:,}"
        raise ChatRefusal(words, code="too_long", status=413)


def _sampling(body: Mapping[str, Any], limit: object, *, least: int) -> dict[str, Any]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(one, str) for one in stops):
        raise ChatRefusal(f"stop: wanted a string, or a list of at most {MAX_STOPS} strings")
    temperature = _number(body, "temperature", 0.0, MAX_TEMPERATURE)
    return {
        "temperature": 0.0 if temperature is not None and temperature < COLDEST else temperature,
        "top_p": _number(body, "top_p", 1e-6, 1.0) or 1.0,
        "max_new_tokens": _whole({"max_tokens": limit}, "max_tokens", least, 1 << 31),
        "stop": tuple(one for one in stops if one),
        "stop_token_ids": _stop_ids(body.get("stop_token_ids")),
    }


def _stop_ids(found: object) -> tuple[int, ...]:
    """Read stop ids, sorted and without repeats: requests with the same ids are then equal. Raises ChatRefusal."""
    if found is None or found == []:
        return ()
    if not _are_ids(found) or len(found) > MAX_STOPS:
        raise ChatRefusal(f"stop_token_ids {found!r:.80}: wanted at most {MAX_STOPS} ids of the policy's tokenizer")
    return tuple(sorted(set(found)))


def _are_ids(found: object) -> TypeGuard[list[int]]:
    return isinstance(found, list) and bool(found) and all(type(one) is int and 0 <= one < 1 << 31 for one in found)


def _prompts(found: object) -> list[Any]:
    if isinstance(found, list) and found and isinstance(found[0], str | list):
        return found
    return [found]


def _asked(prompt: object) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if _are_ids(prompt):
        return {"token_ids": tuple(prompt)}
    raise ChatRefusal(
        "prompt: wanted a string, a list of token ids of the policy's tokenizer, or a list of such prompts"
    )


def _number(body: Mapping[str, Any], key: str, least: float, most: float) -> float | None:
    found = body.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= most:
        raise ChatRefusal(f"{key} {found!r:.40}: wanted {least:g} to {most:g}")
    return float(found)


def _whole(body: Mapping[str, Any], key: str, least: int, most: int) -> int | None:
    found = body.get(key)
    if found is not None and (type(found) is not int or not least <= found <= most):
        raise ChatRefusal(f"{key} {found!r:.40}: wanted an integer, {least} or more")
    return found


def _seed_of(seed: int, index: int) -> int:
    """Seed (64 bits) of the answer `index` to a prompt: the same in every request with this `seed`."""
    return int.from_bytes(hashlib.blake2b(f"plain|{seed}|{index}".encode(), digest_size=8).digest(), "little")


def as_contents(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities of sampled tokens, in the form of the chat API."""
    spelled = [(token.spelled.decode(errors="replace"), token) for token in tokens]
    content = [
        {"token": text, "logprob": token.logprob, "bytes": list(token.spelled), "top_logprobs": []}
        for text, token in spelled
    ]
    return {"content": content}


def as_id_contents(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities of sampled tokens by their ids, under both keys that versions of vLLM have for an id."""
    named = [{"token_id": token.token_id, "token": f"token_id:{token.token_id}"} for token in tokens]
    return {"content": [one | ids for one, ids in zip(as_contents(tokens)["content"], named, strict=True)]}


def as_lists(tokens: Sequence[TokenLogprob], start: int = 0) -> dict[str, Any]:
    """Log-probabilities of tokens, in the form of the completions API: one list for each field.

    A given token has the likeliest token in its place beside it, a sampled token none. `start` is the number of
    characters before the first token.
    """
    offsets = [start]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + num_chars(token))
    names = [_name(token.spelled) for token in tokens]
    tops: list[dict[str, float | None] | None] = []
    for token, name in zip(tokens, names, strict=True):
        has_top = token.likeliest_logprob is not None
        top = {name: token.logprob, _name(token.likeliest_spelled): token.likeliest_logprob}
        tops.append(top if has_top else None)
    logprobs = [token.logprob for token in tokens]
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def num_chars(token: TokenLogprob) -> int:
    """Characters of a token that is decoded by itself."""
    return len(token.spelled.decode(errors="replace"))


def _name(spelled: bytes) -> str:
    """Name of a token: its text or, where its bytes are no text, the bytes in hexadecimal, as in OpenAI's API.

    Decoded with replacement characters, many such tokens would have the same name.
    """
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def usage_of(answers: Sequence[DirectAnswer]) -> dict[str, int]:
    """Count of tokens, given and sampled, of all answers to a request, as JSON."""
    given, sampled = sum(one.num_given_tokens for one in answers), sum(len(one.sampled) for one in answers)
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}
