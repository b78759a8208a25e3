"""Models: policies as ordinary Hugging Face folders, and small ones made locally.

- `load_policy`  load a folder as a causal language model
- `heads`      how families turn hidden states into logits
- `number_formats` forwards in other number formats than the parameters have
- `lora`       low-rank adapters: put in, switched off, merged, written
- `skeleton`   models that have shapes and no data; `size`: their numbers of parameters and shapes
- `prompting`  turn a prompt into token ids; `chat_template`: the template that renders it
- `make`       build a folder from a recipe: tokenizer, architecture, warm start
- `warm_start` the supervised training of `make`
- `tokenizers` the two kinds of tokenizer that `make` trains
- `architectures` the configurations of small models
- `probe`      a small random policy, to test engines with
- `tensor_header` header of a safetensors file
- `tensor_file` safetensors files written and read as a stream, with digests
- `memory_file` a safetensors file in memory, or the same tensors on a GPU, which all processes of a host can open
- `tensor_broadcast` tensors over a process group of their own, in buckets, with digests

A made folder is no different from a downloaded one: nothing else in mrl knows that it was made here.
"""
