"""What the processes of a server do when who started them ends: a thread, or a process."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mrl.engines.vllm_launch import INSIDE

STARTS = """
import multiprocessing, time
from concurrent.futures import ThreadPoolExecutor

def work(there, long_words):
    there.send("begun")
    time.sleep(600)

if __name__ == "__main__":
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe(duplex=False)
    process = spawning.Process(target=work, args=(there, b"x" * 200_000))
    with ThreadPoolExecutor(1) as threads:  # the words exceed a pipe: it has begun to read when its thread ends
        threads.submit(process.start).result()
    here.poll(50)
    process.join(0.5)
    print(process.exitcode, flush=True)
    time.sleep(600)
"""
"""As vLLM 0.33 starts the workers of several GPUs (`MultiprocExecutor._start_workers_concurrently`)."""


@pytest.mark.timeout(120)
def test_a_process_outlives_the_thread_that_started_it_and_dies_with_the_process(tmp_path: Path):
    """A thread may end as soon as it has started one; a killed process leaves none behind."""
    program = tmp_path / "starts.py"
    program.write_text(STARTS)
    environment = os.environ | {"PYTHONPATH": str(INSIDE)}
    server = subprocess.Popen([sys.executable, program], env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    exit_code = server.stdout.readline().strip()
    started = psutil.Process(server.pid).children()
    server.kill()
    server.wait()
    server.stdout.close()

    left = psutil.wait_procs(started, timeout=20)[1]
    for process in left:
        process.kill()
    assert (exit_code, left) == ("None", [])
