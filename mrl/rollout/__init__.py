"""Rollout: prompts in, scored groups out.

- `worker_loop`        main loop of a rollout worker
- `loop_options`       limits and side tasks of a worker
- `link`               a worker's messages with its learner: granted work, finished groups, weights
- `worker_lease`       how many answers a worker's lease allows
- `worker_counters`    counters of a worker, as metrics
- `sampling`           prompts become requests, finished answers become scored groups
- `groups_in_flight`   groups in the engine, and complete groups whose weights are not yet proved
- `verification`       verification of answers beside sampling
- `weight_updates`     loading of new weights into an engine, proved by canary and digests
- `weight_sync`        choice of the weights that an engine loads next
- `time_shared_engine` an engine on a device that processes use in turns
- `episode_engine`     episodes between an engine and environments
- `episode`            state of one episode
- `turn_replay`        turns of a peer that an own episode begins with
- `raw_prompts`        text without roles that an agent gives
- `packed_experts`     experts of a mixture model, sent to the learner with the tokens
- `peer_scoring`       log-probabilities of peers' answers under this policy
- `foreign_answers`    peers' answers in this policy's tokens
- `direct_codec`       prompts and answers of requests outside of episodes
- `direct_serving`     requests outside of episodes, answered beside the groups
- `held_out_answers`   share of a worker's places that held-out prompts have
- `held_out_pass`      held-out prompts of one evaluation, answered by one engine
- `frozen`             main loop of a worker whose policy does not learn
- `frozen_evaluation`  evaluation of a policy that does not learn
"""
