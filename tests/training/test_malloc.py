"""What a step frees, the next one finds in the process."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, torch
from nodekit.training.process.malloc import keep_freed_memory

class Mallinfo2(ctypes.Structure):
    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]

told = ctypes.CDLL(None).mallinfo2
told.restype = Mallinfo2
keep_freed_memory()
before = told()
blocks = [torch.ones(20 << 18) for _ in range(4)]
print(told().hblkhd - before.hblkhd >> 20)  # each mapped by itself
blocks.clear()
print(told().arena - before.arena >> 20)  # still there when they are freed
"""


@pytest.mark.parametrize(
    ("variables", "mapped_mib", "kept_mib"),
    [({}, 0, 80), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, 80, 0)],
    ids=["kept", "as the user says"],
)
def test_blocks_of_one_step_are_those_of_the_next(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], mapped_mib: int, kept_mib: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = [*map(int, done.stdout.split())]
    assert found == pytest.approx([mapped_mib, kept_mib], abs=1)
