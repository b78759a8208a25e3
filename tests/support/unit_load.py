"""Load for tests of unit leases: an engine with a set token rate, and a learner that trains on groups of engines.

    python unit_load.py worker|learner RUN_FOLDER SCRATCH POLICY INDEX TOKENS_PER_S GROUP_TOKENS GROUPS STEP_S

Lease, reports and links are the real ones. The engine holds a lock on its unit's file for as long as it lives: an
engine that finds the file locked has found a second owner, and says so in `violations/`. Groups go over a datagram
socket of the learner, acknowledged when there is room in its buffer.
"""

import fcntl
import itertools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from mrl.allocation.learner_reports import ReportSender
from mrl.allocation.lease import LeaseHolder, Used
from mrl.processes.planning.unit_workers import UNIT, UNIT_EPOCH
from mrl.records.leases import LearnerReport
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import nearest_endpoint
from mrl.transport.grants import grant_of
from mrl.transport.keys import load_client_keys

SLICE_S, RESEND_S, SAY_S = 0.02, 0.3, 0.2
BUFFER_BATCHES = 2


def link(folder: Path, identity: str, **hooks: object) -> BackgroundClient:
    keys = load_client_keys(folder / "keys", grant_of(identity))
    return BackgroundClient(
        ClientSocket(keys, lambda: nearest_endpoint(folder / "endpoints", "allocator"), identity=identity),
        tick_s=0.05,
        **hooks,  # type: ignore[arg-type]
    )


def say(path: Path, **values: object) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(values))
    fresh.replace(path)


def worker(folder: Path, scratch: Path, policy: str, index: int, tokens_per_s: float, group_tokens: int) -> int:
    unit, epoch = os.environ[UNIT], int(os.environ[UNIT_EPOCH])
    with (scratch / "locks" / unit.replace(":", "-")).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (scratch / "violations" / f"{unit}-{epoch}").touch()
            return 1
        return generate(folder, scratch, policy, index, tokens_per_s, group_tokens)


def generate(folder: Path, scratch: Path, policy: str, index: int, tokens_per_s: float, group_tokens: int) -> int:
    unit, epoch = os.environ[UNIT], int(os.environ[UNIT_EPOCH])
    lease = LeaseHolder(f"worker/{policy}/{index}", policy, unit=unit, unit_epoch=epoch)
    totals = [0, 0.0]
    client = link(
        folder,
        f"worker/{policy}/{index}",
        on_message=lambda body: lease.on_message(body, time.monotonic()),
        on_tick=lambda now_s: lease.on_tick(now_s, Used(*totals)),
    )
    lease.open(client.post, client.restart)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
    out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    out.bind(str(scratch / f"{os.getpid()}.socket"))
    out.settimeout(SLICE_S)
    for number in itertools.count():
        done, before_s = 0.0, time.monotonic()
        while done < group_tokens:
            time.sleep(SLICE_S)
            if stop or lease.has_lost_unit:
                return 1 if lease.has_lost_unit else 0
            now_s = time.monotonic()
            if lease.slots(now_s):
                done += (now_s - before_s) * tokens_per_s
                totals[1] += now_s - before_s
            before_s = now_s
        totals[0] += group_tokens
        say(scratch / "status" / f"{unit.replace(':', '-')}-{epoch}", policy=policy, tokens=totals[0], slot_s=totals[1])
        sent_s = 0.0
        while not stop:
            if time.monotonic() - sent_s > RESEND_S:
                sent_s = time.monotonic()
                send(out, scratch / f"{policy}.learner", number)
            try:
                if out.recv(64) == str(number).encode():
                    break
            except TimeoutError:
                continue
    raise AssertionError


def send(out: socket.socket, learner: Path, number: int) -> None:
    try:
        out.sendto(str(number).encode(), str(learner))
    except (FileNotFoundError, ConnectionRefusedError, TimeoutError):
        return  # the learner is not there yet, or hangs


def learner(folder: Path, scratch: Path, policy: str, group_tokens: int, groups: int, step_s: float) -> int:
    sender = ReportSender(policy)
    client = link(folder, f"learner/{policy}", on_message=sender.on_message, on_tick=sender.requests.on_tick)
    sender.requests.open(client.post, client.restart)
    path = scratch / f"{policy}.learner"
    path.unlink(missing_ok=True)
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inbox.bind(str(path))
    inbox.settimeout(SLICE_S)
    taken: set[tuple[str, bytes]] = set()
    buffered, steps, tokens, busy_s, wait_s = 0, 0, 0.0, 0.0, 0.0
    left_s, before_s, said_s = 0.0, time.monotonic(), 0.0
    while True:
        try:
            number, sender_path = inbox.recvfrom(64)
            if (sender_path, number) in taken or buffered < BUFFER_BATCHES * groups:
                buffered += (sender_path, number) not in taken
                taken.add((sender_path, number))
                inbox.sendto(number, sender_path)
        except (TimeoutError, FileNotFoundError, ConnectionRefusedError):
            pass
        now_s = time.monotonic()
        passed_s, before_s = min(now_s - before_s, 0.5), now_s  # longer: this process was stopped
        if left_s > 0.0:
            worked_s = min(passed_s, left_s)
            busy_s, left_s, tokens = (
                busy_s + worked_s,
                left_s - worked_s,
                tokens + worked_s / step_s * groups * group_tokens,
            )
            steps += left_s <= 0.0
        else:
            wait_s += passed_s
        if left_s <= 0.0 and buffered >= groups:
            buffered, left_s = buffered - groups, step_s
        if now_s - said_s > SAY_S:
            said_s = now_s
            sender.report(LearnerReport(policy=policy, trained_tokens=int(tokens), busy_s=busy_s, data_wait_s=wait_s))
            say(scratch / "status" / f"learner-{policy}", steps=steps, tokens=tokens, busy_s=busy_s, wait_s=wait_s)


def main(role: str, folder: str, scratch: str, policy: str, index: str, *numbers: str) -> int:
    tokens_per_s, group_tokens, groups, step_s = float(numbers[0]), int(numbers[1]), int(numbers[2]), float(numbers[3])
    if role == "worker":
        return worker(Path(folder), Path(scratch), policy, int(index), tokens_per_s, group_tokens)
    return learner(Path(folder), Path(scratch), policy, group_tokens, groups, step_s)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    os._exit(code)
