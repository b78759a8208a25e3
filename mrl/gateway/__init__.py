"""The gateway: users' programs play episodes by asking policies over HTTP, as they would ask OpenAI's API.

    rollout worker ──▶ seat (an environment process) ◀──WebSocket──▶ gateway ◀──HTTP──▶ agent
                       offers an episode, tells each turn           session           asks, and gives the reward

An agent is an environment turned round: the agent's request is the environment's turn, and the response to the request
is the policy's turn. So a group of such episodes is granted, leased, dated, verified and shared as any other group.

- `chat_wire`          requests and answers of the chat API <-> messages, tools, turns
- `session`            one episode between its seat and its agent
- `session_registry`   all sessions: offered, taken, silent for too long, over
- `routes`             the HTTP server
- `unauthenticated`    connections that have shown no key, limited in number and time
- `direct_routes`      HTTP routes of requests outside of episodes, which rollout workers answer beside their sampling
- `direct_wire`        requests and answers outside of episodes <-> messages to workers
- `direct_stream`      streamed answers
- `direct_queue`       queue of requests outside of episodes, which wait for a worker with room
- `gateway_connection` a worker's connection to the gateway
- `agent_process`      a process that runs the user's function for many episodes at once
- `agent_network`      a network namespace for an agent, from which it reaches the gateway alone
- `agent_children`     supervision of agent processes: started, watched, started again
- `agent_programs`     agents that are programs: one process for each episode
- `agent_start`        start of an agent process or a program, in its network
- `agent_trial`        check of the function, or of the program, before a run
"""
