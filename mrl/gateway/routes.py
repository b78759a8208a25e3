"""The HTTP server of the gateway.

    GET  /v1/models                      the policies of the run, and their versions that are kept and served
    POST /v1/sessions                    an episode to play, or one of each of several policies
    POST /v1/chat/completions            the policy's next turn, under the session's key
    POST /v1/completions                 the next turn behind a text or token ids, without roles
    POST /inference/v1/generate          the next turn behind token ids, as vLLM takes them
                                         (the last three outside of episodes: see `plain_routes`)
    POST /v1/sessions/ID/reward          the episode is over: {"reward": 1.0}
    POST /v1/sessions/ID/fail            the agent cannot go on: {"reason": "..."}, and a "kind" of AGENT_FAILURES
    GET  /seat                           WebSocket of an environment process that offers an episode
    GET  /worker                         WebSocket of a rollout worker

Every request has to carry the run's key, or a session's key, as `Authorization: Bearer KEY`; the WebSockets have a key
of their own. Beside the run's key the header `MRL-Session` names a session, once it was opened under that name.
"""

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import structlog
from aiohttp import WSMsgType, web

from mrl.gateway.chat_wire import ChatCall, ChatRefusal, check_model, completion, read_chat
from mrl.gateway.direct_queue import DirectRequestQueue
from mrl.gateway.direct_routes import CHAT, COMPLETIONS, GENERATE, OF_CHAT_CHUNK, DirectFormat, DirectRoutes
from mrl.gateway.direct_stream import OnPiece, chat_choices, stream_answers
from mrl.gateway.direct_wire import as_contents, of_session
from mrl.gateway.session import AgentSession
from mrl.gateway.session_registry import MAX_WAIT_S, SessionRegistry
from mrl.gateway.unauthenticated import UnauthenticatedConnections
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.records.direct_requests import DirectAnswer, DirectChunk
from mrl.tasks.environments.agent_seat import FinishSeat, OfferSeat, StepSeat, read_seat, seat_reply
from mrl.tasks.environments.contract import LIMITS, MEMORY, RAISED, TIMEOUT

ANY_POLICY = "policy"
"""Name by which an agent may call the policy of its session, whichever policy it is."""
AGENT_FAILURES = RAISED, MEMORY, TIMEOUT
"""Kinds of failure that an agent may give for its episode."""
OF_RUN = "/seat", "/worker"
"""Routes of the run's own processes."""
SHUTDOWN_S = 1.0
"""Seconds that open requests have to end when the run ends."""
SESSION_HEADER = "MRL-Session"
"""Header that names the session of a request with the run's key."""
SESSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SESSION_MARK = "."
"""Separator in a session's key, between the session's id and the HMAC that proves the key."""
LONE = "surrogatepass"
"""Error handler to encode headers: a header may be any bytes, and bytes that are no text become lone surrogates."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = structlog.get_logger()


class Gateway:
    """The HTTP routes over one SessionRegistry. Agents show `key`; environment processes and workers show
    `seat_key`.
    """

    def __init__(
        self,
        registry: SessionRegistry,
        *,
        policies: Sequence[str],
        key: str,
        seat_key: str,
        max_body_bytes: int,
        tasks: Sequence[str] = (),
        desk: DirectRequestQueue | None = None,
    ) -> None:
        """With a `desk`, requests outside of episodes are answered. Without `tasks`, agents may ask for any task."""
        self._registry, self._policies, self._key, self._seat_key = registry, tuple(policies), key, seat_key
        self._tasks = tuple(tasks)
        self._max_body_bytes, self._strangers = max_body_bytes, UnauthenticatedConnections()
        self._plain = DirectRoutes(desk)
        self._told: set[tuple[str, str]] = set()
        """(task, key of a request) that were logged as unheeded."""

    def runner(self) -> web.AppRunner:
        """Return the server, to be run in the event loop of the book. A client that hangs up cancels its request."""
        application = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._answered])
        application.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/sessions", self._open),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/sessions/{session}/reward", self._reward),
                web.post("/v1/sessions/{session}/fail", self._fail),
                web.post("/v1/completions", partial(self._bare, COMPLETIONS)),
                web.post("/inference/v1/generate", partial(self._bare, GENERATE)),
                web.get("/seat", self._seat),
                web.get("/worker", self._worker),
            ]
        )
        quiet = logging.getLogger("mrl.gateway.http")
        quiet.setLevel(logging.CRITICAL)  # input that is no HTTP comes from strangers, who may not fill the log
        return web.AppRunner(
            application, access_log=None, logger=quiet, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )

    def send_strangers_away(self, runner: web.AppRunner) -> None:
        """Close connections without a key that stay too long, or are too many."""
        if runner.server is not None:
            self._registry.counts["refused/stranger"] += self._strangers.send_away(runner.server.connections)

    def key_of(self, session_id: str) -> str:
        """Key of a session, derived from the run's key, which it does not reveal."""
        told = hmac.new(self._key.encode(), session_id.encode(errors=LONE), "sha256").hexdigest()
        return f"{session_id}{SESSION_MARK}{told}"

    # Agents.

    async def _models(self, request: web.Request) -> web.Response:
        kept = [] if self._check_key(request) else self._plain.kept(self._policies)
        models = [{"id": n, "object": "model", "created": 0, "owned_by": "mrl"} for n in (*self._policies, *kept)]
        return web.json_response({"object": "list", "data": models})

    async def _open(self, request: web.Request) -> web.Response:
        name = self._check_key(request)
        if SESSION_MARK in _bearer(request):
            raise ChatRefusal(
                "a session's key cannot open another session; use the run's key", code="invalid_api_key", status=401
            )
        asked = await _body(request)
        wait_s = asked.get("wait_s", MAX_WAIT_S)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
            raise ChatRefusal(f"wait_s {wait_s!r:.40}: wanted 0 to {MAX_WAIT_S:g}")
        policies = self._asked_policies(asked)
        if name and len(policies) > 1:
            raise ChatRefusal(f"{SESSION_HEADER}: names one session; omit it when asking for several models")
        task, player = str(asked.get("task") or ""), str(asked.get("player") or "")
        if task and self._tasks and task not in self._tasks:  # no episode would ever wait there
            raise ChatRefusal(f"task {task!r:.80}: wanted one of {', '.join(self._tasks)}", status=404)
        sessions = await self._registry.take(policies, task=task, wait_s=wait_s, name=name, player=player)
        if not sessions:
            answer = ChatRefusal("no episode is available; try again", code="none").as_json()
            return web.json_response(answer, status=503, headers={"Retry-After": "1"})
        told = [self._told_session(session) for session in sessions]
        return web.json_response({"sessions": told} if "models" in asked else told[0])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session_id = self._check_key(request)
        if not session_id:
            return await self._plain.answer(request, await _body(request), CHAT)
        session = self._registry.session(session_id)
        call = read_chat(await _body(request), models=(session.policy, ANY_POLICY))
        self._tell_unheeded(session.task, call)
        created_s = int(time.time())
        if call.is_streamed:
            head = {"created": created_s, "model": session.policy} | OF_CHAT_CHUNK
            return await stream_answers(
                request,
                [partial(self._streamed, session, call)],
                wording=lambda one: chat_choices(
                    _turn_id(session, one.version), one, wants_logprobs=call.wants_logprobs
                ),
                head=lambda number: {"id": _turn_id(session, number), **head},
            )
        number, turn, said = await session.ask(call)
        self._registry.counts["turns"] += 1
        call_id = _turn_id(session, number)
        answer = completion(call_id, session.policy, turn, said, created_s=created_s)
        if call.wants_logprobs and turn.sampled:
            answer["choices"][0]["logprobs"] = as_contents(turn.sampled) | {"refusal": None}
        return web.json_response(answer)

    async def _streamed(self, session: AgentSession, call: ChatCall, on_piece: OnPiece) -> DirectAnswer:
        """Return the policy's turn as a DirectAnswer, with the number of the turn as its version."""

        def grew(number: int, text: str) -> None:
            on_piece(DirectChunk(request_id="", version=number, text=text))

        number, turn, said = await session.ask(call, grew)
        self._registry.counts["turns"] += 1
        return DirectAnswer(
            request_id="",
            version=number,
            num_given_tokens=0,
            text=said.content,
            tool_calls=said.tool_calls,
            sampled=turn.sampled,
            is_cut=turn.is_cut,
        )

    async def _bare(self, form: DirectFormat, request: web.Request) -> web.StreamResponse:
        session_id, body = self._check_key(request), await _body(request)
        if not session_id:
            return await self._plain.answer(request, body, form)
        session, plain = self._registry.session(session_id), form.read(body)
        check_model(plain.model, (session.policy, ANY_POLICY))
        call = of_session(plain, body)
        self._tell_unheeded(session.task, call)
        head = {"created": int(time.time()), "model": session.policy}

        async def asking(on_piece: OnPiece) -> DirectAnswer:
            answer = await self._streamed(session, call, on_piece)
            if form is GENERATE and not answer.sampled:
                words = f"the turn has more than {LIMITS.sampled:,} tokens; use /v1/completions to get it as text"
                raise ChatRefusal(words, code="too_long")
            return answer

        if call.is_streamed:
            return await stream_answers(
                request,
                [asking],
                wording=lambda one: form.wording(plain, _turn_id(session, one.version), one),
                head=lambda number: {form.id_key: _turn_id(session, number), **form.of_chunk, **head},
            )
        answer = await asking(lambda piece: None)
        told = replace(plain, wants_logprobs=plain.wants_logprobs and bool(answer.sampled))
        whole = form.whole(_turn_id(session, answer.version), told, [answer], head)
        return web.json_response({key: value for key, value in whole.items() if key != "usage"})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session_in_path(request)
        value = (await _body(request)).get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ChatRefusal(f"reward {value!r:.40}: wanted a number")
        session.reward(float(value))
        return web.json_response({"id": session.session_id, "reward": value})

    async def _fail(self, request: web.Request) -> web.Response:
        session = self._session_in_path(request)
        told = await _body(request)
        words, kind = str(told.get("reason") or "no reason given"), told.get("kind", RAISED)
        if kind not in AGENT_FAILURES:
            raise ChatRefusal(f"kind {kind!r:.40}: wanted one of {', '.join(AGENT_FAILURES)}")
        session.fail(f"the agent reported a failure: {words}", kind)
        return web.json_response({"id": session.session_id})

    # Seats.

    async def _seat(self, request: web.Request) -> web.WebSocketResponse:
        """Serve the seat of one episode of a policy, from its offer to its last reply or until the seat hangs up."""
        self._check_seat_key(request)
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=30.0)
        await socket.prepare(request)
        session: AgentSession | None = None
        waiting: asyncio.Task[None] | None = None
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                match read_seat(message.data):
                    case OfferSeat(policy=policy, task=task, row=row):
                        session = self._registry.offer(policy, task, row)
                        reply = session.opened()
                    case StepSeat(turn=turn) if session is not None:
                        reply = session.step(turn)
                    case FinishSeat(reason=reason, turn=last) if session is not None:
                        reply = session.finish(reason, last)
                    case _:
                        break
                waiting = asyncio.ensure_future(_pass_on(socket, reply))
        except msgspec.DecodeError:
            log.warning("malformed message from an environment process; closing its connection")
        finally:
            if waiting is not None:
                waiting.cancel()
            if session is not None:
                self._registry.leave(session)
        return socket

    async def _worker(self, request: web.Request) -> web.WebSocketResponse:
        self._check_seat_key(request)
        return await self._plain.serve_worker(request, self._registry.grew)

    # Keys, sessions and refusals.

    def _check_seat_key(self, request: web.Request) -> None:
        if not _is_equal(_bearer(request), self._seat_key):
            raise ChatRefusal(
                "wrong key; this route is for processes of the run itself", code="unauthorized", status=401
            )
        self._strangers.let_in(request)

    def _asked_policies(self, asked: Mapping[str, Any]) -> list[str]:
        """Policies that a request names in `models`, or in `model`; "" stands for any policy. Raises ChatRefusal."""
        found = asked.get("models", [asked.get("model") or ANY_POLICY])
        known = (ANY_POLICY, *self._policies)
        if not isinstance(found, list) or not found or len(set(map(str, found))) < len(found):
            raise ChatRefusal("models: wanted a list of different policies")
        for policy in found:
            if policy not in known:
                raise ChatRefusal(f"model {policy!r:.80}: wanted one of {', '.join(self._policies)}", status=404)
        return ["" if policy == ANY_POLICY else policy for policy in found]

    def _told_session(self, session: AgentSession) -> dict[str, Any]:
        return {
            "id": session.session_id,
            "api_key": self.key_of(session.session_id),
            "model": session.policy,
            "task": session.task,
            "row": session.row,
        }

    def _check_key(self, request: web.Request) -> str:
        """Check the key; return the session that the key or the header names, "" for none. Raises ChatRefusal."""
        key = _bearer(request)
        session_id = key.partition(SESSION_MARK)[0] if SESSION_MARK in key else ""
        if not _is_equal(key, self.key_of(session_id) if session_id else self._key):
            raise ChatRefusal(
                "wrong key; use the one in keys/gateway.key of the run folder", code="invalid_api_key", status=401
            )
        self._strangers.let_in(request)
        if (name := request.headers.get(SESSION_HEADER)) is None or session_id:
            return session_id
        if not SESSION_NAME.fullmatch(name):
            raise ChatRefusal(f"{SESSION_HEADER} {name!r:.80}: wanted 1 to 64 letters, digits, - and _")
        return name

    def _session_in_path(self, request: web.Request) -> AgentSession:
        of_key, session_id = self._check_key(request), request.match_info["session"]
        if of_key not in ("", session_id):
            raise ChatRefusal("this is the key of another session", code="invalid_api_key", status=401)
        return self._registry.session(session_id)

    def _tell_unheeded(self, task: str, call: ChatCall) -> None:
        """Log each unheeded key once for a task; OpenAI's API has no way to tell the agent."""
        for key, value in call.unheeded.items():
            if (task, key) not in self._told:
                self._told.add((task, key))
                log.warning(
                    "sampling parameter of an agent ignored: the policy's own settings apply",
                    task=task,
                    asked=f"{key} = {value!r:.80}",
                )

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn a ChatRefusal, a refusal of aiohttp, or an unexpected exception into a JSON answer; count it."""
        try:
            return await handler(request)
        except ChatRefusal as mistake:
            refusal = mistake
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            refusal = _no_route(request, error.status)
        except web.HTTPException as error:
            code = "too_long" if error.status == 413 else "invalid_request"
            refusal = ChatRefusal(str(error.text or error.reason), code=code, status=error.status)
        except ConnectionError:
            raise
        except Exception as error:
            refusal = ChatRefusal(f"{type(error).__name__}: {error}", code="internal", status=500)
            if not self._registry.counts["refused/internal"]:  # strangers may not fill the log
                log.exception("internal error while answering a request")
        self._registry.counts[f"refused/{refusal.code}"] += 1
        return web.json_response(refusal.as_json(), status=refusal.status)


def _no_route(request: web.Request, status: int) -> ChatRefusal:
    """Refuse a route that the gateway lacks, such as many of OpenAI's API; the refusal lists the routes for clients."""
    resources = ((route.method, route.resource) for route in request.app.router.routes() if route.resource)
    routes = [f"{method} {one.canonical}" for method, one in resources if method != "HEAD"]
    told = ", ".join(route for route in routes if not route.endswith(OF_RUN))
    return ChatRefusal(
        f"no route {request.method} {request.path:.80}; available: {told}", code="no_route", status=status
    )


def _turn_id(session: AgentSession, number: int) -> str:
    return f"{session.session_id}-{number}"


async def _pass_on(socket: web.WebSocketResponse, reply: "asyncio.Future[Any]") -> None:
    with suppress(ConnectionError):  # the seat is gone, which the loop in `_seat` sees
        await socket.send_bytes(seat_reply(await reply))


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def _is_equal(key: str, wanted: str) -> bool:
    return hmac.compare_digest(key.encode(errors=LONE), wanted.encode(errors=LONE))


async def _body(request: web.Request) -> dict[str, Any]:
    """Read the JSON object of a request. Raises ChatRefusal for any other body; aiohttp refuses a body too long."""
    try:
        found = json.loads(await request.read() or b"{}")
    except web.RequestPayloadError as error:
        raise ChatRefusal(f"the body cannot be read: {' '.join(str(error).split())}") from None
    except (ValueError, RecursionError):
        raise ChatRefusal("the body is not JSON") from None
    if not isinstance(found, dict):
        raise ChatRefusal("the body is not a JSON object")
    return found
