import subprocess
import sys


def test_the_room_needs_numpy_and_tokenizers_only():
    """The whole path imports without torch, transformers, msgspec or pydantic, for use outside mrl."""
    code = (
        "import sys\n"
        "from mrl.alignment import rank_file, receiver, source, spreading, translate\n"
        "print(*sorted({'torch', 'transformers', 'msgspec', 'pydantic', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == []
