"""Bad inventories: each message in full, all of a file's at once, and never another exception."""

# ruff: noqa: E501  # tables of whole messages

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nodekit.inventory.errors import InventoryError
from nodekit.inventory.load import dump, example_path, load_inventory, restore

TOP_KEYS = (
    "connection, env, environment, gpu_model, gpus, hosts, identity_file, interface, job, known_hosts, logs, name, network, nodes, "
    "notify, port, python, slurm, snapshots, timings, user, workdir"
)
HOST_KEYS = "address, connection, env, gpu_model, gpus, identity_file, interface, known_hosts, port, python, user, workdir"
JOB_KEYS = "code, command, env, max_restarts, nproc_per_node, on_nan, on_slow, secrets, start"
SLURM_KEYS = (
    "account, array, constraint, cpus_per_task, exclude, extra, gpus_per_node, login, max_requeues, mem_gb, nodes, partition, "
    "qos, setup, shared_dir, srun_args, time"
)
HOSTLIST = "a host's name or a hostlist, as gpu[01-16,20]"
NAME = "letters, digits, '.', '-' and '_' make a name, and it starts with no '-' or '.'"
GPUS = "how many GPUs, as 4, or which, as [0, 1]"
NODES = "how many nodes, as 4, or the fewest and most, as 2:4"
FOLDER_NAME = "a name fit for folders: at most 48 characters, no '/', and no '.' or '-' in front"
RUN_TIME = "minutes, as 90, or [D-]HH:MM:SS, as 1-12:00:00"
SECRET = "only the name of a variable: its value is taken from your environment"
HOSTS = "a line for each host, as gpu1: {gpus: 8}, or gpu1: alone"
CONTROL = "wanted text without it"


def told(folder: Path, text: str, name: str = "lab.yaml", **options: Any) -> list[str]:
    """The lines of the error, without the folder."""
    (folder / name).write_text(text)
    with pytest.raises(InventoryError) as raised:
        load_inventory(folder / name, **options)
    return str(raised.value).replace(f"{folder}/", "").split("\n")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("name: a/b", f'name: found "a/b", wanted {FOLDER_NAME}'),
        ("name: -x", f'name: found "-x", wanted {FOLDER_NAME}'),
        ("name: ..", f'name: found "..", wanted {FOLDER_NAME}'),
        ('name: "a "', f'name: found "a ", wanted {FOLDER_NAME}'),
        ("name: 5", f'name: found 5, wanted {FOLDER_NAME}: write "5"'),
        (f"name: {'x' * 49}", f'name: found "{"x" * 49}", wanted {FOLDER_NAME}'),
        ("user: a b", 'user: found "a b", wanted a user\'s name, without spaces'),
        ("user: -oX", 'user: found "-oX", wanted a user\'s name, without spaces'),
        ('port: "22"', 'port: found "22", wanted a port from 1 to 65535'),
        ("port: 0", "port: found 0, wanted a port from 1 to 65535"),
        ("port: 65536", "port: found 65536, wanted a port from 1 to 65535"),
        ("port: true", "port: found true, wanted a port from 1 to 65535"),
        ("port: 22.0", "port: found 22.0, wanted a port from 1 to 65535"),
        ("python: 3.11", 'python: found 3.11, wanted text: write "3.11"'),
        ("workdir: work", 'workdir: found "work", wanted a folder on the host, as ~/nodekit or /scratch/me'),
        (
            "snapshots: {shared: ~/x}",
            'snapshots.shared: found "~/x", wanted a folder on all hosts by its full path, as /mnt/shared/snapshots',
        ),
        ("identity_file: [a]", 'identity_file: found ["a"], wanted text'),
        ("connection: SSH", 'connection: found "SSH", wanted ssh or local'),
        ("gpus: -1", f"gpus: found -1, wanted {GPUS}"),
        ("gpus: 1.5", f"gpus: found 1.5, wanted {GPUS}"),
        ("gpus: all", f'gpus: found "all", wanted {GPUS}'),
        ("gpus: []", f"gpus: found [], wanted {GPUS}"),
        ("gpus: [0, x]", f'gpus: found [0, "x"], wanted {GPUS}'),
        ("gpus: [0, 0]", "gpus: found [0, 0], wanted each GPU once"),
        (
            "interface: eth0,eth1",
            'interface: found "eth0,eth1", wanted the name of one network interface, as eth0',
        ),
        ("interface: ^lo", 'interface: found "^lo", wanted the name of one network interface, as eth0'),
        ("env: [A]", 'env: found ["A"], wanted a mapping: key: value lines'),
        ("env: {A: 1}", 'env.A: found 1, wanted text: write "1"'),
        ("env: {A: 007}", 'env.A: found 007, wanted text: write "007"'),
        ("env: {A: 1e3}", 'env.A: found 1e3, wanted text: write "1e3"'),
        ("env: {A: True}", 'env.A: found True, wanted text: write "True"'),
        ("env: {A: }", 'env.A: found nothing, wanted text: write ""'),
        ("env: {A: {B: C}}", "env.A: found a mapping, wanted text"),
        ("env: {1A: x}", 'env.1A: found "1A", wanted a variable\'s name: letters, digits and _'),
        ("env: {A B: x}", 'env.A B: found "A B", wanted a variable\'s name: letters, digits and _'),
        ("network: 10.0.0.1", 'network: found "10.0.0.1", wanted a network as address/bits, as 10.0.0.0/24'),
        (
            "network: 10.0.0.0/33",
            'network: found "10.0.0.0/33", wanted a network as address/bits, as 10.0.0.0/24',
        ),
        ("network: 7", "network: found 7, wanted a network as address/bits, as 10.0.0.0/24"),
        (
            "network: 10.0.0.5/24",
            'network: found "10.0.0.5/24", wanted a network, which for this address is 10.0.0.0/24',
        ),
        ("nodes: 2-4", f'nodes: found "2-4", wanted {NODES}'),
        ("nodes: 0", f"nodes: found 0, wanted {NODES}"),
        ("nodes: 0:2", f'nodes: found "0:2", wanted {NODES}'),
        ("nodes: [1, 2]", f"nodes: found [1, 2], wanted {NODES}"),
        ("nodes: 2:1", 'nodes: found "2:1", wanted the smaller number first, as 1:2'),
        ("nodes: 1:3", "nodes: found 1:3, wanted at most 1: there is 1 host"),
        ("prot: 22", f"prot: found an unknown key, wanted port (valid here: {TOP_KEYS})"),
        ("NETWORK: x", f"NETWORK: found an unknown key, wanted network (valid here: {TOP_KEYS})"),
        ("command: [a]", f"command: found an unknown key, wanted job.command (valid here: {TOP_KEYS})"),
        ("zzz: 1", f"zzz: found an unknown key, wanted one of {TOP_KEYS}"),
        ('"a\\tb": 1', f'"a\\tb": found an unknown key, wanted one of {TOP_KEYS}'),
        ("? [a]\n: 1", "found a list or mapping for a key, wanted text (in quotes if it has a bracket)"),
        ("user: !me x", "user: found the tag !me, wanted a value without one"),
        ("port: !!int x", 'port: found "x", wanted a value of the kind int'),
        (f"port: {'9' * 5000}", f'port: found "{"9" * 79}…", wanted a value of the kind int'),
        ('user: "a\\0b"', f"user: found the character U+0000, {CONTROL}"),
        ('user: "a\\ud800"', f"user: found the character U+D800, {CONTROL}"),
        ("<<: 3", "<<: found no mapping, wanted one to merge in, as *name"),
        (
            "job: {code: ~no-such-user/x}",
            'job.code: found "~no-such-user/x", wanted a folder here: this machine has no such user',
        ),
        ("job: 3", "job: found 3, wanted a mapping: key: value lines"),
        ("job: {comand: [a]}", f"job.comand: found an unknown key, wanted command (valid here: {JOB_KEYS})"),
        ("job: {command: []}", "job.command: found [], wanted at least one item"),
        (
            "job: {command: train.py --name 'a b' 3}",
            "job.command: found \"train.py --name 'a b' 3\", wanted a list: "
            'write ["train.py", "--name", "a b", "3"]',
        ),
        ('job: {command: "a \' b"}', 'job.command: found "a \' b", wanted a list: write ["a", "\'", "b"]'),
        ("job: {command: [a, 3]}", 'job.command[1]: found 3, wanted text: write "3"'),
        ("job: {command: {a: b}}", "job.command: found a mapping, wanted a list"),
        ("job: {code: 1}", 'job.code: found 1, wanted text: write "1"'),
        ("job: {secrets: KEY}", 'job.secrets: found "KEY", wanted a list: write ["KEY"]'),
        ("job: {secrets: [KEY=hunter2]}", f"job.secrets[0]: found text that is no name, wanted {SECRET}"),
        ("job: {nproc_per_node: 0}", "job.nproc_per_node: found 0, wanted a whole number, 1 or more"),
        ("job: {max_restarts: -1}", "job.max_restarts: found -1, wanted a whole number, 0 or more"),
        (
            "job: {port: 1}",
            f"job.port: found an unknown key, wanted port at the top of the file (valid here: {JOB_KEYS})",
        ),
        (
            "timings: {keepalive: 1}",
            "timings.keepalive: found an unknown key, wanted keep_alive (valid here: collective, environment, "
            "hang, keep_alive, last_call, lost_after, wait)",
        ),
        (
            "environment: {}",
            "environment: found none of python, requirements, pyproject, lock, wanted one of them, as requirements: requirements.txt",
        ),
        (
            "environment: {requirements: a, lock: b}",
            "environment: found requirements beside lock, wanted one of them, as requirements: requirements.txt",
        ),
        (
            "environment: {requirements: a, extras: [x]}",
            "environment.extras: found beside requirements, wanted beside pyproject or lock: a requirements file has none",
        ),
        (
            "environment: {requirements: a, no_index: true}",
            "environment.no_index: found without find_links, wanted both",
        ),
        (
            'environment: {requirements: a, index_url: "me:s3cr3t@index.lan"}',
            "environment.index_url: found something else, wanted an index's URL, as https://pypi.org/simple",
        ),
        (
            "environment: {python: x, offline: true}",
            "environment.offline: found beside python, wanted it beside requirements, pyproject or lock: nothing is installed",
        ),
        ("environment: {requirements: a, offline: 1}", "environment.offline: found 1, wanted true or false"),
        ("timings: {wait: 0}", "timings.wait: found 0, wanted seconds, a number above 0"),
        (
            "timings: {hang: soon}",
            'timings.hang: found "soon", wanted auto, never, or seconds, a number above 0',
        ),
        ("logs: {keep: 500}", "logs.keep: found 500, wanted a size from 1MB on, as 500MB or 2GB"),
        ("logs: {keep: 0GB}", 'logs.keep: found "0GB", wanted a size from 1MB on, as 500MB or 2GB'),
        (
            "logs: {fetched: true}",
            "logs.fetched: found an unknown key, wanted fetch (valid here: fetch, keep)",
        ),
        (
            "snapshots: {share: /x}",
            "snapshots.share: found an unknown key, wanted shared (valid here: copies, every, shared)",
        ),
        (
            "snapshots: {every: often}",
            'snapshots.every: found "often", wanted auto, or seconds, a number above 0',
        ),
        ("job: {start: fork}", 'job.start: found "fork", wanted forkserver or spawn'),
        (
            "job: {secrets: [A], env: {A: x}}",
            "job.env.A: found among job.secrets too, wanted in one of the two "
            "(a secret's value is not written here)",
        ),
        ("slurm: {nodes: 1}", "slurm: found beside hosts, wanted one of the two"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_what_was_wanted(
    tmp_path: Path, written: str, problem: str
) -> None:
    assert told(tmp_path, f"hosts:\n  gpu1:\n{written}\n") == [f"lab.yaml:3: {problem}"]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("gpu1: {gpu: 1}", f"hosts.gpu1.gpu: found an unknown key, wanted gpus (valid here: {HOST_KEYS})"),
        ("gpu1: {nodes: 1}", f"hosts.gpu1.nodes: found an unknown key, wanted nodes at the top of the file (valid here: {HOST_KEYS})"),
        ("gpu1: 3", "hosts.gpu1: found 3, wanted a mapping: key: value lines"),
        ("gpu1: {env: {A: 1}}", 'hosts.gpu1.env.A: found 1, wanted text: write "1"'),
        ("gpu1: {address: 10.0.0.1:22}", f'hosts.gpu1.address: found "10.0.0.1:22", wanted {HOSTLIST} (the port goes under port:)'),
        ("gpu1: {address: a@b}", f'hosts.gpu1.address: found "a@b", wanted {HOSTLIST} (the user goes under user:)'),
        ("gpu1: {address: 7}", f'hosts.gpu1.address: found 7, wanted {HOSTLIST}: write "7"'),
        ("gpu1:\n    address: a[1-3]", "hosts.gpu1.address: found 3 addresses, wanted 1 for gpu1"),
        ("gpu[1-3]: {address: a}", "hosts.gpu[1-3].address: found 1 address, wanted 3 for gpu[1-3]"),
        ("me@gpu1:", f'hosts.me@gpu1: found "me@gpu1", wanted {HOSTLIST} (the user goes under user:)'),
        ("-x:", f'hosts.-x: found "-x", wanted {HOSTLIST} ({NAME})'),
        ("a b:", f'hosts.a b: found "a b", wanted {HOSTLIST} ({NAME})'),
        ('"":', f'hosts."": found "", wanted {HOSTLIST}'),
        ("n[1-:", f'hosts.n[1-: found "n[1-", wanted {HOSTLIST} (a bracket is not closed or not opened)'),
        ("n[1,1]:", f'hosts.n[1,1]: found "n[1,1]", wanted {HOSTLIST} (it has a name twice)'),
        ("n[1-2]!n[1-2]:", f'hosts.n[1-2]!n[1-2]: found "n[1-2]!n[1-2]", wanted {HOSTLIST} (it has no name)'),
        ("n[1-99999]:", f'hosts.n[1-99999]: found "n[1-99999]", wanted {HOSTLIST} (it stands for more than 10,000 hosts)'),
    ],
)  # fmt: skip
def test_a_mistake_in_a_host_is_told(tmp_path: Path, written: str, problem: str) -> None:
    line = 4 if "\n" in written else 3
    assert told(tmp_path, f"user: me\nhosts:\n  {written}\n  other:\n") == [f"lab.yaml:{line}: {problem}"]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("slurm: {nodes: 1, gpus: 1}", f"slurm.gpus: found an unknown key, wanted gpus_per_node (valid here: {SLURM_KEYS})"),
        ("slurm: {partition: a}", f"slurm.nodes: found no nodes, wanted {NODES}"),
        ("slurm: {nodes: 1, time: 1:30}", f'slurm.time: found "1:30", wanted {RUN_TIME}'),
        ("slurm: {nodes: 1, time: 0}", f"slurm.time: found 0, wanted {RUN_TIME}"),
        ("slurm: {nodes: 1, mem_gb: 0}", "slurm.mem_gb: found 0, wanted a number of GB above 0"),
        ("slurm: {nodes: 1, mem_gb: .inf}", "slurm.mem_gb: found .inf, wanted a number of GB above 0"),
        ("slurm: {nodes: 1, mem_gb: 64G}", 'slurm.mem_gb: found "64G", wanted a number of GB above 0'),
        ("slurm: {nodes: 1, cpus_per_task: 0}", "slurm.cpus_per_task: found 0, wanted a whole number, 1 or more"),
        ("slurm: {nodes: 1, array: 5}", 'slurm.array: found 5, wanted indexes as sbatch --array takes them, as 0-15%4: write "5"'),
        ("slurm: {nodes: 1, array: 5-3}", 'slurm.array: found "5-3", wanted a first index, a last one that is not below it, and a step from 1, and not 5-3'),
        ('slurm: {nodes: 1, array: "0-3:0"}', 'slurm.array: found "0-3:0", wanted a first index, a last one that is not below it, and a step from 1, and not 0-3:0'),
        ("slurm: {nodes: 1, array: 0-99999}", 'slurm.array: found "0-99999", wanted at most 10000 runs, and not 100000'),
        ("slurm: {nodes: 1, array: 0-3%0}", 'slurm.array: found "0-3%0", wanted one job or more at once, after %'),
        ("slurm: {nodes: 1, setup: module load x}", 'slurm.setup: found "module load x", wanted a list: write ["module load x"]'),
        ("slurm: {nodes: 1, extra: {a: [1]}}", "slurm.extra.a: found [1], wanted text, a number, true or false"),
        ("slurm: {nodes: 1, login: a b}", 'slurm.login: found "a b", wanted a login node, as user@login.example.org'),
        ("slurm: {nodes: 1}\ngpus: 1", "gpus: found beside slurm, wanted slurm.gpus_per_node"),
        (
            "slurm: {nodes: 1}\njob: {on_slow: drain}",
            "job.on_slow: found drain beside slurm, which keeps its nodes, wanted tell",
        ),
        ("slurm: {nodes: 1}\nnodes: 1", "nodes: found beside slurm, wanted slurm.nodes"),
        ("slurm: {nodes: 1, extra: {array: 0-1}}", "slurm.extra.array: found below extra, wanted slurm.array"),
        ("slurm: {nodes: 1, extra: {wait: true}}", "slurm.extra.wait: found below extra, wanted none: kit needs its own"),
        ("slurm: {nodes: 1, extra: {signal: USR1@60}}", "slurm.extra.signal: found below extra, wanted slurm.extra.signal_delay_s (seconds before the time limit): the signal is kit's"),
        ("slurm: {nodes: 1, extra: {clusters: b}}", "slurm.extra.clusters: found below extra, wanted none: set SLURM_CLUSTERS, which squeue, scontrol and scancel follow, too"),
        ("slurm: {nodes: 1, extra: {ntasks-per-node: 2}}", "slurm.extra.ntasks_per_node: found below extra, wanted none: kit needs its own"),
        ("slurm: {nodes: 1, extra: {error: e.log}}", "slurm.extra.error: found below extra, wanted none: kit needs its own"),
        ("slurm: {nodes: 1, extra: {test-only: true}}", "slurm.extra.test_only: found below extra, wanted none: kit needs its own"),
        ("slurm: {nodes: 1}\nworkdir: /x", "workdir: found beside slurm, wanted slurm.shared_dir"),
        ("slurm: {nodes: 1}\nconnection: ssh", "connection: found beside slurm, wanted none: Slurm reaches its nodes itself"),
        ("slurm:", "found neither hosts nor slurm, wanted one of the two, as hosts: {gpu1: {}} or slurm: {nodes: 2}"),
        ("hosts: {}", f"hosts: found an empty mapping, wanted {HOSTS}"),
        ("hosts: [a, b]", f'hosts: found ["a", "b"], wanted {HOSTS}'),
    ],
)  # fmt: skip
def test_a_mistake_in_a_section_is_told(tmp_path: Path, written: str, problem: str) -> None:
    line = 1 + written.count("\n")
    assert told(tmp_path, written) == [f"lab.yaml:{line}: {problem}"]


@pytest.mark.parametrize(
    ("written", "line", "problem"),
    [
        ("a:\n\tb: 1\n", 2, "found a tab, wanted spaces: YAML indents with spaces only"),
        ("user: @x", 1, "found a value that starts with @, wanted quotes around it"),
        ("user: *.x", 1, "found a value that starts with * or &, wanted quotes around it"),
        ("hosts:\n  gpu1\n  gpu2:\n", 3, "found a ':' where none can be, wanted a ':' after the key above it, the same indentation as its neighbours, or quotes around a value that holds ': '"),
        ("hosts:\n  - a: 1\n    b\n", 4, "found a key without ': ' after it, wanted key: value"),
        ('name: a\nuser: "x\nport: 3\n', 2, "found a quote that is not closed, wanted its end"),
        ('user: "a" b', 1, "found more text after a quote or bracket was closed, wanted quotes around the whole value"),
        ("a:\n  b: 1\n c: 2\n", 3, "found a line whose indentation fits none above it, wanted that of its neighbours"),
        ("- a\nb: 1\n", 2, "found keys and list items side by side, wanted one of either"),
        ("hosts:\n  a: {gpus: 1\n  b:\n", 2, "found no end, or an item without ',', wanted a '}' (and quotes around a value that holds a bracket)"),
        ("gpus: [1\nport: 2\n", 1, "found no end, or an item without ',', wanted a ']' (and quotes around a value that holds a bracket)"),
        ("hosts: *big", 1, "found *big, wanted an anchor &big further up"),
        ("a: &x 1\nb: &x 1", 2, "found the anchor &x again, wanted one of a kind"),
        ("a: 1\n---\nb: 1", 2, "found a second document, wanted one (without '---')"),
        ('a: "\\q"', 1, "found \\q in double quotes, wanted single quotes or \\\\q"),
        ("a: b\nc: \x07", 2, "found the character U+0007, wanted text"),
        ("a: ]", 1, "found what is no YAML (expected the node content, but found ']'), wanted key: value lines"),
        ("a: &a [*a]", 1, "found an anchor that holds itself, wanted one that ends"),
        ("a: &a {<<: *a}", 1, "found an anchor that holds itself, wanted one that ends"),
        ("[" * 5000, 1, "found brackets or lists nested too deep to read"),
    ],
)  # fmt: skip
def test_what_is_no_yaml_is_told_with_what_to_look_at(
    tmp_path: Path, written: str, line: int, problem: str
) -> None:
    assert told(tmp_path, written) == [f"lab.yaml:{line}: {problem}"]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("", "an empty file"),
        ("# only this\n", "an empty file"),
        ("- a\n", '["a"]'),
        ("gpu1", '"gpu1"'),
        ("7", "7"),
    ],
)
def test_a_file_without_keys_is_shown_an_example(tmp_path: Path, written: str, found: str) -> None:
    assert told(tmp_path, written) == [
        f"lab.yaml:1: found {found}, wanted key: value lines, as in {example_path('lab')}"
    ]


def test_every_mistake_of_a_file_is_told_at_once_in_its_order(tmp_path: Path) -> None:
    text = """\
prot: 22
nodes: 1:9
network: ten
hosts:
  gpu[1-2]: {address: h, gpus: 1}
  gpu[2-3]:
  gpu4: {gpus: x, port: 0}
  gpu4: {}
  a: {address: same}
  b: {address: SAME}
job:
  command: a
  env: {A: 1, S: s}
  secrets: [S]
"""
    again = "(a secret's value is not written here)"
    assert told(tmp_path, text) == [
        f"lab.yaml:1: prot: found an unknown key, wanted port (valid here: {TOP_KEYS})",
        "lab.yaml:2: nodes: found 1:9, wanted at most 7: there are 7 hosts",
        'lab.yaml:3: network: found "ten", wanted a network as address/bits, as 10.0.0.0/24',
        "lab.yaml:5: hosts.gpu[1-2].address: found 1 address, wanted 2 for gpu[1-2]",
        "lab.yaml:6: hosts.gpu[2-3]: found the host gpu2 again (first in gpu[1-2]), wanted it once",
        f'lab.yaml:7: hosts.gpu4.gpus: found "x", wanted {GPUS}',
        "lab.yaml:7: hosts.gpu4.port: found 0, wanted a port from 1 to 65535",
        "lab.yaml:8: hosts.gpu4: found again (first on line 7), wanted once",
        "lab.yaml:10: hosts.b.address: found b at SAME, the address and port of a, wanted one of its own",
        'lab.yaml:12: job.command: found "a", wanted a list: write ["a"]',
        'lab.yaml:13: job.env.A: found 1, wanted text: write "1"',
        f"lab.yaml:13: job.env.S: found among job.secrets too, wanted in one of the two {again}",
    ]


def test_a_mistake_does_not_bring_others_that_are_not_there(tmp_path: Path) -> None:
    text = "nodes: 3\nhosts:\n  a b:\n  c: {address: x, port: y}\n  d: {address: x}\n"
    assert [line.split(": ")[:2] for line in told(tmp_path, text)] == [
        ["lab.yaml:3", "hosts.a b"],
        ["lab.yaml:4", "hosts.c.port"],
    ]
    assert told(tmp_path, "hosts: {a: }\nslurm: {nodes: x}")[1:] == [
        f'lab.yaml:2: slurm.nodes: found "x", wanted {NODES}'
    ]


def test_what_is_missing_is_told_at_the_key_it_belongs_to(tmp_path: Path) -> None:
    assert told(tmp_path, "slurm:\n\n  partition: a\n") == [
        f"lab.yaml:1: slurm.nodes: found no nodes, wanted {NODES}"
    ]


def test_a_secret_may_not_stand_in_any_env(tmp_path: Path) -> None:
    text = "env: {S: a}\nhosts:\n  a: {env: {S: b}}\njob: {secrets: [S]}\n"
    assert [line.split(" found")[0] for line in told(tmp_path, text)] == [
        "lab.yaml:1: env.S:",
        "lab.yaml:3: hosts.a.env.S:",
    ]


def test_a_key_given_twice_is_told_with_both_lines(tmp_path: Path) -> None:
    assert told(tmp_path, "user: a\nhosts:\n  a:\nuser: a\n") == [
        "lab.yaml:4: user: found again (first on line 1), wanted once"
    ]


def test_a_mistake_in_an_anchor_is_told_once_where_it_stands(tmp_path: Path) -> None:
    text = "hosts:\n  a: &big\n    port: x\n  b: *big\n  c: {<<: *big, gpus: x}\n"
    assert told(tmp_path, text) == [
        'lab.yaml:3: hosts.a.port: found "x", wanted a port from 1 to 65535',
        f'lab.yaml:5: hosts.c.gpus: found "x", wanted {GPUS}',
    ]


def test_the_same_mistake_twice_on_a_line_is_told_twice(tmp_path: Path) -> None:
    assert told(tmp_path, "hosts: {a: {port: x}, b: {port: x}}") == [
        'lab.yaml:1: hosts.a.port: found "x", wanted a port from 1 to 65535',
        'lab.yaml:1: hosts.b.port: found "x", wanted a port from 1 to 65535',
    ]


def test_ten_lines_that_stand_for_a_billion_values_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert told(tmp_path, "\n".join(lines)) == ["lab.yaml:1: found over 100,000 values, wanted fewer aliases"]


def test_a_file_name_that_is_no_name_for_folders_asks_for_one(tmp_path: Path) -> None:
    assert told(tmp_path, "hosts: {a: }", "-x.yaml") == [f'-x.yaml:1: name: found "-x", wanted {FOLDER_NAME}']


def test_a_mistaken_override_is_told_as_the_command_lines(tmp_path: Path) -> None:
    text = "hosts: {a: }\njob: {max_restarts: x}\n"
    assert told(tmp_path, text, overrides={"nodes": "4", "job.nproc_per_node": 0}) == [
        "command line: job.nproc_per_node: found 0, wanted a whole number, 1 or more",
        "command line: nodes: found 4, wanted at most 1: there is 1 host",
        'lab.yaml:2: job.max_restarts: found "x", wanted a whole number, 0 or more',
    ]


def test_an_override_inside_a_mistaken_section_tells_the_section(tmp_path: Path) -> None:
    assert told(tmp_path, "hosts: {a: }\njob: 3\n", overrides={"job.command": ["a"]}) == [
        "lab.yaml:2: job: found 3, wanted a mapping: key: value lines"
    ]


LOCAL = "`local` is kit's own example, two nodes on this machine: kit up local"


def test_a_missing_file_names_the_ones_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InventoryError) as raised:
        load_inventory("lap.yaml")
    assert str(raised.value) == f"lap.yaml: no such file; {LOCAL}"

    for name in ["my lab.yaml", "b.yml", "notes.txt"]:
        (tmp_path / name).touch()
    with pytest.raises(InventoryError) as raised:
        load_inventory("lap.yaml")
    assert str(raised.value) == f"lap.yaml: no such file; there is b.yml, my lab.yaml; {LOCAL}"
    with pytest.raises(InventoryError) as raised:
        load_inventory(".")
    assert str(raised.value) == f".: found a folder, wanted a file; there is b.yml, my lab.yaml; {LOCAL}"
    with pytest.raises(InventoryError) as raised:
        load_inventory("b.yml/x")
    assert str(raised.value) == "b.yml/x: cannot be read: Not a directory"


def test_of_many_mistakes_the_first_are_told_and_how_many_more(tmp_path: Path) -> None:
    def told(number: int) -> list[str]:
        path = tmp_path / "lab.yaml"
        path.write_text("hosts:\n" + "".join(f"  gpu{each}: {{prot: 22}}\n" for each in range(number)))
        with pytest.raises(InventoryError) as raised:
            load_inventory(path)
        return str(raised.value).splitlines()

    assert len(told(20)) == 20
    assert "gpu19.prot: found an unknown key" in told(20)[-1]
    assert told(1000)[:19] == told(20)[:19]
    assert told(1000)[19:] == [f"{tmp_path}/lab.yaml: and 981 more mistakes"]


def test_a_file_that_is_far_too_long_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_bytes(b"#" * (1 << 20))
    with pytest.raises(InventoryError, match="found an empty file"):
        load_inventory(tmp_path / "lab.yaml")
    for path in (tmp_path / "lab.yaml", Path("/dev/zero")):
        if path.parent == tmp_path:
            path.write_bytes(b"#" * (1 << 20) + b"\n")
        with pytest.raises(InventoryError) as raised:
            load_inventory(path)
        assert str(raised.value) == f"{path}: found more than 1 MiB, wanted an inventory file"


def test_a_file_that_is_not_utf_8_is_told_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_bytes("hosts:\n  a:\nname: café\n".encode("latin-1"))
    with pytest.raises(InventoryError) as raised:
        load_inventory(tmp_path / "lab.yaml")
    assert str(raised.value) == f"{tmp_path}/lab.yaml:3: found the byte 0xe9, wanted UTF-8 text"


KEYS = [*f"{TOP_KEYS}, {HOST_KEYS}, {JOB_KEYS}, {SLURM_KEYS}".split(", "), "a", "n[1-3]", "<<"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
    [*KEYS, "2:4", "10.0.0.0/24", "a[1-", "~nobody/x", "\0", "1:30:00"]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def tables(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A few keys, of which some mean something there."""
    return st.dictionaries(st.sampled_from(KEYS), values, max_size=4)


FILES = tables(VALUES | tables(VALUES | tables(VALUES)))
MARKS = "ab:-?[]{},&*!|>'\"%@#~<=. \n\t\\0149\x00\x85\u2028é"
JUNK = st.text(alphabet=st.sampled_from(MARKS)) | st.text()


@settings(max_examples=400)
@given(text=JUNK | FILES.map(lambda data: yaml.dump(data, allow_unicode=True)) | FILES.map(json.dumps))
@example(text="a: !<")
@example(text="hosts: {a: {<<: [1]}}")
@example(text='gpus: ["\\ud800"]')
@example(text="a: 0x")
@example(text="a: 0o8")
@example(text="!!map [a]")
@example(text="!!seq {a: b}")
@example(text="!!float a")
@example(text="? !!binary x\n: 1")
@example(text="hosts: {a: }\nslurm: {nodes: 1, extra: {a: .nan}}")
def test_no_junk_raises_anything_but_an_inventory_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "lab.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        inventory = load_inventory(tmp_path / "lab.yaml")
    except InventoryError as error:
        for line in str(error).encode().decode().split("\n"):
            assert line.startswith(f"{tmp_path}/lab.yaml:"), line
            assert ("found" in line and "wanted" in line) or re.search(r": and \d+ more mistakes$", line), (
                line
            )
    else:
        assert restore(json.loads(json.dumps(dump(inventory)))) == inventory


@pytest.mark.parametrize("name", ["code", "slurm", "state", "code.tree.json"])
def test_a_host_is_not_called_as_a_folder_of_kits(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, f"hosts:\n  code.example.org:\n  {name}:\n") == [
        f"lab.yaml:3: hosts.{name}: found the host {name}, as kit calls a folder of its own (code, slurm, state), "
        f"wanted another name, as host-{name}: {{address: {name}}}"
    ]
