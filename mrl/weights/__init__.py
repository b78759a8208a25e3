"""Published versions on their way from a learner to its engines, and checkpoints.

A version travels as files, in its memory or on a disk that both see, or by a broadcast.

- `publish`   a Hugging Face folder under a temporary name, then renamed; its manifest carries version, digests, canary
- `staging`   what a rank copies of a version while the model stands still; `read_lock` keeps it from being written over
- `adapters`  in place of whole weights the adapters of a learner that trains nothing else, as peft writes them
- `broadcast` the newest version kept in memory (`weight_buffers`), and sent to the engines that ask for it
              (`broadcast_requests`: which engines take part in which broadcast)
- `manifest`  what was published; every tensor is compared with it before an engine serves it, and afterwards
- `own_folder` the manifest of a policy that does not learn
- `canary`    texts with the learner's own log-probabilities, and what rounding makes of them (`canary_texts`: which)
- `checkpoint_store`, `checkpoint_saver`  folders that exist whole or not at all, written beside the training
- `training_state`, `tensor_pieces`  parameters and optimizer as named tensors; what a rank holds of each

An engine that serves other weights than it claims holds other bytes; where nobody can tell them, the canary decides.
Tokens of a version are released only after its proof.
"""
