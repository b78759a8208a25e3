"""Models: policies as ordinary Hugging Face folders, and small ones made locally.

- `load_policy`  a folder becomes a causal language model
- `heads`      how families turn hidden states into logits
- `number_formats` forwards in other number formats than the parameters have
- `lora`       low-rank adapters: put in, switched off, merged, written
- `skeleton`   models that have shapes and no data; `size` their numbers
- `prompting`  a prompt becomes token ids; `chat_template` what it is rendered by
- `make`       a recipe becomes a folder: tokenizer, architecture, warm start
- `warm_start` the supervised training of `make`
- `tokenizers` the two kinds of tokenizer that `make` trains
- `architectures` the configurations of small models
- `probe`      a small random policy, for examinations
- `tensor_header` what such a file says of itself
- `tensor_file` safetensors as a stream, with digests
- `memory_file` such a file in memory, or the same tensors on a GPU, which all processes of a host can open
- `tensor_broadcast` tensors over a process group of their own, in buckets, with digests

A made folder is no different from a downloaded one: nothing else in mrl knows that it was made here.
"""
