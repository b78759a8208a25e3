"""Engines: token ids in, token ids with log-probabilities and versions out.

- `engine`             what every engine offers
- `embedded`           transformers in this process, over `continuous` (batching), `slot_cache` and `token_sampling`
- `attached_adapters`  adapters beside the weights of that model, and the proof of them
- `server_engine`      an inference server, as a child (`server_process`) or at a URL, over `http` and `segments`
- `dialect`            what one kind of server has to say for itself: `vllm` and `sglang`, each with its launch
- `family_limits`      models that a server computes otherwise than transformers
- `environment`        where the environments of servers are
- `inside/`            what runs inside those environments, and is never imported here
"""
