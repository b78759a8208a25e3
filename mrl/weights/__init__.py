"""Weights on their way from a learner to its engines, through files on a file system that both see.

    publish   temporary name, rename; a manifest carries version, checksum and canary
    fetch     everything is verified before an engine is given the first tensor

The canary is a fixed set of token sequences with the learner's own log-probabilities: an engine that serves other
weights than it claims disagrees with them. Tokens of a version are released only after its canary has passed.
"""
