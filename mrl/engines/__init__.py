"""Engines: token ids in, token ids with log-probabilities and versions out.

- `engine`             what every engine offers
- `embedded`           transformers in this process, over `continuous` (batching), `slot_cache` and `token_sampling`
- `attached_adapters`  adapters beside the weights of the embedded engine's model, and their checksums
- `server_engine`      an inference server, as a child (`server_process`) or at a URL, over `http` and `segments`
- `server_backend`     contract of one kind of server, with its launch and its routes: `vllm` and `sglang`
- `family_limits`      models that a server computes otherwise than transformers
- `environment`        where the Python environments of servers are
- `inside/`            modules that run inside those environments, and are never imported here
"""
