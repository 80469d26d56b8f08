"""Workers as forks and as fresh processes: real ones, of a process that stands in for the agent."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import itertools
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from agents import freeze, processes_of, until
from driver import Driver
from free_ports import free_port

from nodekit.deploy.agent.ranks import children, worker
from nodekit.deploy.agent.ranks.attempt import imports_for
from nodekit.deploy.agent.ranks.early_ends import EarlyEnds
from nodekit.deploy.agent.ranks.forkserver import ForkServer
from nodekit.deploy.agent.ranks.rehearsal import rehearse
from nodekit.deploy.agent.ranks.target import unforkable
from nodekit.deploy.agent.ranks.workers import _POLL_S, Workers
from nodekit.deploy.host import processes

GRACE_S = 60.0
"""For workers that hear SIGTERM: they end at once, but a machine may stand still for longer than 5 s just then."""
TORCH = ["torch", "torch._dynamo", "torch.optim", "torch.nn.parallel", "torch.utils.data", "no.such.module"]


Drivers = Callable[..., Driver]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Drivers]:
    started: list[Driver] = []

    def start(preload: Sequence[str] | None, **options: Any) -> Driver:
        started.append(Driver(tmp_path / f"driver{len(started)}", preload, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(params=["fork", "fresh"])
def light(request: pytest.FixtureRequest, driver: Drivers) -> Driver:
    """Workers of both kinds, without torch."""
    return driver([] if request.param == "fork" else None)


PROBE = """
'''The docstring.'''
first = list(globals())
import atexit, ctypes, faulthandler, fcntl, gc, json, logging, multiprocessing, os, resource, signal, sys, tempfile
import threading, time, warnings
import numpy, torch, torch._dynamo, torch.distributed, torch.nn.parallel, torch.optim, torch.utils.data

def text(value):
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))

def prctl(option):
    value = ctypes.c_int()
    libc.prctl(option, ctypes.byref(value))
    return value.value

import re
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
streams = (sys.stdin, sys.stdout, sys.stderr)
found = {
    "main": {name: text(globals()[name]) for name in first},
    "main is main": sys.modules["__main__"].__dict__ is globals(),
    "sys": [sys.argv, sys.orig_argv, sys.path, sys.executable, repr(sys.flags), sys.warnoptions, sys._xoptions],
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold()],
    "last exception": [sys.excepthook is sys.__excepthook__, hasattr(sys, "last_type"), sys.exc_info()],
    "ours": [name for name in sys.modules if name.startswith("nodekit")],
    "cwd": os.getcwd(),
    "environ": [f"{name}={value}" for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"],
    "getenv": [repr(libc.getenv(name)) for name in (b"LOCAL_RANK", b"HOME", b"DUMP", b"NODEKIT_DRIVERS_OWN")],
    "command line": open("/proc/self/cmdline").read(),
    "command name": open("/proc/self/comm").read(),
    "initial environment": sorted(open("/proc/self/environ").read().split("\\0")),
    "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "signal mask": [str(signal.pthread_sigmask(signal.SIG_BLOCK, [])), signal.set_wakeup_fd(-1)],
    "leads session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "subreaper, death signal": [prctl(37), prctl(2)],
    "files": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
    "more files": [number for number in range(3, 60) if os.path.exists(f"/proc/self/fd/{number}")],
    "modes": [fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_APPEND | os.O_ACCMODE) for number in (1, 2)],
    "inheritable": [os.get_inheritable(number) for number in range(3)],
    "streams": [[s.name, s.encoding, s.errors, s.line_buffering, s.write_through, type(s.buffer).__name__]
                for s in streams],
    "streams are": [sys.stdin.read(), sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "umask": [os.umask(0o77), os.nice(0), sorted(os.sched_getaffinity(0))],
    "rlimits": [resource.getrlimit(number) for number in range(16)],
    "faulthandler": faulthandler.is_enabled(),
    "logging": [logging.root.level, text(logging.root.handlers)],
    "loggers": {name: [one.level, one.propagate, [f"{text(h)} {text(h.formatter)}" for h in one.handlers]]
                for name, one in sorted(logging.root.manager.loggerDict.items())
                if isinstance(one, logging.Logger) and "nodekit" not in name},
    "warnings": sorted(map(str, warnings.filters)),
    "threads": [threading.active_count(), type(threading.main_thread()).__name__, threading.current_thread().name,
                threading.current_thread() is threading.main_thread(),
                threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
                threading.main_thread().ident == threading.get_ident()],
    "tempdir": tempfile.gettempdir(),
    "multiprocessing": [multiprocessing.process.ORIGINAL_DIR, str(multiprocessing.current_process()),
                        multiprocessing.active_children(), multiprocessing.get_start_method(allow_none=True)],
    "time zone": time.tzname,
    "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads(), libc.omp_get_max_threads()],
    "torch defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.cuda.is_initialized(),
                       torch.get_deterministic_debug_mode(), torch.cuda._is_in_bad_fork()],
    "products": [float((torch.ones(600, 600) @ torch.ones(600, 600)).sum()),
                 float((numpy.ones((600, 600)) @ numpy.ones((600, 600))).sum())],
}
def last():
    found["main at exit"] = {name: text(value) for name, value in globals().items()
                             if name.startswith("__") and name != "__warningregistry__"}
    found["main is main at exit"] = sys.modules["__main__"].__dict__ is globals()
    with open(os.environ["DUMP"], "w") as file:
        json.dump(found, file)
atexit.register(last)
"""


TARGETS: list[tuple[tuple[str, ...], dict[str, str | None]]] = [
    (("-u", "package/probe.py"), {}),
    (("package/../link",), {"OMP_NUM_THREADS": "1"}),
    (("-m", "package.probe"), {"NODEKIT_DRIVERS_OWN": None}),
]


@pytest.mark.slow
def test_a_fork_is_to_a_script_what_a_fresh_interpreter_is(
    driver: Drivers, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("NODEKIT_DRIVERS_OWN", "only in its own environment")
    dump, log = tmp_path / "dump", tmp_path / "log"
    forks, fresh = driver(TORCH), driver(None)
    forks.script(PROBE, "package/probe.py")
    (forks.code / "link").symlink_to("package/probe.py")
    for target, env in TARGETS:
        command = ("python", *target, "a b", "", "$HOME", "x" * 3000)
        dumps = []
        for one in (forks, fresh):
            one.env["NODEKIT_TEST_DRIVER"] = "any"
            log.unlink(missing_ok=True)
            assert one.run(command, env={**env, "DUMP": str(dump)}, log=log) == [(0, "")], target
            assert one.call("fresh") == ({} if one is forks else {"0": "there is no fork server"})
            dumps.append(json.loads(dump.read_text()))
        assert dumps[0] == dumps[1], target
        assert dumps[0]["command line"].split("\0")[1:-1] == list(command[1:])


OWN_CLASS = (
    "import sys\nclass Own:\n    to = sys.stdout\n    def write(self, text): self.to.write(text)\n"
    "    def __repr__(self): return 'own'\n"
)

ENDS = {
    "nothing": ("print('said')", 0),
    "number": ("import sys; sys.exit(7)", 7),
    "none": ("import sys; sys.exit(None)", 0),
    "large": ("import sys; sys.exit(256 + 9)", 9),
    "words": ("import sys; sys.exit('in words')", 1),
    "exception": ("def inner():\n    raise ValueError('boom')\n\ninner()", 1),
    "chain": ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x y') from error", 1),
    "group": ("raise SystemError('a\\nb')", 1),
    "syntax": ("x = 1\ndef broken(:\n    pass", 1),
    "encoding": ("# coding: latin-1\nraise ValueError('caf\u00e9')", 1),
    "import": ("import no_such_module", 1),
    "recursion": ("def deep(): deep()\ntry: deep()\nexcept RecursionError: print('deep')", 0),
    "interrupt": ("import atexit\natexit.register(print, 'at exit')\nraise KeyboardInterrupt", -signal.SIGINT),
    "interrupted": ("import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(9)", -signal.SIGINT),
    "kill": ("import os; print('x', flush=True); os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "term": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "abort": ("import os; os.abort()", -signal.SIGABRT),
    "hook": ("import sys\nsys.excepthook = lambda *_: sys.exit(5)\nraise ValueError", 5),
    "at exit": ("import atexit\n@atexit.register\ndef last(): print(__name__, '__file__' in globals())", 0),
    "unbuffered": ("import os; print('out'); os.write(2, b'raw\\n'); print('end'); os._exit(4)", 4),
    "thread": (
        "import threading, time\ndef late():\n    time.sleep(0.2)\n    print('late')\n"
        "threading.Thread(target=late).start()\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        0,
    ),
    "del": ("class Last:\n    def __del__(self): print('gone')\nkept = Last()", 0),
    "del order": (
        "class Last:\n    def __init__(self, word): self.word = word\n    def __del__(self): print(self.word)\n"
        "a, _b, c = Last('a'), Last('b'), Last('c')\nc.cycle = c",
        0,
    ),
    "file": ("import os\nkept = os.fdopen(os.dup(1), 'w')\nkept.write('written\\n')", 0),
    "kept file": ("import os, sys\nsys.kept = os.fdopen(os.dup(1), 'w')\nsys.kept.write('written\\n')", 0),
    "compressed": (
        "import gzip, os\nkept = gzip.GzipFile('', 'wb', fileobj=os.fdopen(os.dup(1), 'wb'), mtime=0)\n"
        "kept.write(b'text')",
        0,
    ),
    "temporary": (
        "import os, tempfile\nkept = tempfile.NamedTemporaryFile()\nclass Last:\n"
        "    def __init__(self, name): self.name = name\n"
        "    def __del__(self): print(os.path.exists(self.name))\nz = Last(kept.name)",
        0,
    ),
    "printed to a full disk": ("import sys\nsys.stdout = open('/dev/full', 'w')\nprint('lost')", 120),
    "printed to its own class": (f"{OWN_CLASS}    def flush(self): self.to.flush()\nsys.stdout = Own()\nprint('x')", 0),
    "which cannot flush": (f"{OWN_CLASS}sys.stdout = Own()", 120),
    "nor on stderr": (f"{OWN_CLASS}    def flush(self): raise ValueError\nsys.stderr = Own()\nprint('x')", 120),
    "closed": ("import sys\nprint('x')\nsys.stdout.close()\nsys.stderr = None", 0),
    "C": ("import ctypes\nctypes.CDLL(None).puts(b'from C')", 0),
    "warning": ("import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)", 0),
}  # fmt: skip


MARKING = """
import nodekit.deploy.agent.quorum
import nodekit.training.world
nodekit.training.world.mark = "the server's"
"""
LOOKING = """
import sys
import nodekit, nodekit.training.world
print("world:", getattr(nodekit.training.world, "mark", "imported anew"))
print("agent:", "there" if "nodekit.deploy" in sys.modules or hasattr(nodekit, "deploy") else "forgotten")
raise SystemExit(7)
"""


@pytest.mark.slow
def test_the_training_module_is_not_imported_again_unless_another_one_would_be(
    driver: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marking.py").write_text(MARKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = driver(["marking"])
    job, training = one.script(LOOKING), ("python", "-m", "nodekit.training")
    found = one.run(job, (*training, "--task", "job.py:Task"))
    assert found[0] == (7, "world: imported anew\nagent: forgotten\n")
    assert found[1] == (7, "world: the server's\nagent: forgotten\n")
    one.script("print('the user has a nodekit of their own')", "nodekit/training/__main__.py")
    one.script("", "nodekit/training/__init__.py")
    assert one.run(training)[0] == (0, "the user has a nodekit of their own\n")


@pytest.mark.slow
def test_workers_end_as_python_ends(driver: Drivers) -> None:
    found = []
    for preload in ([], None):
        one = driver(preload, unbuffered=False)
        commands: list[tuple[str, ...]] = [one.script(text, f"{name}.py") for name, (text, _) in ENDS.items()]
        commands += [("python", "-m", f"{name}") for name in ENDS] + [
            ("python", "-m", "no.such.module"),
            ("python", "nowhere.py"),
        ]
        found.append(dict(zip([command[1:] for command in commands], one.run(*commands), strict=True)))
        assert preload is None or one.call("fresh") == {str(len(commands) - 1): "there is no nowhere.py"}
    assert found[0] == found[1]
    for name, (_, code) in ENDS.items():
        assert found[0][f"{name}.py",][0] == code, name
    assert found[0]["words.py",][1] == "in words\n"
    assert "forkserver" not in "".join(said for _, said in found[0].values())


DATA_PARALLEL = """
import os, sys, torch, torch.distributed as dist
os.environ["RANK"] = os.environ["LOCAL_RANK"]
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    for _ in range(3):
        model(torch.rand(8, 20)).sum().backward()
    if sys.argv[1] == "destroys":
        dist.destroy_process_group()

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["destroys", "leaves"])
def test_a_script_that_trains_in_parallel_ends(driver: Drivers, how: str) -> None:
    one = driver(["torch._dynamo", "torch.nn.parallel", "torch.optim"])
    command = (*one.script(DATA_PARALLEL), how)
    for _ in range(8):  # without the mend most of them hang
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "3",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        one.start(*[command] * 3, env=place)
        assert one.end() == [0, 0, 0]


MULTIPROCESSING = """
import multiprocessing, os, pickle, random, sys

class Thing:
    def __init__(self, value): self.value = value
    def __getitem__(self, index): return [index, os.getpid() != int(os.environ["MAIN"])]
    def __len__(self): return 4

def double(thing): return Thing(thing.value * 2), os.getpid()

if __name__ == "__main__":
    os.environ["MAIN"] = str(os.getpid())
    print(pickle.loads(pickle.dumps(Thing(3))).value, pickle.dumps(double))
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            thing, pid = pool.apply(double, (Thing(4),))
            print(method, thing.value, pid != os.getpid())
    # Whoever is not forked imports torch anew: one way in each of the two runs, after the others have done without.
    from torch.utils.data import DataLoader
    for method in ("fork", sys.argv[1]):
        loader = DataLoader(Thing(0), num_workers=1, multiprocessing_context=method)
        print(method, [[each.item() for each in pair] for pair in loader])
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=queue.put, args=([1],))
    child.start(); print(queue.get()); child.join(); print(child.exitcode)
"""


@pytest.mark.slow
def test_multiprocessing_and_pickle_know_what_main_defines(driver: Drivers) -> None:
    found = []
    for preload in (TORCH, None):
        one = driver(preload)
        script = one.script(MULTIPROCESSING, "package/job.py")
        found.append(one.run((*script, "spawn"), ("python", "-m", "package.job", "forkserver")))
    assert found[0] == found[1]
    assert [code for code, _ in found[0]] == [0, 0]
    for method, (_, said) in zip(("spawn", "forkserver"), found[0], strict=True):
        assert "forkserver 8 True\n" in said
        assert f"{method} [[0, True], [1, True], [2, True], [3, True]]\n" in said


@pytest.mark.slow
def test_workers_of_one_server_draw_different_numbers(driver: Drivers) -> None:
    one = driver(["numpy.random", "torch"])
    script = one.script(
        "import multiprocessing, random, numpy, torch\nprint(random.random(), numpy.random.random(), "
        "torch.rand(1).item(), multiprocessing.current_process().authkey.hex())"
    )
    first, second = (said.split() for _, said in one.run(script, script))
    assert one.call("fresh") == {}
    assert len(first) == 4
    assert not set(first) & set(second)


HARD_ARGS = [
    "a b",
    "'",
    '"',
    "$HOME",
    "$$",
    "${local_rank}",
    ";",
    "new\nline",
    "ünï ✓",
    "",
    "-x",
    "-m",
    "\\n",
    "\udcff",
]


def test_arguments_and_variables_arrive_byte_for_byte(light: Driver) -> None:
    script = light.script(
        "import os, sys; print([os.fsencode(a) for a in sys.argv[1:]], os.environb[b'HARD'])"
    )
    value = "a b\n'\"$HOME ✓\udcfe="
    program = ("sh", "-c", 'printf "%s|" "$@" "$HARD"', "x", *HARD_ARGS)
    forked, other = light.run((*script, *HARD_ARGS), program, env={"HARD": value})
    assert forked == (0, f"{[os.fsencode(word) for word in HARD_ARGS]} {os.fsencode(value)}\n")
    assert other == (0, "".join(f"{word}|" for word in [*HARD_ARGS, value]))


def test_the_log_is_private_and_appended_to(light: Driver) -> None:
    script = light.script("print('new')")
    log = light.folder / "log"
    assert light.run(script, log=log) == [(0, "new\n")]
    assert log.stat().st_mode & 0o777 == 0o600
    assert light.run(script, log=log) == [(0, "new\nnew\n")]


def test_a_command_that_cannot_run_is_named_in_the_log(light: Driver) -> None:
    ((code, said),) = light.run(("./no such", "x"))
    assert (code, said) == (127, f"kit: cannot run './no such' in {light.code}: No such file or directory\n")


SETS = """
import os
os.environ['OMP_NUM_THREADS'] = '3'
if __name__ == "__main__":
    os.environ.setdefault("TORCH_LOGS", "dynamo")
"""
SETS_OTHERS = """
import os
# os.environ["TORCH_LOGS"] = "dynamo"
if os.environ.get("OMP_NUM_THREADS") == "3" or os.environ["HOME"] == "3":
    pass
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["TORCH_NCCL_X"] = ""
import torch.utils
os.environ["TORCH_LOGS"] = "too late, as under python"
"""
REFUSED = [
    (("python", "-O", "job.py"), {}, "only python"),
    (("python", "-c", "print('said')"), {}, "only python"),
    (("python",), {}, "only python"),
    ((sys.executable, "job.py"), {}, "only python"),
    (("python", "job.py"), {"PYTHONHASHSEED": "7"}, "differs in PYTHONHASHSEED"),
    (("python", "job.py"), {"PYTHONUNBUFFERED": None}, "differs in PYTHONUNBUFFERED"),
    (
        ("python", "job.py"),
        {"LD_LIBRARY_PATH": "/x", "MKL_NUM_THREADS": "1"},
        "LD_LIBRARY_PATH, MKL_NUM_THREADS",
    ),
    (("python", "job.py"), {"TORCH_LOGS": "dynamo"}, "TORCH_LOGS"),
    (("python", "job.py"), {"OMP_NUM_THREADS": "2,1"}, "OMP_NUM_THREADS"),
    (("python", "hides/job.py"), {}, "shlex.py hides"),
    (("python", "sets.py"), {}, "sets.py sets OMP_NUM_THREADS, TORCH_LOGS, which"),
]
FORKED = [
    (("python", "-u", "job.py"), {}),
    (("python", "-m", "job"), {"PYTHONUNBUFFERED": "1"}),
    (("python", "./job.py"), {"RANK": "3", "TORCHELASTIC_RUN_ID": "1", "TORCH_NCCL_X": "1", "NCCL_X": "1"}),
    (("python", "job.py"), {"OMP_NUM_THREADS": "1"}),
    (("python", "sets_others.py"), {}),
]  # fmt: skip


@pytest.mark.slow
def test_what_a_fork_would_get_wrong_starts_afresh(driver: Drivers) -> None:
    one = driver(["shlex"])
    one.script("import shlex; print('said', len(shlex.__file__) > 0)")
    one.script("import shlex; print('said', shlex.mine)", "hides/job.py")
    one.script(f"{SETS}print('said')", "sets.py")
    one.script(f"{SETS_OTHERS}print('said True')", "sets_others.py")
    one.script("mine = True", "hides/shlex.py")
    for argv, env, why in REFUSED:
        assert one.run(argv, env=env)[0] in [(0, "said True\n"), (0, "said\n"), (0, "")], argv
        assert why in one.call("fresh").get("0", "forked"), (argv, env)
    for argv, env in FORKED:
        assert one.run(argv, env=env) == [(0, "said True\n")], argv
        assert one.call("fresh") == {}, (argv, env)


LIBRARY = """
import os, time
time.sleep(float(os.environ.get("LIBRARY_TAKES", 0)))
maker, read = os.getpid(), [os.environ.get(name) for name in ("LIBRARY_READS", "ANOTHER")]
os.environ["LIBRARY_SETS"] = "set"
os.environ.setdefault("LOCAL_RANK", "0")
"""
USES_LIBRARY = """
import os, library
print("ours" if library.maker == os.getpid() else "the server's", library.read, *map(os.environ.get, NAMES))
"""


def test_what_workers_will_import_is_imported_once_in_their_environment(
    driver: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ANOTHER", "the agent's")
    one = driver([])
    names = ("LIBRARY_READS", "ANOTHER", "LIBRARY_SETS", "LOCAL_RANK")
    job = one.script(f"NAMES = {names}" + USES_LIBRARY)
    env = {**one.env, "LIBRARY_READS": "read", "ANOTHER": "the workers'"}
    one.call("preload", ["no.such.library", "library"], {**env, "LIBRARY_TAKES": "0.3"})
    assert one.call("warm_up") > 3  # times it has paused meanwhile
    assert one.call("warm_up") == 0
    found = one.run(job, job, env={"LIBRARY_READS": "read", "ANOTHER": "the workers'"})
    said = "the server's ['read', \"the workers'\"] read the workers' set"
    assert found == [(0, f"{said} 0\n"), (0, f"{said} 1\n")]
    assert one.call("fresh") == {}
    one.script("raise SystemExit('the user has a library of their own')", "library.py")
    assert one.run(job)[0] == (1, "the user has a library of their own\n")
    assert one.call("fresh") == {"0": "library.py hides a module of the same name"}


def test_no_worker_is_forked_once_an_import_has_started_a_thread(
    driver: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = driver([])
    one.call("preload", ["library"], one.env)
    assert one.run(one.script("import library; print('said')")) == [(0, "said\n")]
    assert one.call("fresh") == {"0": "an import has started a thread"}


def test_no_worker_is_forked_once_an_import_has_opened_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # one of another test's may still be there
    for number, opened in enumerate(("/dev/null", "socket:[1]", "/home/dev/nvidia0")):
        (tmp_path / str(number)).symlink_to(opened)
    assert unforkable(tmp_path) is None
    (tmp_path / "7").symlink_to("/dev/nvidiactl")
    assert unforkable(tmp_path) == "an import has opened /dev/nvidiactl"


def test_a_start_waits_for_imports_that_nobody_has_waited_for(
    driver: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = driver([])
    one.call("preload", ["library"], {**one.env, "LIBRARY_TAKES": "0.3"})
    assert one.run(one.script("NAMES = ()" + USES_LIBRARY)) == [(0, "the server's [None, None]\n")]
    assert one.call("warm_up") == 0


@pytest.mark.parametrize(
    ("argv", "engine"),
    [
        (("python", "-m", "nodekit.training", "--task", "text"), "nodekit.training.engines.ddp"),
        (("python", "-m", "nodekit.training", "--engine", "fabric"), "nodekit.training.engines.fabric"),
        (("python", "-m", "nodekit.training", "--help"), None),
        (("python", "-m", "nodekit.training", ""), None),
        (("python", "-m", "nodekit.training", "--no-such-option"), None),
        (("numactl", "python", "-m", "nodekit.training"), None),
        (("python", "train.py", "-m", "nodekit.training"), None),
    ],
)
def test_only_what_kits_module_will_import_is_known_before(argv: tuple[str, ...], engine: str | None) -> None:
    names = imports_for(argv)
    assert engine in names if engine else not names
    assert all(importlib.util.find_spec(name) for name in names)


def test_without_its_server_nothing_is_imported_before_the_start(driver: Drivers) -> None:
    one = driver([])
    assert one.server
    os.kill(one.server, signal.SIGKILL)
    one.call("preload", ["shlex"], one.env)
    assert one.run(one.script("print('said')")) == [(0, "said\n")]
    assert one.call("fresh") == {"0": "there is no fork server"}


UP = "import sys, time\nprint('up', *sys.argv[1:], flush=True)\ntime.sleep(600)\n"


def test_poll_tells_who_has_ended_and_stop_ends_the_rest(light: Driver) -> None:
    up, ends = light.script(UP), light.script("raise SystemExit(3)", "ends.py")
    pids = light.start(up, ends)
    light.said("up")
    until(lambda: light.call("poll") == {"1": 3})
    assert light.call("pids") == {str(rank): pid for rank, pid in pids.items()}
    assert light.call("stop", GRACE_S) is False
    assert light.call("pids") == {}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert light.run(ends, ends) == [(3, ""), (3, "")]


def test_a_wait_ends_with_a_worker_or_a_call_and_not_before(light: Driver, tmp_path: Path) -> None:
    """What ends it late costs a restart its speed, what ends it early a core."""
    waits = (
        f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
    )
    light.start(light.script(waits), light.script(UP, "up.py"))
    light.said("up", 1)
    assert light.call("poll") == {}
    assert light.call("wait", 0.2) is False
    (tmp_path / "go").touch()
    assert light.call("wait", 60) is True
    until(lambda: light.call("poll") == {"0": 0})
    # They are told that it begins to end, too.
    until(lambda: light.call("wait", 0.2) is False, what="all to be told of its end")
    light.call("wake")
    assert light.call("wait", 60) is True
    assert light.call("wait", 0.2) is False, "once for each call"
    assert light.call("stop", GRACE_S) is False


# To take back its memory takes the kernel 0.2 s, and as much longer as the machine is slower.
LARGE = """
import subprocess, time
memory = bytearray(b"x") * (2 << 30)
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


def is_gone(handle: int) -> bool:
    """Whether a process has ended with all its memory, by its pidfd."""
    return bool(select.select([handle], [], [], 0)[0])


@pytest.fixture
def killed(driver: Drivers) -> Iterator[tuple[Driver, int]]:
    """The agent of a worker that has much memory, and a process of its own, and was killed; the worker's pidfd."""
    one = driver([])
    pid = one.start(one.script(LARGE, "large.py"))[0]
    one.said("up")
    assert one.call("wait", 0.5) is False
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    yield one, handle
    os.close(handle)


def test_a_killed_worker_is_told_before_its_memory_is_taken_back(killed: tuple[Driver, int]) -> None:
    """Until then its parent and its connections are told nothing, and a large one takes seconds."""
    driver, handle = killed
    assert driver.call("wait", 60) is True
    assert driver.call("poll") == {"0": -signal.SIGKILL}
    assert not is_gone(handle)
    driver.call("stop", 0)
    assert is_gone(handle)


def test_what_takes_its_place_begins_once_it_is_gone_and_what_it_had_started_is_ended(
    killed: tuple[Driver, int],
) -> None:
    driver, handle = killed
    driver.call("stop_without_waiting")
    assert not is_gone(handle)
    (other,) = [pid for pid, line in processes_of(driver.marker).items() if line.startswith("sleep ")]
    driver.start(driver.script(f"import os\nprint(os.path.exists('/proc/{other}'), flush=True)\n{UP}"))
    driver.said("up")
    assert driver.log().startswith("False"), "what had its ports and files is gone, too"
    assert is_gone(handle)
    assert driver.call("poll") == {}, "the new one goes on"


def test_what_takes_its_place_waits_for_as_long_as_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """To take back hundreds of GB takes the kernel longer than the time after which a process counts as stuck."""
    monkeypatch.setattr(children, "STUCK_S", 0.2)
    looks = iter([True] * 200 + [False] * 2)
    times = itertools.count()
    monkeypatch.setattr(processes, "find", lambda _: next(looks))
    monkeypatch.setattr(processes, "activity", lambda _: str(next(times)))
    children.wait_until_reaped([1])
    assert next(looks, None) is False
    assert next(times) == 200


def test_a_stop_that_waits_does_so_for_what_an_earlier_one_has_left(killed: tuple[Driver, int]) -> None:
    driver, handle = killed
    driver.call("stop_without_waiting")
    assert not is_gone(handle)
    driver.call("stop", 0)
    assert is_gone(handle)


def test_where_no_thread_can_be_started_an_end_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    workers = Workers(Mock(early_ends=Mock(is_held=Mock(side_effect=[False, True]))))
    workers._pids = {0: os.getpid()}
    start = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", start)
    assert not workers.wait(0)
    start.assert_not_called()
    for _ in range(2):
        assert not workers.wait(0)
    start.assert_called_once_with()


def test_a_worker_that_has_the_pid_of_an_earlier_one_is_watched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    workers = Workers(Mock(early_ends=Mock(is_held=Mock(return_value=True))))
    start = Mock()
    monkeypatch.setattr(threading.Thread, "start", start)
    for pids, num_watched in (({0: os.getpid()}, 1), ({0: os.getpid()}, 1), ({}, 1), ({0: os.getpid()}, 2)):
        workers._pids = pids
        workers.wait(0)
        assert start.call_count == num_watched


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> tuple[Workers, dict[str, Mock]]:
    """Two workers that are not there, and what is done to them; a look takes no time."""
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    done = {"exit_codes": Mock(return_value={}), "signal_groups": Mock(), "clear_up": Mock(return_value={})}
    for name, mock in done.items():
        monkeypatch.setattr(children, name, mock)
    workers = Workers(None)
    workers._pids = {0: 70, 1: 71}
    monkeypatch.setattr(
        workers, "wait", lambda _: done["exit_codes"].configure_mock(return_value={0: 0, 1: 0})
    )
    return workers, done


def test_a_stop_without_grace_waits_while_it_is_wanted_and_signals_only_whom_nobody_has_told(
    imitated: tuple[Workers, dict[str, Mock]],
) -> None:
    workers, done = imitated
    assert workers.stop(0, is_wanted=lambda: True, unsignalled=[1]) is False
    (term, go_on) = done["signal_groups"].call_args_list
    assert (term.args, go_on.args) == (({0: 70}, signal.SIGTERM), ({0: 70, 1: 71}, signal.SIGCONT))


def test_a_worker_that_has_ended_does_not_stay_though_it_said_so(
    imitated: tuple[Workers, dict[str, Mock]],
) -> None:
    workers, done = imitated
    done["exit_codes"].return_value = {0: 1}
    workers.stop(0, staying=lambda: [0, 1])
    assert workers.pids == {1: 71}
    assert done["clear_up"].call_args.args == ({0: 70},)


def test_the_end_of_whoever_holds_a_mutex_is_told_and_that_it_executes_another_program() -> None:
    ends = EarlyEnds()
    assert not ends.is_held(0)
    for end in ("os._exit(1)", "os.execv('/bin/sleep', ['sleep', '600'])"):
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            ends.hold(0)
            ends.hold(64)  # there is none
            os.read(reads, 1)
            exec(end)
        until(lambda: ends.is_held(0))
        assert not ends.is_held(1)
        assert not ends.is_held(64)
        thread = threading.Thread(target=ends.wait, args=(0,), daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        os.write(writes, b"x")
        thread.join(60)
        assert not thread.is_alive()
        assert not ends.is_held(0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)


def test_a_wait_ends_once_for_what_comes_whether_it_is_read_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    workers = Workers(None)
    reads, writes = os.pipe()
    with open(reads, "rb"), open(writes, "wb", buffering=0) as message:  # noqa: PTH123
        for _ in range(2):  # as each attempt does
            workers.wake_by(reads)
            assert not workers.wait(0.05)
            message.write(b"x")
            assert workers.wait(60)
            assert not workers.wait(0.05)


def test_what_waits_have_opened_is_closed_with_the_round(light: Driver) -> None:
    script, opened = light.script(UP), []
    for _ in range(3):
        light.start(script)
        light.call("wait", 0)
        light.call("stop", 0)
        opened.append(len(list(Path(f"/proc/{light.process.pid}/fd").iterdir())))
    assert opened[0] == opened[1] == opened[2]


def test_on_a_kernel_that_does_not_tell_of_an_end_a_wait_is_short_and_has_one_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Linux 5.3; likewise of a worker that is gone by then."""
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    workers = Workers(None)
    workers._pids = {0: os.getpid()}
    start = time.monotonic()
    assert workers.wait(60.0)
    assert time.monotonic() - start < 60


def test_where_no_more_may_be_watched_a_wait_is_short_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel counts what a user watches, in all processes (fs.epoll.max_user_watches)."""
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    workers, handle = Workers(None), os.pidfd_open(os.getpid())
    monkeypatch.setattr(os, "pidfd_open", lambda _: handle)
    workers._pids = {0: os.getpid()}
    own, workers._ends = (
        workers._ends,
        Mock(register=Mock(side_effect=OSError(errno.ENOSPC, "No space left"))),
    )
    assert workers.wait(60.0)
    workers._ends.poll.assert_called_once_with(_POLL_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    workers._pids, workers._ends = {}, own
    assert not workers.wait(0.0)


def test_a_worker_that_hears_sigterm_may_take_its_time(light: Driver) -> None:
    script = light.script(
        "import signal, sys, time\ndef end(*_):\n    time.sleep(0.3)\n    print('saved', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n" + UP
    )
    light.start(script)
    light.said("up")
    assert light.call("stop", GRACE_S) is False
    assert light.log() == "up\nsaved\n"


def test_a_worker_deaf_to_sigterm_is_killed_after_the_grace(light: Driver) -> None:
    script = light.script("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + UP)
    (pid,) = light.start(script).values()
    light.said("up")
    start = time.monotonic()
    assert light.call("stop", 0.5) is True
    assert time.monotonic() - start >= 0.5
    assert not Path(f"/proc/{pid}").exists()
    light.start(script)
    assert light.call("stop", 0) is True


def test_a_worker_that_says_at_the_last_moment_that_it_stays_is_there_at_the_next_start(
    light: Driver,
) -> None:
    pid = light.start(light.script(UP))[0]
    light.said("up")
    assert light.call("stop_all_but_one_that_says_late_that_it_stays") is False
    assert light.call("pids") == {"0": pid}
    assert light.call("poll") == {}
    assert light.call("stop", GRACE_S) is False


def test_workers_whose_start_is_not_waited_for_are_there_at_the_next_look(light: Driver) -> None:
    light.start(light.script(UP), light.script("", "ends.py"), how="start_soon")
    assert until(lambda: light.call("poll"), what="the end of one") == {"1": 0}
    assert sorted(light.call("pids")) == ["0", "1"]
    light.said("up")
    assert light.call("stop", GRACE_S) is False
    assert light.call("pids") == {}


@pytest.mark.parametrize("heard", [True, False])
def test_a_stopped_worker_does_not_hold_up_a_stop(light: Driver, heard: bool) -> None:
    deaf = "" if heard else "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (pid,) = light.start(light.script(deaf + UP)).values()
    light.said("up")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: b") T " in Path(f"/proc/{pid}/stat").read_bytes())
    assert light.call("stop", GRACE_S if heard else 0.2) is not heard


@pytest.mark.parametrize("preload", [[], None])
def test_a_worker_that_cannot_be_ended_is_told_and_not_waited_for(
    driver: Drivers, freezer: Path, monkeypatch: pytest.MonkeyPatch, preload: list[str] | None
) -> None:
    monkeypatch.setenv("TEST_STUCK_S", "0.3")
    light = driver(preload)
    pids = light.start(light.script(UP), light.script(UP))
    light.said("up")
    light.said("up", 1)
    freeze(freezer, pids[1])
    assert light.call("stop", 0.1) is True
    (stuck,) = light.call("stuck")
    assert re.fullmatch(rf"local rank 1 \(pid {pids[1]}, state D( in \w+)?\)", stuck)
    assert not Path(f"/proc/{pids[0]}").exists()
    light.start(light.script(UP))  # and it hears what it is asked
    light.said("up")
    assert light.call("stop", GRACE_S) is False
    assert len(light.call("stuck")) == 1


def test_a_stop_right_after_the_start_is_heard(light: Driver) -> None:
    script = light.script(UP)
    for _ in range(10):
        light.start(script, script)
        assert light.call("stop", GRACE_S) is False


WITH_CHILDREN = """
import subprocess
subprocess.Popen(["sleep", "601"])
subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 602 & wait"], start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sleep 603 & exit 0"]).wait()
"""


def sleepers(driver: Driver) -> list[str]:
    return sorted(line for line in processes_of(driver.marker).values() if line.startswith("sleep"))


@pytest.mark.parametrize("rest", [UP, "print('up')"])
def test_what_a_worker_started_is_ended_with_it(light: Driver, rest: str) -> None:
    light.start(light.script(WITH_CHILDREN + rest))
    light.said("up")
    until(lambda: sleepers(light) == ["sleep 601 ", "sleep 602 ", "sleep 603 "])
    if rest != UP:
        until(lambda: light.call("poll") == {"0": 0})
    assert light.call("stop", GRACE_S) is False
    assert sleepers(light) == []


def test_a_killed_agent_leaves_nothing(light: Driver) -> None:
    script = light.script(("" if light.server is None else WITH_CHILDREN) + UP)
    light.start(script, script)
    light.said("up")
    light.said("up", 1)
    assert len(processes_of(light.marker)) >= 3
    light.process.kill()
    until(lambda: list(processes_of(light.marker)) in ([], [light.process.pid]))


def test_without_its_server_workers_die_and_the_next_start_afresh(driver: Drivers) -> None:
    one = driver([])
    assert one.server
    script, ends = one.script(UP), one.script("raise SystemExit(3)", "ends.py")
    one.start(script, ends)
    one.said("up")
    until(lambda: one.call("poll") == {"1": 3})
    os.kill(one.server, signal.SIGKILL)
    until(lambda: one.call("poll") == {"0": -signal.SIGKILL, "1": 3})
    one.call("stop", GRACE_S)
    one.start(script)
    one.said("up")
    assert one.call("fresh") == {"0": "there is no fork server"}
    assert one.call("stop", GRACE_S) is False
    assert "the fork server is lost" in (one.folder / "driver.log").read_text()


def test_while_workers_run_forks_wait_for_the_next_start(driver: Drivers) -> None:
    one = driver([])
    assert one.server
    script = one.script("import os; print('rank', os.environ['LOCAL_RANK'], 'is up')\n" + UP)
    known = {one.process.pid, one.server, *one.start(script, script).values()}
    waiting = until(lambda: len(found := {*processes_of(one.marker)} - known) == 2 and found)
    ended, stopped = waiting
    os.kill(ended, signal.SIGTERM)
    os.kill(stopped, signal.SIGSTOP)
    one.call("stop", GRACE_S)
    pids = one.start(script, script, script)
    assert stopped in pids.values()
    assert ended not in pids.values()
    one.start()  # as where all ranks stay: nothing is to wait for less
    for rank in pids:
        one.said(f"rank {rank} is up", rank)
    waiting = until(
        lambda: len(found := {*processes_of(one.marker)} - known - {*pids.values()}) == 3 and found
    )
    os.kill(one.server, signal.SIGKILL)
    until(lambda: waiting.isdisjoint(processes_of(one.marker)))


def test_what_waits_to_be_kits_module_has_rehearsed_it_and_what_waits_for_a_script_has_not(
    driver: Drivers,
) -> None:
    def own_memory_kb(pid: int) -> int:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(re.findall(r"Private_Dirty: +(\d+) kB", text)[0])

    def waiting(one: Driver) -> int:
        known = {one.process.pid, one.server, *one.call("pids").values()}
        return until(lambda: [*{*processes_of(one.marker)} - known])[0]

    module = driver(TORCH)
    module.run(("python", "-m", "nodekit.training", "--task", "no.such.task:Task"))
    pid = waiting(module)
    until(lambda: own_memory_kb(pid) > 6000)
    until(lambda: "pipe" in processes.where_it_waits(pid)[1], what="its start")
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1, "no thread that a fork of it would lack"
    script = driver(TORCH)
    script.start(script.script(UP))
    pid = waiting(script)
    until(lambda: "pipe" in processes.where_it_waits(pid)[1], what="its start")
    assert own_memory_kb(pid) < 5000


def test_where_torch_is_for_gpus_the_rehearsal_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass would, and the process would have them whatever CUDA_VISIBLE_DEVICES its start has."""
    import torch

    made: list[int] = []
    monkeypatch.setattr(torch.nn, "Conv2d", lambda *_: made.append(1) or torch.nn.Identity())
    for cuda, expected in ((None, [1]), ("13.0", [])):
        made.clear()
        monkeypatch.setattr(torch.version, "cuda", cuda)
        rehearse(["--task", "digits", "--no-such-option"])
        assert made == expected


def test_a_relative_python_path_starts_afresh(driver: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere:lib")
    one = driver([])
    one.script("print('found')", "lib/only_there.py")
    assert one.run(one.script("import only_there")) == [(0, "found\n")]
    assert one.call("fresh") == {"0": "PYTHONPATH has a relative entry"}


def test_a_fork_finds_what_has_come_since_the_server_looked(
    driver: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that was not there, one that has another time of change by now, and one that has the same."""
    folders = [driver([]).folder.with_name(name) for name in ("absent", "changed", "same")]
    for folder in folders[1:]:
        folder.mkdir()
    os.utime(folders[1], (0, 0))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    one = driver(["no_such_module"])  # which is looked for in all folders
    was = folders[2].stat()
    for number, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        (folder / f"since{number}.py").touch()
    os.utime(folders[2], ns=(was.st_atime_ns, was.st_mtime_ns))
    assert one.run(one.script("import since0, since1, since2; print('found')")) == [(0, "found\n")]
    assert one.call("fresh") == {}


def test_the_server_is_deaf_to_signals_for_the_whole_group(driver: Drivers) -> None:
    one = driver([])
    assert one.server
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(one.server, number)
    assert one.run(one.script("print('said')")) == [(0, "said\n")]
    assert one.call("fresh") == {}


def test_a_server_is_not_forked_from_a_process_with_threads() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="before any thread"):
            ForkServer.start([])
    finally:
        done.set()
        thread.join()


def test_a_worker_may_be_read_by_its_agent_and_what_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Yama (Ubuntu) wants it said; a kernel without it answers EINVAL, which is no matter."""
    asked: list[tuple[int, int]] = []

    class Libc:
        def prctl(self, option: int, value: ctypes.c_ulong, *rest: int) -> int:
            assert (option, rest) == (0x59616D61, (0, 0, 0)), "PR_SET_PTRACER, and zeros"
            asked.append((option, value.value))
            return -1

    monkeypatch.setattr(worker, "_libc", Libc())
    worker.be_read_by(4711)
    assert asked == [(0x59616D61, 4711)]
