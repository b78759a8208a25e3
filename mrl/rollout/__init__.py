"""Rollout: prompts in, scored groups out.

- `link`      the worker's side of the conversation with its learner
- `worker_loop`  a worker's life
- `sampling`  prompts become requests, finished answers become scored groups
- `groups_in_flight`  groups in the engine, and groups whose weights are still to be proved
- `updates`   new weights into an engine, proved by canary and digests
- `following`  which weights an engine serves, and which are next
- `verifying` verification beside sampling
- `peer_scoring`  what this policy gives to answers of its peers
- `plain_voice`    how a policy is asked outside of episodes, and read
- `plain_serving`  requests outside of episodes, beside the groups
- `frozen`    the life of a worker whose policy does not learn
- `worker_counters`  what a worker counts
- `sleep_requests`  that a worker's engine sleep and wake
- `held_out_answers`  the share of a worker's places that held-out prompts have
- `frozen_evaluation` the evaluation of a policy that does not learn
"""
