"""Checkpoints: everything that a learner needs to go on, in folders that exist whole or not at all.

    checkpoints/<policy>/step_N/   model.safetensors  optimizer.safetensors  state.json  manifest.json

Tensors are safetensors, the rest is JSON; nothing is pickled. The manifest holds the checksum of every other file.
"""
