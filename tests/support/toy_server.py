"""A server whose model counts: the next token is one more than the last, and an answer ends at a multiple of ten.

Started as a process of its own: `python toy_server.py PORT TOKEN_S`. Every log-probability is minus the number of the
weights that made the token, so that a test sees which weights sampled it.
"""

import asyncio
import sys
from pathlib import Path

from aiohttp import web


class Toy:
    """Model of the server. Its weights are a number in a file; sampling takes `token_s` seconds for each token."""

    def __init__(self, token_s: float) -> None:
        self._token_s, self._weights, self._label = token_s, 0, ""
        self._aborting = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._running = self._generated = 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self._open.wait()
        self._running += 1
        try:
            return web.json_response(await self._sample(body["token_ids"], body["max_new_tokens"]))
        finally:
            self._running -= 1

    async def _sample(self, prompt: list[int], max_new_tokens: int) -> dict[str, object]:
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and not self._aborting.is_set():
            await asyncio.sleep(self._token_s)
            tokens.append(([*prompt, *tokens][-1] + 1) % 1000)
            self._generated += 1
            if tokens[-1] % 10 == 0:
                break
        ended = bool(tokens) and tokens[-1] % 10 == 0
        reason = "stop" if ended else "length" if len(tokens) == max_new_tokens else "abort"
        logprobs = [-float(self._weights)] * len(tokens)
        return {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason, "label": self._label}

    async def pause(self, request: web.Request) -> web.Response:
        self._open.clear()
        self._aborting.set()
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        self._aborting.clear()
        self._open.set()
        return web.json_response({})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._running:
            return web.json_response({"error": "answers are running"}, status=409)
        self._weights = int((Path(body["folder"]) / "weights").read_text())
        self._label = body["label"]
        return web.json_response({})

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response({"running": self._running, "generated": self._generated, "weights": self._weights})


async def lie(request: web.Request) -> web.Response:
    """Make the server name other weights than it was given from now on."""
    request.app["toy"]._label = "7.7"
    return web.json_response({})


async def main(port: int, token_s: float) -> None:
    """Serve on loopback until the process is ended."""
    toy = Toy(token_s)
    app = web.Application()
    app["toy"] = toy
    posts = {"generate": toy.generate, "pause": toy.pause, "resume": toy.resume, "load": toy.load, "lie": lie}
    app.add_routes([web.post(f"/{name}", route) for name, route in posts.items()])
    app.add_routes([web.get("/state", toy.state)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
