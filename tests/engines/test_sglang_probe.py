"""What SGLang's backend asks a server before it is believed; the answers are those of SGLang 0.5.23, cut short."""

import asyncio
from typing import Any

import pytest

from mrl.engines.sglang import NEEDED, SGLang
from mrl.errors import EngineError

LOGITS = (0.2, -0.7, -2.0)


class Answers:
    """The calls of a probe, to a server that applies the temperature to what it reports, or hides it."""

    base_url = "http://127.0.0.1:1"

    def __init__(
        self, *, hides_temperature: bool, logits: tuple[float, ...] = LOGITS, routes: tuple[str, ...] = NEEDED
    ):
        self._hides_temperature, self._logits, self._routes = hides_temperature, logits, routes

    async def get_json(self, route: str) -> Any:
        if route == "/openapi.json":
            return {"paths": dict.fromkeys(self._routes)}
        return {"model_path": "/m", "dtype": "float32", "tp_size": 1, "pp_size": 1, "device": "cpu"}

    async def post_json(self, route: str, body: dict[str, Any], *, within_s: float | None) -> Any:
        if route == "/weights_checker":
            return {"ranks": [{"checksums": {"w": "0"}}]}
        temperature = 1.0 if self._hides_temperature else body["sampling_params"]["temperature"]
        top = [[logit / temperature, number, None] for number, logit in enumerate(self._logits)]
        return {"meta_info": {"finish_reason": {"type": "length"}, "output_top_logprobs": [top[:2]]}}


def probe(answers: Answers) -> None:
    asyncio.run(SGLang().probe(answers))  # type: ignore[arg-type]


def test_a_server_that_reports_what_it_samples_from_is_believed():
    """The likeliest token leads by twice as much at half the temperature."""
    probe(Answers(hides_temperature=False))


def test_a_server_that_hides_the_temperature_is_named():
    """One that reports log-probabilities before temperature would train with wrong importance weights."""
    with pytest.raises(EngineError, match=r"not those of the sampling distribution.*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        probe(Answers(hides_temperature=True))


def test_two_tokens_that_are_equally_likely_prove_nothing():
    """At every temperature neither leads."""
    probe(Answers(hides_temperature=False, logits=(0.5, 0.5, -2.0)))


def test_of_a_folder_that_only_the_server_sees_nothing_is_compared():
    """Somebody else's, in a container or on another host; its canary alone speaks."""
    sglang, answers = SGLang(), Answers(hides_temperature=False, routes=(*NEEDED, "/weights_checker"))

    async def ask() -> dict[str, str] | None:
        await sglang.probe(answers)  # type: ignore[arg-type]
        return await sglang.checksums(answers)  # type: ignore[arg-type]

    assert asyncio.run(ask()) is None


def test_a_server_without_a_route_is_named():
    """An older one."""
    with pytest.raises(EngineError, match=r"no route /server_info"):
        probe(Answers(hides_temperature=False, routes=("/generate",)))
