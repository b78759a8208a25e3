"""The environment of `bench_episodes.py`, and the agent of `bench_gateway.py` with the same words."""

import time


class Paced:
    """An environment in which every episode is rewarded; a step waits as one does that asks a service."""

    def reset(self, seed: int, turns: int, pause_s: float, words: int = 0) -> str:
        """Begin an episode; return its first message, as long for every seed, with `words` more words."""
        self._left, self._pause_s = turns, pause_s
        return f"turn {seed % 10}" + " more" * words

    def step(self, text: str) -> tuple[str, float, bool]:
        """Wait, then return a word, the reward, and whether the episode is over."""
        time.sleep(self._pause_s)
        self._left -= 1
        return "more", 1.0, self._left == 0


async def paced_agent(client, row):
    """Play the same turns as `Paced`, asked over HTTP; return the reward."""
    talk = [{"role": "user", "content": f"turn {row['seed'] % 10}"}]
    for _ in range(row["turns"]):
        answer = await client.chat.completions.create(model="policy", messages=talk)
        talk += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
    return 1.0
