"""Checkpoints: everything that a learner needs to go on, in folders that exist whole or not at all.

    checkpoints/<policy>/step_N/   rank_00000.safetensors  rank_00001.safetensors ...  state.json  manifest.json

Every rank writes the rows that it holds, without a word to the others; the manifest says which rows of which tensor lie
in which file, with their checksums, so that any other number of ranks can read them. Tensors are safetensors, the rest
is JSON: torch's own format for this (DCP) describes itself by a pickle, and needs collectives to write one.

- `pieces`          what a rank holds of a tensor
- `store`           the folders: written, completed, checked, opened
- `saver`           writing beside the training, one checkpoint in flight
- `training_state`  parameters and optimizer as named tensors, and back
- `together`        where all policies of a synchronous run can go on
"""
