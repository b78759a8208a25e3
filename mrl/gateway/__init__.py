"""The gateway: programs of the user's play episodes by asking policies over HTTP, as they would ask OpenAI's API.

    rollout worker ──▶ seat (an environment process) ◀──WebSocket──▶ gateway ◀──HTTP──▶ agent
                       offers an episode, tells each turn           session           asks, and gives the reward

An agent is an environment turned round: what it asks is what an environment says, and what the policy answers is the
completion. So a group of episodes is granted, leased, dated, verified and shared as every other.

- `chat_wire`        requests and answers of the chat API <-> messages, tools, turns
- `session`          one episode between its seat and its agent
- `session_book`     all of them: offered, taken, silent for too long, over
- `routes`           the HTTP server
- `strangers`        connections without a key, which are few and short
- `plain_routes`     the same for requests outside of episodes, which rollout workers answer beside their sampling
- `plain_wire`       their forms <-> messages to workers
- `plain_stream`     answers as they grow
- `plain_desk`       where they wait for a worker with room
- `gateway_line`     a worker's line to it
- `agent_process`    a process that runs the user's function for many episodes at once
- `agent_network`    what it reaches: the gateway alone, in a network namespace
- `agent_children`   these processes from outside: started, watched, started again
- `agent_programs`   agents that are programs: one process for each episode
- `agent_start`      how either is started, in its network
- `agent_trial`      the function, or the program, looked at before a run
"""
