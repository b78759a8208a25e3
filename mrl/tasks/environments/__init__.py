"""Environments: surroundings in which a policy acts for several turns, with tools or as a game.

- `contract`             messages, tool calls, tools and turns of either side, with their limits
- `user_class`           a user's class: TRL's form, or a text game (`tool_methods` makes tools of its methods)
- `openenv`              an OpenEnv server behind a URL (`shared_loop` runs the network of all connections)
- `agent_seat`           an agent that comes over the gateway (`gateway_location` names the place)
- `opening`              the kind of environment that a name stands for
- `environment_pool`     thousands of episodes at once over a few processes (`environment_child` is one process from
  outside, `environment_process` from inside, `wire` their messages, `episode_script` the requests of one episode)
- `tool_syntax`          the tool calls of model families
- `environment_source`   start states as prompts: rows of a file, or seeds
- `environments`         the environments of all tasks, from which the rollout opens episodes
- `environment_trial`    a trial of an environment before a run
"""
