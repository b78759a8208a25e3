"""A task of verifiers 0.4 trains the policies of a run: python verifiers_agent.py RUN_FOLDER (docs/gateway.md)."""

import asyncio
import json
import os
import sys
from pathlib import Path

import httpx
import openai
import verifiers.v1 as vf


class Chat(vf.Harness[vf.HarnessConfig]):  # in this process: no container, no download
    APPENDS_SYSTEM_PROMPT, SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        prompt = data.prompt if isinstance(data.prompt, list) else [vf.UserMessage(content=data.prompt)]
        said = [{"role": one.role, "content": one.content} for one in prompt]
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=system + said)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Letters(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def even(self, trace):
        return sum(len(node.message.content or "") % 2 == 0 for node in trace.nodes if node.sampled) / trace.num_turns


async def play(http, session):
    os.environ[name := f"KEY_{session['id']}"] = session["api_key"]
    client = vf.EvalClientConfig(base_url=str(http.base_url), api_key_var=name)
    config = vf.AgentConfig(
        harness=vf.HarnessConfig(id="null"), runtime=vf.SubprocessConfig(), model="policy", client=client
    )
    agent = vf.Agent(config)
    agent.harness = Chat(config.harness)
    task = Letters(vf.TaskData(prompt=f"Say a letter: {'abcdefgh'[session['row']['seed'] % 8]}"))
    async with agent, agent.interaction(task) as talk:
        if not (await talk.turn()).terminated:
            await talk.turn("Another")  # of a single turn: trace = await agent.run(task)
    ending, body = ("reward", {"reward": talk.trace.reward}) if talk.trace.ok else ("fail", {"reason": "see its trace"})
    await http.post(f"sessions/{session['id']}/{ending}", json=body)
    del os.environ[name]


async def player(http):
    while True:
        found = await http.post("sessions", json={"task": "letters"})
        if found.status_code == 200:
            await play(http, found.json())


async def main(run):
    url = json.loads((run / "endpoints" / "gateway.json").read_text())["address"].replace("tcp:", "http:")
    headers = {"Authorization": f"Bearer {(run / 'keys' / 'gateway.key').read_text().strip()}"}
    async with httpx.AsyncClient(base_url=f"{url}/v1/", headers=headers, timeout=120) as http:
        await asyncio.gather(*(player(http) for _ in range(8)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
