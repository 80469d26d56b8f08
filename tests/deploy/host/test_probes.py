"""What a host answers of itself."""

import os
import time
from pathlib import Path

import pytest

from nodekit.deploy.host.probes import probes


def test_only_a_lock_that_no_build_would_hold_so_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "a [cache]"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert probes._build_locks() == []
    locks = [cache / "torch_extensions/py311_cpu" / name / "lock" for name in ("cpu_adam", "fused_adam")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    assert probes._build_locks() == []
    os.utime(locks[1], (time.time() - 900,) * 2)
    assert probes._build_locks() == [str(locks[1])]
