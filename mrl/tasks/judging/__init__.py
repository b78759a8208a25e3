"""Rewards by a language model behind an address that speaks OpenAI's API.

- `judge_model`    the verifier: question, score, and cache of rewards
- `judge_request`  one question over HTTP, with its bounds and repetitions
"""
