"""Whole runs that mostly sleep between their steps, and leave the cores to the processes that a test waits for."""

from pathlib import Path

VERIFIER = """
import time

def calm(reference, answer):
    time.sleep(0.04)
    return float(answer == reference)
"""
TASKS = ("trim", "letter_counting")


def calm_steps(config: Path) -> list[str]:
    """Words for a run of both tasks with a verifier that sleeps, so that a step of 64 answers takes over a second."""
    (config.parent / "calm.py").write_text(VERIFIER)
    settings = ("verifier=calm:calm", "verifier_processes=1")
    return [f"--tasks.{task}.{setting}" for task in TASKS for setting in settings]
