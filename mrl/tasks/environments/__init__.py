"""Environments: what a policy acts in for several turns, with tools or as a game.

- `contract`             messages, tool calls, tools and turns of either side, with their limits
- `canonical_json`       one spelling for equal JSON, so that arguments of a tool call can be compared
- `user_class`           a class of the user's: TRL's form, or a text game (`tool_methods` makes tools of its methods)
- `openenv`              an OpenEnv server behind a URL
- `doors`                which of the two a name stands for
- `environment_pool`     thousands of episodes at once over a few processes (`environment_child` is one from outside,
  `environment_process` from inside, `wire` what they say to each other, `episode_script` one episode's requests)
- `tool_syntax`          how families of models write tool calls
- `environment_source`   start states as prompts: rows of a file, or seeds
- `environments`         those of all tasks, from which the rollout opens episodes
- `environment_trial`    an environment tried before a run
"""
