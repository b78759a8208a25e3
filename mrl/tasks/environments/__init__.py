"""Environments: what a policy acts in for several turns, with tools or as a game.

- `contract`         messages, tool calls, tools and turns of either side, with their limits
- `canonical_json`   one spelling for equal JSON, so that arguments of a tool call can be compared
"""
