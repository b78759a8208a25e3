"""Two agents as anybody writes them for a chat API; `agents.toml` trains two policies by them."""

import json
import random
import re
import string

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Reads the table.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


async def guess(client, row):
    """Has the policy guess a number from 1 to 15, and says after each guess where the number lies."""
    number = random.Random(f"guess {row['seed']}").randint(1, 15)
    messages = [{"role": "user", "content": "Guess a number from 1 to 15."}]
    for _ in range(4):
        said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        found = re.search(r"<answer>(\d{1,9})</answer>", said.content or "")
        if found and int(found[1]) == number:
            return 1.0
        hint = "no number" if not found else "higher" if int(found[1]) < number else "lower"
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": hint}]
    return 0.0


async def look_up(client, row):
    """Asks for a number that a tool tells; without a call it cannot be known."""
    rng = random.Random(f"table {row['seed']}")
    table = {"".join(rng.choices(string.ascii_lowercase, k=2)): str(rng.randint(10, 99)) for _ in range(6)}
    asked = rng.choice(list(table))
    messages = [{"role": "user", "content": f"Look up this word: {asked}"}]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK_UP])
        said = answer.choices[0].message
        if not said.tool_calls:
            return float(f"<answer>{table[asked]}</answer>" in (said.content or ""))
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            key = json.loads(call.function.arguments).get("key")
            told = table.get(str(key), "nothing")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return 0.0
