"""Publishing of versions from a learner to its engines, and checkpoints.

A version travels as files, in the learner's memory or on a disk that both see, or by a broadcast.

- `publish`         a Hugging Face folder under a temporary name, then renamed; its manifest carries version, digests,
                    canary
- `staging`         copy of a rank's tensors, made while the model stands still
- `read_lock`       keeps a published version from being written over or pruned while it is read
- `adapters`        format of adapters alone, for a learner that trains nothing else, as peft writes them
- `broadcast`       the newest version kept in memory (`weight_buffers`), and sent to the engines that ask for it
                    (`broadcast_requests`: which engines take part in which broadcast)
- `manifest`        digests of a version; every tensor is compared with them before an engine serves it, and afterwards
- `frozen_manifest` manifest of a policy that does not learn
- `canary`          texts with the learner's own log-probabilities, and their noise by rounding (`canary_texts`: the
                    texts)
- `checkpoint_store`, `checkpoint_saver`  folders that exist whole or not at all, written beside the training
- `rollback_step`   step from which policies of a synchronous run go on
- `training_state`, `tensor_pieces`  parameters and optimizer as named tensors; the piece of each that a rank holds

An engine that serves other weights than it claims holds other bytes; where these cannot be compared, the canary
decides. Tokens of a version are released only after its proof.
"""
