"""What every process of mrl does first."""

import gc
import subprocess
import sys

import pytest

from mrl.process_start import importing

CODE = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
from mrl.cli.main import main
main(["--help"])
print(resource.getrlimit(resource.RLIMIT_NOFILE), os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.parametrize(
    ("variables", "compiled"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/mrl/torchinductor"),
        ({"MRL_CACHE": "/c"}, "/c/torchinductor"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/mine", "MRL_CACHE": "/c"}, "/mine"),
    ],
)
def test_descriptors_go_up_to_the_hard_limit_and_compiled_code_lies_in_the_user_s_cache(variables, compiled):
    """Whatever the command; who has said where the code lies keeps that."""
    done = subprocess.run([sys.executable, "-c", CODE], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"(512, 512) {compiled}"


def test_nobody_looks_for_garbage_while_modules_are_imported():
    """Afterwards as before, whatever came of it."""
    seen = []

    def failing() -> None:
        with importing():
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        failing()
    assert (seen, gc.isenabled()) == ([False], True)
    gc.disable()
    with importing():
        pass
    after = gc.isenabled()
    gc.enable()
    assert not after
