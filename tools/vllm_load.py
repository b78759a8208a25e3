"""A vLLM server on a CPU, for benchmarks, under a load whose answers have lengths that are fixed beforehand."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mrl.engines.engine import Sampling
from mrl.engines.environment import engine_python
from mrl.engines.http import Http
from mrl.engines.server_backend import Launch
from mrl.engines.server_process import ServerProcess, free_port
from mrl.engines.server_start import await_ready
from mrl.engines.vllm import VLLM

START_S = 300.0
SAMPLING = Sampling(1.0, 1, ())
HOST = "127.0.0.1"


def launch_of(model_folder: Path, *, at_once: int) -> Launch:
    """Launch settings of a server on a free port, with one thread. Raises EngineError without vLLM's environment."""
    return Launch(
        python=engine_python("vllm", device="cpu"),
        model_folder=model_folder,
        host=HOST,
        port=free_port(HOST),
        device="cpu",
        dtype="float32",
        threads=1,
        max_running=at_once,
        max_context_tokens=256,
        seed=1,
    )


class VLLMLoad:
    """Server of `model_folder` that samples `at_once` answers at once with one thread, with log-probabilities."""

    def __init__(self, model_folder: Path, log: Path, *, at_once: int) -> None:
        """Start the server and wait until it is up. Raises EngineError, also where vLLM's environment is missing."""
        launch = launch_of(model_folder, at_once=at_once)
        self._backend, self._url = VLLM(), f"http://{HOST}:{launch.port}"
        self._process = ServerProcess(self._backend.command(launch), self._backend.environment(launch), log)
        try:
            asyncio.run(self._begin(launch.port))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server."""
        self._process.end()

    def sample(self, prompts: Sequence[Sequence[int]], lengths: np.ndarray, group_size: int) -> int:
        """Sample answer i, of `lengths[i]` tokens, behind prompt i // group_size; return the number of all tokens."""
        return asyncio.run(self._sample(prompts, lengths.tolist(), group_size))

    async def _begin(self, port: int) -> None:
        http = Http(self._url)
        try:
            await await_ready(self._backend, http, self._process, port, start_s=START_S)
            await self._backend.probe(http)
        finally:
            await http.close()

    async def _sample(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], group_size: int) -> int:
        http = Http(self._url)
        try:
            calls = (
                self._backend.generate(
                    http, prompts[i // group_size], SAMPLING, max_new_tokens=length, seed=i, request_id=str(i)
                )
                for i, length in enumerate(lengths)
            )
            return sum(len(segment.token_ids) for segment in await asyncio.gather(*calls))
        finally:
            await http.close()
