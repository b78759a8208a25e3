"""Rewards by a language model behind an address that speaks as OpenAI's does.

- `judge_model`    the verifier: question, score, and what is kept of both
- `judge_request`  one question over HTTP, with its bounds, and when it is asked again
"""
