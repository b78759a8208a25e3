"""Engines: token ids in, token ids with log-probabilities and versions out.

- `engine`    what every engine offers
- `sampling`  seeded sampling, independent of how requests are batched
- `embedded`  transformers in this process
"""
