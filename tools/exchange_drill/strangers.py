"""Who must not get in: wrong, unknown and revoked keys, other people's names, no encryption, garbage."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq

from exchange_drill.clients import BareClient, stat_of
from exchange_drill.faults import Settings
from exchange_drill.outcome import Outcome
from exchange_drill.rig import Rig, opened
from exchange_drill.workload import READER, SOURCE
from mrl.records.codec import encode
from mrl.records.exchange_messages import Hello, Ping
from mrl.transport.endpoints import port_of, read_endpoint
from mrl.transport.grants import grant_of
from mrl.transport.keys import ClientKeys, load_client_keys, revoke_client_key
from mrl.transport.links import routing_id

SILENCE_S = 1.5
CUT_OFF_S = 2.0
VICTIM = f"worker/{SOURCE}/0"
ATTACKER = f"worker/{READER}/9"

Attack = Callable[[Path], bool]
"""True when the daemon gave an answer that it should not have given."""


def strangers(folder: Path, settings: Settings) -> Outcome:
    """Each tries while records flow; the daemon answers none, counts them, and goes on."""
    outcome = Outcome(f"refused: {', '.join(ATTACKS)}")
    with opened(Rig(folder, seed=settings.seed)) as rig:
        rig.start()
        for name, attack in ATTACKS.items():
            outcome.failures += [f"{name} was let in"] if attack(folder) else []
            outcome.tried += 1
            rig.await_progress(name)
        counted = stat_of(folder).malformed
        rig.finish(outcome)
    missing = {"unknown_key", "revoked_key", "impersonation", "handshake"} - counted.keys()
    outcome.failures += [f"not counted: {reason}" for reason in sorted(missing)]
    outcome.notes.append(", ".join(f"{reason} {number}" for reason, number in sorted(counted.items())))
    return outcome


def _is_answered(client: BareClient, policy: str = SOURCE) -> bool:
    try:
        client.send(Hello(client=VICTIM, policy=policy), timeout_s=SILENCE_S)
        return client.answer(timeout_s=SILENCE_S) is not None
    finally:
        client.close()


def _wrong_server_key(run: Path) -> bool:
    own = load_client_keys(run / "keys", grant_of(ATTACKER))
    public, _ = zmq.curve_keypair()
    return _is_answered(BareClient(run, ATTACKER, keys=ClientKeys(public, own.public, own.secret)))


def _unknown_key(run: Path) -> bool:
    own = load_client_keys(run / "keys", grant_of(ATTACKER))
    return _is_answered(BareClient(run, ATTACKER, keys=ClientKeys(own.server_public, *zmq.curve_keypair())))


def _stolen_name(run: Path) -> bool:
    return _is_answered(BareClient(run, ATTACKER, identity=routing_id(VICTIM)))


def _stolen_policy(run: Path) -> bool:
    """The name is its own, the policy that it claims is not: it is answered that nobody knows it."""
    client = BareClient(run, ATTACKER)
    try:
        answer = client.hello(SOURCE)
        return getattr(answer, "known", False)
    finally:
        client.close()


def _null_client(run: Path) -> bool:
    return _is_answered(BareClient(run, VICTIM, has_curve=False))


def _plain_client(run: Path) -> bool:
    client = BareClient(run, VICTIM, has_curve=False)
    client.socket.plain_username, client.socket.plain_password = b"worker", b"worker"
    client.connect(run)
    return _is_answered(client)


def _garbage(run: Path) -> bool:
    """Two hundred connections of random bytes, one after the other; whatever comes back is a greeting at most."""
    port = port_of(read_endpoint(run / "endpoints", "exchange"))
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as link:
            try:
                link.sendall(os.urandom(4096))
            except ConnectionError:
                continue
    return False


def _revoked_key(run: Path) -> bool:
    """Revoked while it is connected: within two seconds it hears no more, and it does not come in again."""
    client = BareClient(run, ATTACKER)
    try:
        if client.hello(READER) is None:
            raise RuntimeError("a client with a good key got no answer")
        stolen = load_client_keys(run / "keys", grant_of(ATTACKER))
        revoke_client_key(run / "keys", grant_of(ATTACKER).name)
        time.sleep(CUT_OFF_S)
        while client.answer(timeout_s=0.0):
            pass
        client.send(encode(Ping(client=ATTACKER)), timeout_s=SILENCE_S)
        is_heard = client.answer(timeout_s=SILENCE_S) is not None
    finally:
        client.close()
    return is_heard or _is_answered(BareClient(run, ATTACKER, keys=stolen), READER)


ATTACKS: Mapping[str, Attack] = {
    "wrong server key": _wrong_server_key,
    "unknown key": _unknown_key,
    "another's name": _stolen_name,
    "another's policy": _stolen_policy,
    "no CURVE": _null_client,
    "PLAIN": _plain_client,
    "garbage": _garbage,
    "revoked key": _revoked_key,
}
