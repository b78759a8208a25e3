#!/usr/bin/env python3
"""Speed of a run's gateway, for those who serve a policy that trains, in sessions and outside, beside the engine alone.

A Qwen3 with random weights samples in float32 with one thread; by default it has 113 million parameters, so that
sampling costs something. 64 clients ask for chat at once, each for one answer after another. The same clients with the
same messages ask vLLM's own server of the same model, which need not give log-probabilities, unlike the server of a
run. The embedded engine samples behind the same prompts in this process. The ways take turns, and the best round of
each counts, by the clock and by CPU seconds of all processes; the latter is stricter, and less disturbed by other
processes. An answer's time is the median over a round, and the best round counts. Then a lone client asks vLLM's own
server and the gateway in turn for one token: the median of the added time counts.

In sessions 64 agents play episodes of up to three turns, which the worker scores and delivers to a learner's books; the
same conversations are held with vLLM's own server. There 32 of the 512 tokens of the vocabulary end a turn, so that a
turn has about 15 tokens.

    mrl engine-env vllm --cpu      # once; without it the rows of vLLM are left out
    .venv/bin/python tools/bench_serving.py [--rounds N] [--layers N] [--calls N]

Prints a table; the last line is JSON. Ends with 1 when less than nine tenths of the tokens come through the gateway, or
it adds more than 3 ms to the answer of a lone client.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import torch
from bench_peers.process import tree_cpu_s
from bench_row import Row, end, print_rows
from lone_worker import POLICY, LoneWorker, make_policy, run_tables, start_with_text
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from vllm_load import launch_of

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import GenerationRequest, Sampling, generate_all
from mrl.engines.environment import is_made, making_command
from mrl.records.version import Version
from mrl.tasks.environments.gateway_location import AGENT_KEY, ENDPOINT
from mrl.transport.endpoints import read_endpoint

CLIENTS, GROUP_SIZE, ANSWER_TOKENS, VOCAB, WIDTH = 64, 8, 32, 512, 768
TURNS, NUM_ENDS = 3, 32
"""Turns of an agent's conversation, and number of tokens that end a turn in it."""
START_S, LEAST_SHARE, MOST_ADDED_MS = 300.0, ">=0.9", 3.0
TEMPLATE = (
    "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WAYS = ["vllm", "sessions", "embedded"]
"""Measurements: requests over vLLM, sessions over vLLM, and requests over the embedded engine."""
Round = Callable[[], int]
"""Function that runs one round and returns its tokens."""
T = TypeVar("T")


def make_model(layers: int) -> Qwen3ForCausalLM:
    """Make a model with random weights of 9.4 million parameters a layer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def numbers(calls: int) -> range:
    """Numbers of the answers of a round."""
    return range(1000, 1000 + CLIENTS * calls)


def talk_of(number: int) -> list[dict[str, str]]:
    """Messages with which the answer of this number is asked for."""
    return [{"role": "user", "content": f"Trim the ends: {number} {number + 1}"}]


def spelled(talk: list[dict[str, str]]) -> str:
    """Text of a conversation as TEMPLATE renders it."""
    return "".join(f"{one['role']}: {one['content']}\n" for one in talk) + "assistant: "


class Client:
    """Client of one server."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._url, self._headers, self._model = f"{url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}, model
        self.rounds_ms: list[float] = []
        """Medians of the times of an answer, for each round of `all_at_once`."""

    async def ask(self, http: aiohttp.ClientSession, number: int, max_tokens: int) -> int:
        """Ask for an answer; return the number of its tokens."""
        body = {"model": self._model, "messages": talk_of(number), "max_tokens": max_tokens, "temperature": 1.0}
        async with http.post(self._url, json=body, headers=self._headers) as found:
            answer = await found.json()
            if found.status != 200:
                raise RuntimeError(f"{self._url}: {found.status} {answer}")
            return int(answer["usage"]["completion_tokens"])

    async def converse(self, http: aiohttp.ClientSession, number: int, key: str = "") -> int:
        """Hold a conversation until a turn is cut; return its tokens, 0 where the server does not tell them."""
        talk, tokens = talk_of(number), 0
        headers = {"Authorization": f"Bearer {key}"} if key else self._headers
        for _ in range(TURNS):
            body = {"model": self._model, "messages": talk, "max_tokens": ANSWER_TOKENS, "temperature": 1.0}
            async with http.post(self._url, json=body, headers=headers) as found:
                answer = await found.json()
                if found.status != 200:
                    raise RuntimeError(f"{self._url}: {found.status} {answer}")
            tokens += answer.get("usage", {}).get("completion_tokens", 0)
            (choice,) = answer["choices"]
            if choice["finish_reason"] == "length":
                break
            said = {"role": "assistant", "content": choice["message"]["content"] or ""}
            talk = [*talk, said, {"role": "user", "content": f"And {number}?"}]
        return tokens

    def conversations(self, each: int) -> int:
        """Let all clients hold `each` conversations, one after another; return their tokens."""

        async def whole(http: aiohttp.ClientSession) -> int:
            async def one(client: int) -> int:
                return sum([await self.converse(http, number) for number in numbers(each)[client::CLIENTS]])

            return sum(await asyncio.gather(*(one(client) for client in range(CLIENTS))))

        return within(whole)

    def play(self, is_over: threading.Event) -> None:
        """Play sessions, as many at once as there are clients, until `is_over`."""

        async def whole(http: aiohttp.ClientSession) -> None:
            await asyncio.gather(*(self._player(http, is_over) for _ in range(CLIENTS)))

        within(whole)

    async def _player(self, http: aiohttp.ClientSession, is_over: threading.Event) -> None:
        sessions = self._url.replace("/chat/completions", "/sessions")
        while not is_over.is_set():
            async with http.post(sessions, json={"wait_s": 1.0}, headers=self._headers) as found:
                if found.status == 503:  # no episode waits
                    continue
                session = await found.json()
            await self.converse(http, 1000 + session["row"]["seed"] % 1000, session["api_key"])
            url = f"{sessions}/{session['id']}/reward"
            async with http.post(url, json={"reward": session["row"]["seed"] % 2}, headers=self._headers) as found:
                await found.read()

    def all_at_once(self, calls: int) -> int:
        """Let all clients ask for `calls` answers, one after another; return their tokens."""
        times_ms: list[float] = []

        async def timed(http: aiohttp.ClientSession, number: int) -> int:
            began_s = time.perf_counter()
            tokens = await self.ask(http, number, ANSWER_TOKENS)
            times_ms.append(1000 * (time.perf_counter() - began_s))
            return tokens

        async def whole(http: aiohttp.ClientSession) -> int:
            async def one(client: int) -> int:
                return sum([await timed(http, number) for number in numbers(calls)[client::CLIENTS]])

            return sum(await asyncio.gather(*(one(client) for client in range(CLIENTS))))

        tokens = within(whole)
        self.rounds_ms.append(statistics.median(times_ms))
        return tokens


def within(work: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, T]]) -> T:
    """Run `work` with an HTTP session for any number of connections, and return its result."""

    async def whole() -> T:
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            return await work(http)

    return asyncio.run(whole())


def added_ms(own: Client, through: Client, calls: int) -> tuple[float, float]:
    """Return medians, in ms, of a lone client's answers of one token from `own`, and of the time added by `through`.

    Both are asked for the same answers one after the other, each first in turn.
    """

    async def whole(http: aiohttp.ClientSession) -> tuple[float, float]:
        times: dict[Client, list[float]] = {own: [], through: []}
        for number in range(calls):
            for client in (own, through) if number % 2 else (through, own):
                began_s = time.perf_counter()
                await client.ask(http, number, 1)
                times[client].append(1000 * (time.perf_counter() - began_s))
        added = [more - less for less, more in zip(times[own], times[through], strict=True)]
        return statistics.median(times[own]), statistics.median(added)

    return within(whole)


def served(
    folder: Path,
    engine: str,
    model: Qwen3ForCausalLM,
    *,
    num_ends: int = 1,
    groups: int = CLIENTS // GROUP_SIZE,
    **more: Any,
) -> tuple[LoneWorker, Client]:
    """Start a worker over an engine, behind a gateway that answers for it; both end with the worker.

    num_ends: tokens of the vocabulary that end an answer; groups: of a round; more: in place of tables of the
    configuration.
    """
    tables = run_tables(
        folder / "runs",
        folder / "policy",
        group_size=GROUP_SIZE,
        max_new_tokens=ANSWER_TOKENS,
        at_once=CLIENTS,
        prompts=64,
        engine=engine,
    )
    places = tables["allocation"]["slots"]
    tables |= {"gateway": {"serve": True, "share": CLIENTS / places, "max_prompt_tokens": 128}}
    make_policy(folder / "policy", model, tables)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<end{number}>" for number in range(1, num_ends)]})
    ends = [tokenizer.eos_token_id, *range(len(tokenizer) - num_ends + 1, len(tokenizer))]
    (folder / "policy" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer.save_pretrained(folder / "policy")
    worker = LoneWorker(tables | more, model, groups_a_round=groups)
    deadline_s = time.monotonic() + START_S
    while (address := read_endpoint(worker.folder / "endpoints", ENDPOINT)) is None:
        if time.monotonic() > deadline_s:
            worker.close()
            raise RuntimeError("the gateway does not start")
        time.sleep(0.1)
    key = (worker.folder / "keys" / AGENT_KEY).read_text().strip()
    return worker, Client(address.replace("tcp://", "http://"), key, POLICY)


def measured(ways: Mapping[str, Round], rounds: int) -> list[Row]:
    """Measure two ways in turns: the best rounds by the clock and by CPU; a first round warms up and does not count.

    CPU seconds are of this process and its descendants; processes of the other ways hardly use any meanwhile.
    """
    of_clock, of_cpu = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for number in range(rounds + 1):
        for name, way in ways.items():
            began_s, began_cpu_s = time.perf_counter(), tree_cpu_s()
            tokens = way()
            clock, cpu = tokens / (time.perf_counter() - began_s), tokens / (tree_cpu_s() - began_cpu_s)
            print(f"round {number}: {name} {clock:.0f} tokens/s, {cpu:.0f} per CPU second", flush=True)
            if number:
                of_clock[name], of_cpu[name] = max(of_clock[name], clock), max(of_cpu[name], cpu)
    own, through = ways
    rows = []
    for best, unit, required in ((of_clock, "tokens/s", None), (of_cpu, "tokens/CPU s", LEAST_SHARE)):
        rows.append(Row(f"{own}, {CLIENTS} at once", best[own], unit))
        ratio = best[through] / best[own]
        rows.append(Row(f"{through}, {CLIENTS} at once", best[through], unit, own, ratio, required))
    return rows


def of_vllm(folder: Path, model: Qwen3ForCausalLM, arguments: argparse.Namespace) -> list[Row]:
    """Rows of vLLM through the gateway, beside vLLM's own server."""
    own, through = "vLLM's own server", "vLLM through the gateway"
    with ExitStack() as stack:
        worker, client = served(folder, "vllm", model)
        stack.enter_context(closing(worker))
        launch = launch_of(folder / "policy", at_once=CLIENTS)
        stack.callback(start_with_text(launch, folder / "own.log").end)
        clients = {own: Client(f"http://{launch.host}:{launch.port}", "", "policy"), through: client}
        ways = {name: partial(one.all_at_once, arguments.calls) for name, one in clients.items()}
        rows = measured(ways, arguments.rounds)
        lone, added = added_ms(clients[own], clients[through], arguments.lone_calls)
    busy, busy_through = (min(clients[name].rounds_ms[1:]) for name in (own, through))
    most = f"<={(lone + MOST_ADDED_MS) / lone:.3f}"
    return [
        *rows,
        Row(f"{own}, answer of {CLIENTS} clients", busy, "ms"),
        Row(f"{through}, answer of {CLIENTS} clients", busy_through, "ms", own, busy_through / busy),
        Row(f"{own}, one client", lone, "ms"),
        Row(f"{through}, one client", lone + added, "ms", own, (lone + added) / lone, most),
    ]


def of_sessions(folder: Path, model: Qwen3ForCausalLM, arguments: argparse.Namespace) -> list[Row]:
    """Rows of agents' sessions over vLLM, beside the same conversations with vLLM's own server."""
    each = 2 * arguments.calls
    task = {"source": "agent", "dataset": "outside", "options": {"size": 400}, "max_turns": TURNS}
    is_over = threading.Event()
    with ExitStack() as stack:
        groups = CLIENTS * each // GROUP_SIZE
        worker, client = served(folder, "vllm", model, num_ends=NUM_ENDS, groups=groups, tasks={"trim": task})
        stack.enter_context(closing(worker))
        launch = launch_of(folder / "policy", at_once=CLIENTS)
        stack.callback(start_with_text(launch, folder / "own.log").end)
        own = Client(f"http://{launch.host}:{launch.port}", "", "policy")
        players = threading.Thread(target=client.play, args=(is_over,), daemon=True)
        players.start()
        stack.callback(players.join, START_S)
        stack.callback(is_over.set)

        def played() -> int:
            return sum(answer.num_sampled_tokens for group in worker.round()[0] for answer in group.answers)

        alone = partial(own.conversations, each)
        ways: dict[str, Round] = {"vLLM's own server, agents": alone, "sessions over vLLM, agents": played}
        return measured(ways, arguments.rounds)


def of_embedded(folder: Path, model: Qwen3ForCausalLM, arguments: argparse.Namespace) -> list[Row]:
    """Rows of the embedded engine through the gateway, beside the engine in this process."""
    own, through = "embedded engine alone", "embedded engine through the gateway"
    worker, client = served(folder, "embedded", model)
    with ExitStack() as stack:
        stack.enter_context(closing(worker))
        tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
        sampling = Sampling(1.0, ANSWER_TOKENS, (tokenizer.eos_token_id,))
        engine = EmbeddedEngine(folder / "policy", sampling, device="cpu", max_running=CLIENTS)
        stack.enter_context(closing(engine)).label(Version(0, 0))
        texts = [spelled(talk_of(number)) for number in numbers(arguments.calls)]
        prompts = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32) for text in texts]
        names = itertools.count()

        def alone() -> int:
            seeds = np.random.default_rng(next(names)).integers(0, 2**63, (len(prompts), 1), dtype=np.uint64)
            asked = [GenerationRequest(str(next(names)), *each) for each in zip(prompts, seeds, strict=True)]
            return sum(one.token_ids.size for (one,) in generate_all(engine, asked))

        return measured({own: alone, through: partial(client.all_at_once, arguments.calls)}, arguments.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every way")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model, of 9.4 million parameters each")
    parser.add_argument("--calls", type=int, default=2, help="answers of a client in a round")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--lone-calls", type=int, default=400, help="answers of the lone client, of each server")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        over_vllm = {"vllm": of_vllm, "sessions": of_sessions}
        for way, measure in over_vllm.items() if is_made("vllm", "cpu") else ():
            if way in arguments.ways:
                rows += measure(Path(folder) / way, make_model(arguments.layers), arguments)
        if not is_made("vllm", "cpu") and over_vllm.keys() & arguments.ways:
            print(f"vLLM is left out: its environment is not there; cure: {making_command('vllm', 'cpu')}")
        if "embedded" in arguments.ways:
            rows += of_embedded(Path(folder) / "embedded", make_model(arguments.layers), arguments)
    print_rows(rows)
    return end("serving", rows)


if __name__ == "__main__":
    sys.exit(main())
