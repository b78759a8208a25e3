"""Transport: authenticated sockets between the processes of one run. The only home of `zmq`.

Protocol: one message is one body frame, at most `max_message_bytes` long; what it means is the caller's business.
Servers are ROUTERs, clients are DEALERs with a stable identity. Every link is CURVE-encrypted; a server accepts only
the run's client key (an allow-list over ZAP that refuses everybody when its handler is gone).

Invariants: no call blocks longer than the timeout it was given; a send that cannot be done now returns False; a
message may be lost whenever a link breaks, so whoever needs an answer asks again. Addresses travel through endpoint
files, which are read anew on every reconnect.

- `keys`        the run's two key pairs, in files only the owner can read
- `endpoints`   where a role listens, as an atomically replaced file
- `server`      the ROUTER of a daemon
- `client`      the DEALER of one thread
- `background`  a thread that owns a client socket, so that the caller never waits
"""
