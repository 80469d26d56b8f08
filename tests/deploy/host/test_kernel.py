"""What the kernel says of a process that it ended: its real log and cgroups, and recorded lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from record_failures import memory_cgroup

from nodekit.deploy.host.probes import kernel
from nodekit.deploy.story.causes import recognise

GREEDY = "import sys; open(sys.argv[1], 'w').write('0'); kept = [bytearray(16 << 20) for _ in range(99)]"
# As /dev/kmsg had them.
RECORDS = """\
6,1203,77000000000,-;bridge: port 4(port3) entered forwarding state
6,1204,77616000000,-;python3[31999]: segfault at 0 ip 00007f3e2b9c2a0f sp 00007ffd7c0a3b08 error 4 in libc.so.6[7f3e2b880000+155000] likely on CPU 1
 SUBSYSTEM=none
4,1205,77617264388,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/verdict-test,task_memcg=/verdict-test,task=python3,pid=32023,uid=0
3,1206,77617264408,-;Memory cgroup out of memory: Killed process 32023 (python3) total-vm:630984kB, anon-rss:306432kB, file-rss:6640kB, shmem-rss:0kB, UID:0 pgtables:668kB oom_score_adj:0
"""  # noqa: E501


def test_the_kernels_own_line_about_a_process_that_it_killed_is_found() -> None:
    watch = kernel.Watch()
    with memory_cgroup() as cgroup:
        process = subprocess.Popen([sys.executable, "-c", GREEDY, str(cgroup / "cgroup.procs")])
        assert process.wait(60) == -9
    lines = watch.said([process.pid])
    assert f"Killed process {process.pid} (" in lines[-1]
    cause = recognise("", -9, lines)
    assert cause is not None
    assert cause.name == "cgroup-out-of-memory"
    assert watch.said([process.pid]) == lines, "not only whoever asks first is told"
    # Of another process, or of one that began later, that says nothing.
    assert not kernel.Watch().said([process.pid])


def test_each_record_has_a_message() -> None:
    found = kernel.parse(RECORDS)
    assert len(found) == 4
    assert found[0] == "bridge: port 4(port3) entered forwarding state"


@pytest.mark.parametrize(
    ("pids", "begin"),
    [
        pytest.param({32023}, ["oom-kill:", "Memory cgroup"], id="killed for want of memory"),
        pytest.param({31999}, ["python3[31999]: segfault"], id="a fault"),
        pytest.param({7}, ["oom-kill:", "Memory cgroup"], id="in a container the numbers are others"),
    ],
)
def test_the_lines_about_a_process_are_chosen(pids: set[int], begin: list[str]) -> None:
    lines = kernel.chosen(kernel.parse(RECORDS), pids)
    assert [line[: len(start)] for line, start in zip(lines, begin, strict=True)] == begin


@pytest.mark.parametrize(
    ("told", "files"),
    [
        pytest.param(
            "0::/system.slice/kit.service\n",
            {"system.slice/kit.service/memory.events": "low 0\noom 2\noom_kill 3\n", "system.slice/memory.max": "max\n",
             "system.slice/kit.service/memory.max": "2147483648\n"},
            id="version 2",
        ),
        pytest.param(
            "4:memory:/docker/ab12\n0::/\n",
            {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
             "memory/memory.limit_in_bytes": "2147483648\n"},
            id="version 1, in a container",
        ),
    ],
)  # fmt: skip
def test_where_the_log_may_not_be_read_the_cgroups_count_tells(
    tmp_path: Path, told: str, files: dict[str, str]
) -> None:
    cgroups, root = tmp_path / "cgroup", tmp_path / "fs"
    cgroups.write_text(told)
    log = tmp_path / "kmsg"
    log.touch()
    for number in (2, 3):
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text.replace("oom_kill 3", f"oom_kill {number}"))
        if number == 2:
            watch = kernel.Watch(str(log), str(cgroups), str(root))
            assert not watch.said([os.getpid()])
    lines = watch.said([os.getpid()])
    assert len(lines) == 1
    assert lines[0].endswith(", whose limit is 2.00 GiB: oom_kill 2 -> 3")
    cause = recognise("", -9, lines)
    assert cause is not None
    assert cause.name == "cgroup-out-of-memory"


def test_without_a_log_or_a_memory_cgroup_nothing_is_said(tmp_path: Path) -> None:
    log, cgroups = tmp_path / "kmsg", tmp_path / "cgroup"
    log.touch()
    assert kernel.oom_kills(str(cgroups), str(tmp_path)) is None
    assert not kernel.Watch(str(log), str(cgroups), str(tmp_path)).said([1])
