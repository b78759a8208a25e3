"""What an agent that the run starts may use: address space, and the processor that it shares with other episodes."""

import asyncio

import pytest

from mrl.tasks.environments.contract import DONE, MEMORY, TIMEOUT
from tests.gateway.test_agent_network import episode, playing

AGENT = """
async def play(client, row):
    if row["wants"] == "memory":
        held = bytearray(1 << 32)
    while row["wants"] == "the processor":
        try:
            sum(range(1000))
        except Exception:
            continue
    answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go"}])
    return float(answer.choices[0].message.content == "well")
"""


@pytest.mark.parametrize(
    ("wants", "table", "reason", "words"),
    [
        ("memory", {"agent_memory_mib": 3072}, MEMORY, "MemoryError"),
        ("the processor", {"episode_cpu_s": 1.0}, TIMEOUT, "more than 1 s of CPU time without yielding"),
    ],
)
def test_an_episode_that_wants_too_much_fails_alone(tmp_path, monkeypatch, wants, table, reason, words):
    """Its process plays the others on; the end is counted as that of an environment is."""
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))

    async def whole():
        async with playing(tmp_path, agent=AGENT, **table) as (registry, children):
            process = children._children[0].started.process
            greedy, modest = await asyncio.gather(episode(registry, wants=wants), episode(registry, wants="nothing"))
            assert (greedy[0].reason, greedy[0].has_failed) == (reason, True)
            assert words in greedy[0].words
            assert (modest[1].reason, modest[1].reward) == (DONE, 1.0)
            assert process.poll() is None
            return registry.counts[f"ends/{reason}"], registry.counts["ends/done"]

    assert asyncio.run(whole()) == (1, 1)
