"""Records: the typed messages that cross between processes, and their msgpack form.

Every message is a `msgspec.Struct` with bounds on every field, encoded as a msgpack map, so that it stays readable with
the plain `msgpack` package. Arrays travel as raw little-endian bytes. Evolution: inside one `SCHEMA` number fields are
only appended, with defaults. A reader ignores unknown fields of a newer writer. A field whose meaning changes raises
the number; readers refuse a record of another number.

- `version`              (run_epoch, step) of a policy
- `finish`               reasons for which an answer has no further token
- `evaluation_messages`  results of held-out evaluation, as files
- `experience`           records that cross between policies through the exchange
- `tags`                 the fields of a record that the exchange reads
- `rollouts`             own answers on the direct link from worker to learner
- `exchange_messages`    the conversation with the exchange daemon
- `leases`               the conversation with the allocator
- `telemetry_messages`   metrics and heartbeats on their way to the supervisor
- `codec`                bytes <-> records, with size limits and errors that name the field
"""
