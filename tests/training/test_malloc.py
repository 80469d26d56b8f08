"""What a step frees, the next one finds in the process."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from nodekit.training.process.malloc import keep_freed_memory
keep_freed_memory()
def step():
    return [torch.ones(1 << 20).sum() for _ in range(8)] and [torch.ones(2 << 20), torch.ones(4 << 20)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


@pytest.mark.parametrize(
    ("variables", "is_kept"),
    [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)],
    ids=["kept", "as the user says"],
)
def test_pages_of_one_step_are_those_of_the_next(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_kept: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    pages = 10 * (4 << 20) * 4 // 4096
    assert (int(done.stdout) < pages / 10) == is_kept
