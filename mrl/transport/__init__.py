"""Transport: authenticated sockets between the processes of one run. The only home of `zmq`.

Protocol: one message is one body frame, at most `max_message_bytes` long; what it means is the caller's business.
Servers are ROUTERs, clients are DEALERs with a stable name. Every link is CURVE-encrypted, on tcp and on socket files.
A run has one pair for its servers and one per role and policy for clients. The allow-list is asked at the handshake
(over ZAP, which refuses everybody when its handler is gone) and at every message: a client speaks only under names that
its key covers, and a key that is revoked loses its links within a second.

Invariants: no call blocks longer than the timeout it was given; a send that cannot be done now returns False; a
message may be lost whenever a link breaks; `requests` asks again until there is an answer. Addresses travel through
endpoint files, which are read anew on every reconnect.

- `grants`      what a key may be: a role and a policy
- `allow_list`  public keys and their grants, as a file that servers watch
- `keys`        the run's key pairs, in files only the owner can read
- `endpoints`   where a role listens, as an atomically replaced file
- `links`       which key is behind each connection, and where answers to a client go
- `refusals`    what a server refused, counted by reason, logged at a bounded rate
- `server`      the ROUTER of a daemon
- `client`      the DEALER of one thread
- `background`  a thread that owns a client socket, so that the caller never waits
- `requests`    what awaits an answer: repeated until it comes, over a new link after silence
"""
