"""Weights on their way from a learner to its engines, through files on a file system that both see.

- `publish`   a Hugging Face folder under a temporary name, then renamed; its manifest carries version, digests, canary
- `manifest`  what was published; every tensor is compared with it before an engine is given the folder
- `canary`    fixed token sequences with the learner's own log-probabilities

An engine that serves other weights than it claims disagrees with the canary, or, where the difference is smaller than
rounding, with the digests. Tokens of a version are released only after both have passed.
"""
