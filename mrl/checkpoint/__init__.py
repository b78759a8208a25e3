"""Checkpoints: everything that a learner needs to go on, in folders that exist whole or not at all.

    checkpoints/<policy>/step_N/   rank_00000.safetensors  rank_00001.safetensors ...  state.json  manifest.json

Every rank writes the rows that it holds, without a word to the others; the manifest says which rows of which tensor lie
in which file, with their checksums, so that any other number of ranks can read them. The files are those of torch's
distributed checkpoints (DCP) as safetensors, and `torch.distributed.checkpoint.load` reads them into any layout by its
`HuggingFaceStorageReader`. They are not written by it: DCP's own writer describes a checkpoint by a pickle, neither
writer keeps checksums nor syncs the folder, and both need collectives for every checkpoint, beside those of training.

- `pieces`          what a rank holds of a tensor
- `store`           the folders: written, completed, checked, opened
- `saver`           writing beside the training, one checkpoint in flight
- `training_state`  parameters and optimizer as named tensors, and back
- `together`        where all policies of a synchronous run can go on
"""
