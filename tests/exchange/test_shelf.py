"""The budget is one of memory."""

import tracemalloc

from mrl.exchange.shelf import Shelf
from mrl.records.codec import decode, encode
from mrl.records.experience import experience_decoder


def test_used_bytes_bounds_the_memory_really_used(outcome):
    """In the worst case, where every record has a prompt and a version of its own."""
    bodies = [encode(outcome(f"ticket-{n:06}", prompt_id=f"spell_backward:{n:06}", step=n)) for n in range(5000)]
    shelf = Shelf(per_prompt=4, budget_bytes=10**9)
    tracemalloc.start()
    try:
        for body in bodies:
            shelf.add(decode(body, experience_decoder), len(body))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * shelf.used_bytes < used < shelf.used_bytes
