"""Rollout: prompts in, scored groups out.

- `link`      the worker's side of the conversation with its learner
- `sampling`  one batch: generate, verify, score
- `scoring`   what this policy gives to answers of its peers
- `updates`   new weights into an engine, released only after their canary
- `loop`      a worker's life
- `evaluate`  held-out accuracy of one published version
"""
