"""A server with vLLM's routes and without a model, which is paused as vLLM 0.33 is, or as 0.32 was, by their sources.

The next token is one more than the last. A request that arrives during a pause is refused by 0.33
(`_reject_add_while_paused` in v1/engine/core.py), and kept by 0.32 until the pause ends. Both give up requests that
have begun, with the tokens that they have.
"""

import asyncio
import threading
from typing import Any

from aiohttp import web

PAUSED = {
    "message": "Generation is paused. Please retry after it resumes.",
    "type": "ServiceUnavailableError",
    "param": None,
    "code": 503,
}
"""Body of a refusal, as `create_error_response` makes it of a RetryableRequestError."""


class PausingVLLM:
    """The server, which runs in a thread; `url` leads to it while it is open."""

    def __init__(self, *, refuses: bool) -> None:
        """Start the server. `refuses`: whether it refuses requests during a pause, as 0.33 does."""
        self._refuses = refuses
        self.fault: tuple[int, dict[str, Any]] | None = None
        """Status and error of every generation from now on; None without a fault."""
        self.num_asked = self.num_resumes = 0
        self.is_slow = False
        """Whether no request under way arrives before the next pause."""
        self._under_way = 0
        self._generated = 0
        self._serving = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._serving.wait(120)

    def close(self) -> None:
        """End the server."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._loop.close()

    def await_under_way(self, count: int) -> None:
        """Wait until `count` requests are under way."""

        async def arrived() -> None:
            async with self._came:
                await self._came.wait_for(lambda: self._under_way >= count)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(arrived(), 20), self._loop).result()

    async def _serve(self) -> None:
        self._closing, self._came = asyncio.Event(), asyncio.Condition()
        self._goes_on, self._pausing = asyncio.Event(), asyncio.Event()
        self._goes_on.set()
        posts = {
            "/inference/v1/generate": self._generate,
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_requests": self._abort,
            "/collective_rpc": lambda body: {"results": [{}]},
            "/reset_prefix_cache": lambda body: {"success": True},
        }
        gets = {
            "/openapi.json": {"paths": dict.fromkeys([*posts, "/is_paused", "/metrics", "/get_world_size"])},
            "/get_world_size": {"world_size": 1},
            "/is_paused": {"is_paused": False},
            "/health": {},
        }
        app = web.Application()
        app.add_routes([web.post(route, self._handler(answer)) for route, answer in posts.items()])
        app.add_routes([web.get(route, self._handler(lambda _, it=it: it)) for route, it in gets.items()])
        app.add_routes([web.get("/metrics", self._metrics)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._serving.set()
        await self._closing.wait()
        self._pausing.set()
        self._goes_on.set()
        await runner.cleanup()

    @staticmethod
    def _handler(answer: Any) -> Any:
        async def handle(request: web.Request) -> web.Response:
            said = answer(await request.json() if request.can_read_body else {})
            said = await said if asyncio.iscoroutine(said) else said
            return said if isinstance(said, web.Response) else web.json_response(said)

        return handle

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"vllm:generation_tokens_total {self._generated}\n")

    async def _generate(self, body: Any) -> Any:
        self.num_asked += 1
        await self._arrive()
        if self.fault is not None:
            return web.json_response({"error": self.fault[1]}, status=self.fault[0])
        if not self._goes_on.is_set() and self._refuses:
            return web.json_response({"error": PAUSED}, status=503)
        tokens, reason = await self._sample(body["token_ids"], body["sampling_params"]["max_tokens"])
        scores = "prompt_logprobs" in body["sampling_params"] and reason != "abort"
        lead_nats = 1.0 / body["sampling_params"].get("temperature", 1.0)
        rows = [{str(token): {"logprob": -float(token)}} for token in body["token_ids"]]
        return {"choices": [_choice(tokens, reason, lead_nats)], "prompt_logprobs": rows if scores else None}

    async def _arrive(self) -> None:
        if self.is_slow:
            async with self._came:
                self._under_way += 1
                self._came.notify_all()
            await self._pausing.wait()
            self._under_way -= 1

    async def _sample(self, prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
        """Sample tokens; aborted requests, also those that never began, return the tokens that they have."""
        began, tokens = self._pausing, []
        while len(tokens) < max_tokens:
            while not (began.is_set() or self._goes_on.is_set()):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.001)
            if began.is_set():
                return tokens, "abort"
            tokens.append(prompt[-1] + 1 + len(tokens))
            self._generated += 1
        return tokens, "length"

    async def _pause(self, body: Any) -> Any:
        self._goes_on.clear()
        await self._abort(body)
        return {"status": "paused"}

    async def _abort(self, body: Any) -> Any:
        before, self._pausing = self._pausing, asyncio.Event()
        before.set()
        return {"status": "aborted"}

    async def _resume(self, body: Any) -> Any:
        self.is_slow, self.num_resumes = False, self.num_resumes + 1
        self._goes_on.set()
        return {"status": "resumed"}


def _choice(tokens: list[int], reason: str, lead_nats: float) -> dict[str, Any]:
    likeliest = [{"logprob": -0.5}, {"logprob": -0.5 - lead_nats}]
    content = [{"logprob": -0.5, "top_logprobs": likeliest}] * len(tokens)
    return {"token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content}}
