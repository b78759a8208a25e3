"""Transport: authenticated sockets between the processes of one run. The only home of `zmq`.

Protocol: one message is one body frame, at most `max_message_bytes` long; its meaning is the caller's business. Servers
are ROUTERs, clients are DEALERs with a stable name. Every link is CURVE-encrypted, on tcp and on socket files. A run
has one key pair for its servers, and one per role and policy for clients. Servers ask the allow-list at the handshake
(over ZAP, which refuses every client when its handler is gone) and at every message: a client speaks only under names
that its key covers, and a revoked key loses its links within a second.

Invariants: no call blocks longer than the timeout it was given. A send that cannot be done now returns False. A message
may be lost whenever a link breaks; `requests` asks again until there is an answer. Addresses travel through endpoint
files, which are read anew on every reconnect.

- `grants`         the role and policy of a key
- `allow_list`     public keys and their grants, as a file that servers watch
- `keys`           the run's key pairs, in files only the owner can read
- `endpoints`      addresses at which roles listen, as atomically replaced files
- `links`          the key behind each connection, and the connection of each client
- `refusals`       refusals of a server, counted by reason, logged at a bounded rate
- `server`         the ROUTER of a daemon
- `tcp_proxy`      the TCP port of a server
- `client_socket`  the DEALER of one thread
- `background`     a thread that owns a client socket, so that the caller never waits
- `requests`       requests that are repeated until an answer comes, over a new link after silence
"""
