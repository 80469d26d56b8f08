"""Exports for other tools: read back by those tools where they are here, and run where they can be."""

import json
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import warm_python
import yaml
from free_ports import free_port
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from test_plan import gpus_there

from nodekit.deploy.commands.cli import main
from nodekit.deploy.export import export, export_compose, export_formats, export_script
from nodekit.deploy.export.export_formats import File
from nodekit.deploy.export.export_script import Source
from nodekit.deploy.plan.check import Facts, Interface
from nodekit.deploy.plan.command import argv_of
from nodekit.deploy.plan.plan import Plan, build
from nodekit.inventory import ansible, importers
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory

SECRET = "s3cr3t-value"
HARD_ARGS = [
    "a b", "it's", '"q"', "$HOME", "$$", "${local_rank}", "; rm", "new\nline", "ünï ✓", "", "--lr=1", "*", "--", "\\",
    "[0]=x", "~", "!x", "%h", "#",
]  # fmt: skip
GPUS = """
name: big lab
user: train
network: 10.0.0.0/24
nodes: 3
env: {NCCL_DEBUG: WARN}
hosts:
  gpu1: {address: 10.0.0.11, gpus: 8, port: 2222, identity_file: my key}
  gpu[2-3]: {address: "10.0.0.[12-13]", gpus: [0, 1, 2, 3], known_hosts: known}
  spare: {address: 10.0.0.20, gpus: 8}
job: {command: [train.py, --name, "it's $HOME"], secrets: [TOKEN], env: {NOTE: "a $b\\n"}}
"""


def source(folder: Path, text: str = GPUS, command: Sequence[str] = ()) -> Source:
    folder.mkdir(exist_ok=True)
    (folder / "lab.yaml").write_text(text)
    return Source(
        inventory=load_inventory(folder / "lab.yaml"), command=tuple(command) or None, made="kit 0 on a day"
    )


def planned(of: Source, *, interfaces: Mapping[str, str] | None = None, gpus: bool = True) -> Plan:
    """The plan on hosts as they might be found."""
    facts = {
        host.name: Facts(
            host=host.name,
            hostname=host.name,
            user="train",
            python="3.11.7",
            executable="/opt/my venv/bin/python",
            torch="2.13.0",
            modules=(),
            clock_offset_s=0.0,
            cpus=8,
            interfaces=(
                Interface((interfaces or {}).get(host.name, "eth0"), True, (f"10.0.0.{11 + number}",)),
            ),
            routes={},
            gpus=gpus_there(8 if gpus else 0),
            workdir="/home/train/node kit",
            workdir_id=host.name,
            workdir_problem=None,
            free_bytes=1 << 40,
            rsync=True,
            boot_id=host.name,
        )
        for number, host in enumerate(of.inventory.hosts)
    }
    return build(
        of.inventory,
        facts,
        run_id="big lab-1",
        peers=dict.fromkeys(facts, ()),
        master_port=29500,
        kit_digest="abc",
        command=of.command,
    )


def text_of(files: Sequence[File], name: str) -> str:
    (found,) = [file.text for file in files if file.name == name]
    return found


# --- hostfile, ansible --------------------------------------------------------------------------------------


def test_a_hostfile_is_what_deepspeed_and_mpirun_read(tmp_path: Path) -> None:
    of = source(tmp_path)
    assert export_formats.slots_of(of.inventory) == {"gpu1": 8, "gpu2": 4, "gpu3": 4}
    (file,) = export_formats.hostfile(of, {"gpu1": 8, "gpu2": 4, "gpu3": 4})
    deepspeed = pytest.importorskip("deepspeed.launcher.runner")
    assert deepspeed._parse_hostfile(file.text.splitlines()) == {
        "10.0.0.11": 8,
        "10.0.0.12": 4,
        "10.0.0.13": 4,
    }
    assert file.text.startswith(
        "# The hosts, one a line, and how many processes each takes.\n"
        f"# Written by kit 0 on a day, from {tmp_path}/lab.yaml\n#\n"
    )
    assert "mpirun --hostfile hostfile -np 16 " in file.text
    assert "-H 10.0.0.11:8,10.0.0.12:4,10.0.0.13:4 " in file.text
    assert "not in here, as the job takes 3: spare\n" in file.text
    # What ssh must be told is as ssh reads it.
    config = tmp_path / "config"
    told = file.text.partition("the inventory says:\n")[2].partition("#   spares")[0]
    config.write_text("".join(line.removeprefix("#") + "\n" for line in told.splitlines()))
    read = subprocess.run(
        ["ssh", "-G", "-F", str(config), "10.0.0.11"], text=True, capture_output=True, check=True
    ).stdout
    assert {"user train", "port 2222", f"identityfile {tmp_path}/my key"} <= set(read.splitlines())


@pytest.mark.parametrize(
    ("text", "slots", "lines"),
    [
        ("hosts: {a: {gpus: 0}, b: {gpus: 2}}", {"a": 1, "b": 2}, ["a slots=1", "b slots=2"]),
        (
            "hosts: {a: , bcd: }\njob: {nproc_per_node: 3}",
            {"a": 3, "bcd": 3},
            ["a   slots=3", "bcd slots=3"],
        ),
        ("hosts: {a: , b: {gpus: 2}}", None, None),
        ("connection: local\nhosts: {a: {gpus: 1}, b: {gpus: 2}}", {"a": 1, "b": 2}, ["localhost slots=3"]),
        (
            "hosts: {a: {address: h, port: 1, gpus: 1}, b: {address: h, port: 2, gpus: 1}}",
            {"a": 1, "b": 1},
            ["a slots=1", "b slots=1"],
        ),
    ],
)
def test_slots_are_taken_from_the_inventory_where_it_has_them(
    text: str, slots: dict[str, int] | None, lines: list[str] | None, tmp_path: Path
) -> None:
    of = source(tmp_path, text)
    assert export_formats.slots_of(of.inventory) == slots
    if slots is not None:
        (file,) = export_formats.hostfile(of, slots)
        assert [line for line in file.text.splitlines() if not line.startswith("#")] == lines


class _Loader(yaml.SafeLoader):
    """YAML with Ansible's own tag."""


_Loader.add_constructor("!unsafe", lambda loader, node: ("unsafe", loader.construct_scalar(node)))


def test_an_ansible_inventory_has_what_ssh_needs_and_templates_are_none(tmp_path: Path) -> None:
    text = """
user: train
name: 2 labs
hosts:
  gpu1: {address: 10.0.0.11, port: 2222, identity_file: "/k/{{x}}", known_hosts: /k/known, python: ~/venv/bin/python}
  gpu2: {}
  here: {connection: local, python: /usr/bin/python3}
"""
    (file,) = export_formats.ansible(source(tmp_path, text))
    found = yaml.load(file.text, _Loader)
    assert found == {
        "all": {
            "children": {
                "_2_labs": {
                    "hosts": {
                        "gpu1": {
                            "ansible_host": "10.0.0.11",
                            "ansible_user": "train",
                            "ansible_port": 2222,
                            "ansible_ssh_private_key_file": ("unsafe", "/k/{{x}}"),
                            "ansible_ssh_common_args": "-o 'UserKnownHostsFile=\"/k/known\"'",
                            "ansible_python_interpreter": "~/venv/bin/python",
                        },
                        "gpu2": {"ansible_host": "gpu2", "ansible_user": "train"},
                        "here": {
                            "ansible_connection": "local",
                            "ansible_python_interpreter": "/usr/bin/python3",
                        },
                    }
                }
            }
        }
    }
    assert (
        "#   use     ansible -i hosts.yaml _2_labs -m ping\n#   python  Ansible 2.19 does not replace ~"
        in file.text
    )


def test_what_was_exported_is_read_back_by_kit_init(tmp_path: Path) -> None:
    of = source(tmp_path)
    (file,) = export_formats.hostfile(of, {"gpu1": 8, "gpu2": 4, "gpu3": 4})
    found = importers.hostfile(file.text, "hostfile")
    assert [(host.name, host.slots) for host in found.hosts] == [
        ("10.0.0.11", 8),
        ("10.0.0.12", 4),
        ("10.0.0.13", 4),
    ]
    (file,) = export_formats.ansible(of)
    found = ansible.read(file.text, "hosts.yaml")
    assert [(host.name, host.address, host.user, host.port, host.identity_file) for host in found.hosts] == [
        (host.name, host.address, host.user, host.port, host.identity_file) for host in of.inventory.hosts
    ]
    assert not found.notes


# --- accelerate, deepspeed ----------------------------------------------------------------------------------


def test_accelerate_loads_each_nodes_file(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    of = source(tmp_path, GPUS.replace("gpus: 8", "gpus: [4, 5, 6, 7]"))
    files = export_formats.accelerate(planned(of), of)
    assert [file.name for file in files] == ["gpu1.yaml", "gpu2.yaml", "gpu3.yaml"]
    for rank, file in enumerate(files):
        path = tmp_path / file.name
        path.write_text(file.text)
        found = load_config_from_file(str(path)).to_dict()
        wanted = {
            "distributed_type": "MULTI_GPU",
            "use_cpu": False,
            "num_machines": 3,
            "num_processes": 12,
            "machine_rank": rank,
            "main_process_ip": "10.0.0.11",
            "main_process_port": 29500,
            "rdzv_backend": "static",
            "same_network": True,
            "mixed_precision": "no",
            "gpu_ids": "4,5,6,7" if rank == 0 else "0,1,2,3",
        }
        assert {key: found[key] for key in wanted} == wanted
        assert "export GLOO_SOCKET_IFNAME=eth0\n" in file.text
        assert "export NOTE=$'a $b\\n'\n" in file.text
        assert "export TOKEN=…" in file.text
    with pytest.raises(KitError, match=r"differ \(gpu1 8, gpu2 4, gpu3 4\); set job.nproc_per_node"):
        export_formats.accelerate(planned(source(tmp_path)), source(tmp_path))


def deepspeeds_env(file: Path) -> dict[str, str]:
    """What deepspeed makes of the file: it has a shell on each host read it, before the command."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    runner = PDSHRunner.__new__(PDSHRunner)
    runner.exports = {}
    with file.open() as lines:
        for line in lines.readlines():
            runner.add_export(*line.split("=", maxsplit=1))
    exports = "".join(f"export {key}={value}; " for key, value in runner.exports.items())
    shown = subprocess.run(
        ["sh", "-c", f"{exports} env -0"], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True
    )
    return dict(each.decode().split("=", 1) for each in shown.stdout.split(b"\0") if each)


def test_deepspeed_gives_the_variables_and_the_arguments_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    of = source(
        tmp_path / "it's", GPUS.replace("NCCL_DEBUG: WARN", "{NCCL_DEBUG: WARN, A: 'x y;&', B: a%hb}"[1:-1])
    )
    plan = planned(of, interfaces={"gpu2": "eno1"})
    here = replace(plan.nodes[1], local_addr="127.0.0.1")
    files = export_formats.deepspeed(Plan(plan.run_id, (plan.nodes[0], here, *plan.nodes[2:])), of)
    folder = tmp_path / "a 'folder' $x"
    export.write(files, "deepspeed", folder)
    env = deepspeeds_env(folder / ".deepspeed_env")
    assert env["NCCL_SOCKET_IFNAME"] == "=eth0,eno1"
    assert env["GLOO_SOCKET_IFNAME"] == "lo", "each host finds its own"
    assert (env["NCCL_DEBUG"], env["A"]) == ("WARN", "x y;&")
    text = text_of(files, "run.sh")
    for name in ("NOTE", "B", "NODEKIT_SNAPSHOT_DIR"):
        assert name not in env
        assert re.search(rf"without .*\b{name}\b", text)
    assert "'it'\"'\"'s $HOME'\n" in text.partition("beware")[2].partition("set -eu")[0]
    # And the command is what `deepspeed` on PATH is called with.
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path / "bin/deepspeed", tmp_path / "said")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    subprocess.run([str(folder / "run.sh")], check=True)
    argv, env = said(tmp_path / "said")
    assert argv == [
        "--hostfile", f"{folder}/hostfile", "--master_addr", "10.0.0.11", "--master_port", "29500", "--no_local_rank",
        "train.py", "--name", "it's $HOME",
    ]  # fmt: skip
    assert env["DS_ENV_FILE"] == f"{folder}/.deepspeed_env"


def test_deepspeed_is_not_given_a_folder_that_only_one_host_has(tmp_path: Path) -> None:
    of = source(tmp_path, command=["train.py", "--name={run_id}", "--out={snapshot_dir}"])
    with pytest.raises(
        KitError, match=r"one command, and \{snapshot_dir\} or \{node\} in this one is another"
    ):
        export_formats.deepspeed(planned(of), of)
    same = replace(of, command=("train.py", "--name={run_id}"))
    assert "--name=big lab-1" in text_of(export_formats.deepspeed(planned(same), same), "run.sh")


@settings(max_examples=60)
@given(
    values=st.lists(st.text("ab \t'\"$`\\\\%!~=;&|<>(){}*?#\r\n\x01üé\u2028\udcff", max_size=8), max_size=4)
)
def test_no_variable_reaches_deepspeeds_shell_that_it_would_read_otherwise(
    values: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    of = source(tmp_path)
    env = {f"VALUE{number}": value for number, value in enumerate(values)}
    plan = planned(of)
    nodes = tuple(replace(node, env={**node.env, **env}) for node in plan.nodes)
    files = export_formats.deepspeed(Plan(plan.run_id, nodes), of)
    (tmp_path / "env").write_text(text_of(files, ".deepspeed_env"), encoding="utf-8")
    found = deepspeeds_env(tmp_path / "env")
    for name, value in env.items():
        if name in found:
            assert found[name] == value
        else:
            assert re.search(rf"without .*\b{name}\b", text_of(files, "run.sh"))
            assert re.search(r"[^\w;&|<>(){}*?#~=' ]|^ | $", value, re.ASCII), "no more than must be left out"


# --- compose ------------------------------------------------------------------------------------------------


def test_a_compose_file_has_a_service_for_each_host_and_reads_back_exactly(tmp_path: Path) -> None:
    of = source(tmp_path, GPUS, ["job.py", *HARD_ARGS])
    (file,) = export_compose.compose(of, run_id="run-1", kit_digest="abc")
    found = yaml.safe_load(file.text)
    assert list(found["services"]) == ["gpu1", "gpu2", "gpu3"]
    assert found["name"] == "big-lab"
    assert list(found["volumes"])[:3] == ["gpu1-snapshots", "gpu1-output", "gpu2-snapshots"]
    subnet = found["networks"]["job"]["ipam"]["config"][0]["subnet"]
    assert subnet == "10.222.0.0/24"
    for rank, service in enumerate(found["services"].values()):
        assert service["networks"]["job"]["ipv4_address"] == f"10.222.0.{11 + rank}"
        env = {name: value and value.replace("$$", "$") for name, value in service["environment"].items()}
        assert env["TOKEN"] is None  # from docker compose's own environment
        assert (env["NOTE"], env["NCCL_DEBUG"]) == ("a $b\n", "WARN")
        assert (env["GLOO_SOCKET_IFNAME"], env["NODE_RANK"]) == ("eth0", str(rank))
        folders = {each["target"] for each in service["volumes"]}
        assert folders == {"/code", env["NODEKIT_SNAPSHOT_DIR"], env["NODEKIT_OUTPUT_DIR"]}, (
            "docker makes them"
        )
        assert {each["source"] for each in service["volumes"][1:]} <= found["volumes"].keys()
        words = [word.replace("$$", "$") for word in service["command"]]
        read = torchrun_reads(words)
        assert read.pop("argv") == ["job.py", *HARD_ARGS]
        assert read == {
            "nnodes": "3",
            "node_rank": rank,
            "nproc_per_node": "8" if rank == 0 else "4",
            "master_addr": "10.222.0.11",
            "master_port": 29500,
            "local_addr": f"10.222.0.{11 + rank}",
            "max_restarts": 3,
            "rdzv_backend": "static",
        }
        assert all(isinstance(value, str) for value in [*service["command"], *service["entrypoint"]])
    gpus = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in found["services"].values()
    ]
    assert [index for own in gpus for index in own] == [str(number) for number in range(16)]
    assert SECRET not in file.text


@pytest.mark.parametrize("text", ["1e-3", "1e5", "5E10", "1.5e3", ".5e2", "1_0e5", "0o755"])
def test_what_is_a_number_for_docker_compose_alone_is_written_as_text(tmp_path: Path, text: str) -> None:
    (file,) = export_compose.compose(
        source(tmp_path, GPUS, ["job.py", text]), run_id="run-1", kit_digest="abc"
    )
    assert f"      - '{text}'\n" in file.text
    assert yaml.safe_load(file.text)["services"]["gpu1"]["command"][-1] == text


# --- shell --------------------------------------------------------------------------------------------------


def stand_in(path: Path, output: Path) -> Path:
    """A program that writes down how it was called: its arguments and its environment, as the kernel has them."""
    path.write_text(
        f"#!{sys.executable} -IS\n"
        "for name, skipped in ('cmdline', 3), ('environ', 0):\n"
        "    with open(f'/proc/self/{name}', 'rb') as file:\n"
        "        parts = file.read().split(b'\\0')[skipped:-1]\n"
        f"    with open({str(output)!r} + '.' + name, 'wb') as file:\n"
        "        file.write(b'\\0'.join([*parts, b'']))\n"
    )
    path.chmod(0o755)
    return path


def said(output: Path) -> tuple[list[str], dict[str, str]]:
    argv, env = (Path(f"{output}.{name}").read_bytes().split(b"\0")[:-1] for name in ("cmdline", "environ"))
    pairs = [each.partition(b"=")[::2] for each in env]
    assert len(dict(pairs)) == len(pairs)
    return list(map(os.fsdecode, argv)), {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


def torchrun_reads(words: Sequence[str]) -> dict[str, Any]:
    """What torchrun itself makes of its arguments: its options, and what it would start as rank 7 of its node."""
    from torch.distributed.elastic.utils import macros
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(list(words))
    argv = [args.training_script, *args.training_script_args]
    if args.no_python:
        argv = [argv[0], *macros.substitute(argv[1:], "7")]
    else:
        argv = macros.substitute([*(["-m"] if args.module else []), *argv], "7")
    names = [
        "nnodes",
        "node_rank",
        "nproc_per_node",
        "master_addr",
        "master_port",
        "local_addr",
        "max_restarts",
    ]
    return {"argv": argv, **{name: getattr(args, name) for name in [*names, "rdzv_backend"]}}


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20) | st.binary(
    max_size=8
).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
TRAPS = [
    "PATH",
    "IFS",
    "BASH_ENV",
    "UID",
    "LC_ALL",
    "PYTHONPATH",
    "KIT_ENV",
    "KIT_CODE",
    "ENV",
    "SHELLOPTS",
    "_",
]
NAMES = st.sampled_from(TRAPS) | st.text(
    string.ascii_letters + string.digits + "_", min_size=1, max_size=8
).filter(lambda name: not name[0].isdigit())


@settings(max_examples=60)
@given(
    argv=st.lists(TEXT, max_size=6),
    start=st.sampled_from([("train.py",), ("-m", "pkg.mod"), ("python", "-c"), ("it's $x.py",)])
    | st.tuples(TEXT),
    env=st.dictionaries(NAMES, TEXT, max_size=5),
    elastic=st.booleans(),
    locale=st.sampled_from(["C", "C.UTF-8"]),
)
@example(
    argv=HARD_ARGS,
    start=("job.py",),
    env={"UID": "7", "IFS": "x", "A": "\x01\x7f\\'\udcff"},
    elastic=False,
    locale="C",
)
@example(argv=[], start=("train.py",), env={"PYTHONPATH": ""}, elastic=False, locale="C")
@example(argv=["a=b"], start=("A=b",), env={"BASHOPTS": "x", "PATH": "/"}, elastic=True, locale="C.UTF-8")
def test_a_script_gives_exactly_the_arguments_and_the_environment(
    argv: list[str],
    start: tuple[str, ...],
    env: dict[str, str],
    elastic: bool,
    locale: str,
    tmp_path: Path,
) -> None:
    of = source(tmp_path, GPUS.replace("nodes: 3", "nodes: 1:4" if elastic else "nodes: 3"))
    command = (*start, *argv)
    assume(not command[0].startswith("-") or command[0] == "-m")
    assume(command[0])
    plan = planned(of)
    python = tmp_path / "my python"
    stand_in(python, tmp_path / "said")
    (tmp_path / "code").mkdir(exist_ok=True)
    wanted = argv_of(of.inventory, command)
    node = replace(
        plan.nodes[1],
        argv=wanted,
        secrets=("TOKEN",),
        python=str(python),
        code_dir=f"{tmp_path}/code",
        env={
            **plan.nodes[1].env,
            "NODEKIT_SNAPSHOT_DIR": f"{tmp_path}/snap shots",
            "NODEKIT_OUTPUT_DIR": f"{tmp_path}/output",
            **env,
        },
    )
    if "\0" in "".join(command):
        return
    file = tmp_path / "script.sh"
    file.write_text(export_script.script(node, plan, of), encoding="utf-8")
    inherited = {"PATH": os.environ["PATH"], "TOKEN": SECRET, "KEPT": "as it is", "LANG": locale}
    subprocess.run(["bash", str(file)], env=inherited, check=True)
    words, found = said(tmp_path / "said")
    assert words[:2] == ["-m", "torch.distributed.run"]
    read = torchrun_reads(words[2:])
    expected = list(wanted)
    if expected[0] == "python":
        native = expected[1:2] == ["-u"] and (expected[2] == "-m" or not expected[2].startswith("-"))
        expected = expected[2:] if native else [str(python), *expected[1:]]
    assert read["argv"] == expected
    assert read["nnodes"] == ("1:4" if elastic else "3")
    own = {**inherited, **node.env, "PYTHONUNBUFFERED": "1", **env}
    extra = {"NODE_RANK": "1"} if not elastic else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    own = {
        **extra,
        **own,
        "PYTHONPATH": node.kit_dir + (f":{env['PYTHONPATH']}" if env.get("PYTHONPATH") else ""),
    }
    for name in {"PWD", "OLDPWD", "SHLVL", "_"} - env.keys():  # bash's own
        found.pop(name, None)
    assert found == own
    assert SECRET not in file.read_text()


def test_a_script_says_what_is_missing_before_it_runs_anything(tmp_path: Path) -> None:
    of = source(tmp_path)
    (tmp_path / "code").mkdir()
    node = replace(planned(of).nodes[0], python="/bin/false", code_dir=str(tmp_path / "code"))
    file = tmp_path / "script.sh"
    file.write_text(export_script.script(node, planned(of), of))

    def run(**env: str) -> subprocess.CompletedProcess[str]:
        given = {"PATH": os.environ["PATH"], **env}
        return subprocess.run(["bash", str(file)], env=given, capture_output=True, text=True, check=False)

    done = run()
    assert (done.returncode, done.stderr) == (1, "TOKEN is not set: export TOKEN=… and run this again\n")
    done = run(TOKEN="x", KIT_CODE=f"{tmp_path}/no such")
    assert done.returncode == 1
    assert f"no code in {tmp_path}/no such: see the top of this script\n" in done.stderr
    assert f"/ train@10.0.0.11:{node.code_dir}/\n" in file.read_text()


@pytest.mark.parametrize(
    ("command", "env", "problem"),
    [
        (["--version"], {}, "'--version' is no program"),
        (["train.py", "a\0b"], {}, "the command: 'a\\x00b' has a character that no program can be given"),
        (["train.py"], {"A": "\ud800"}, "env.A: '\\ud800' has a character that no program can be given"),
    ],
)
def test_what_no_program_can_be_given_is_refused(
    command: list[str], env: dict[str, str], problem: str, tmp_path: Path
) -> None:
    of = source(tmp_path, command=command)
    plan = planned(of)
    node = replace(plan.nodes[0], env=env)
    with pytest.raises(KitError, match=re.escape(problem)):
        export_script.script(node, plan, of)


# --- the command --------------------------------------------------------------------------------------------

JOB = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
with open(os.environ["SAYS"] + "." + os.environ["RANK"], "w") as file:
    json.dump([int(total), dict(os.environ), sys.argv[1:], os.getcwd()], file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job and two nodes of this machine, kit's working folder."""
    folder = tmp_path / "my 'project' $HOME"
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    inventory = {
        "connection": "local",
        "workdir": str(tmp_path / "node kit"),
        "hosts": {"node1": None, "node2": None},
        "job": {
            "command": ["job.py", *HARD_ARGS],
            "secrets": ["TOKEN"],
            "env": {"SAYS": str(tmp_path / "says"), "NOTE": "a\n$b"},
        },
    }
    (folder / "local.yaml").write_text(yaml.safe_dump(inventory))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TOKEN", SECRET)
    return folder


def run_both(commands: Sequence[Sequence[str]], **options: Any) -> None:
    processes = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        for argv in commands
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


@pytest.mark.slow
def test_two_scripts_train_together_as_kit_up_would_have_it(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["export", "local.yaml", "--to", "shell", "-o", "my scripts", "--port", str(free_port())]
    assert main(args) == 0
    assert "'my scripts': node1.sh, node2.sh; how to use it" in capsys.readouterr().out
    for file in Path("my scripts").iterdir():
        assert SECRET not in file.read_text()
    code = re.search(r"^# +(rsync .*)$", Path("my scripts/node1.sh").read_text(), re.MULTILINE)
    assert code, "how the code gets there"
    (site / ".kitignore").write_text("token*\n")
    (site / "token.txt").write_text(SECRET)
    copied = subprocess.run([*shlex.split(code.group(1)), "-v"], check=True, capture_output=True, text=True)
    assert "job.py" in copied.stdout
    assert "token.txt" not in copied.stdout, "what kit does not send"
    run_both([[str(site / "my scripts" / f"node{number}.sh")] for number in (1, 2)], cwd="/")
    for rank in (0, 1):
        total, env, argv, cwd = json.loads((tmp_path / f"says.{rank}").read_text())
        assert (total, argv) == (2, HARD_ARGS)
        assert cwd.startswith(f"{tmp_path}/node kit/runs/local-")
        assert (env["NODE_RANK"], env["WORLD_SIZE"], env["TOKEN"], env["NOTE"]) == (
            str(rank),
            "2",
            SECRET,
            "a\n$b",
        )
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert Path(env["NODEKIT_SNAPSHOT_DIR"]).stat().st_mode & 0o777 == 0o700
        assert f"/node{rank + 1}/" in env["NODEKIT_SNAPSHOT_DIR"], "ranks are in the inventory's order"


@pytest.mark.slow
def test_accelerate_launches_what_was_exported_for_it(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert main(["export", "local.yaml", "--to", "accelerate", "-o", "a", "--port", str(free_port())]) == 0
    commands = []
    for number in (1, 2):
        text = (Path("a") / f"node{number}.yaml").read_text()
        lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
        exports = [line for line in lines if line.startswith("export ")]
        (launch,) = [line for line in lines if line.startswith("accelerate launch ")]
        launch = launch.replace(f"node{number}.yaml", f"a/node{number}.yaml").removeprefix(
            "accelerate launch"
        )
        start = shlex.join([warm_python.program(), "-m", "accelerate.commands.launch"]) + launch
        commands.append(["bash", "-c", "\n".join([*exports, start])])
    run_both(commands, env={**os.environ, **warm_python.environment()})
    for rank in (0, 1):
        total, env, argv, _ = json.loads((tmp_path / f"says.{rank}").read_text())
        assert (total, argv, env["NOTE"]) == (2, HARD_ARGS, "a\n$b")


def test_one_file_goes_to_stdout_and_several_one_after_the_other(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "local.yaml", "--to", "ansible"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["all"]["children"]["local"]["hosts"]["node2"] == {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
    }
    (site / "other.py").write_text("")
    assert main(["export", "local.yaml", "--to", "hostfile", "--", "other.py"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nlocalhost slots=2\n"), "no GPU here; the hosts were asked"
    assert main(["export", "local.yaml", "--to", "deepspeed"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^==> (.*) <==$", out, re.MULTILINE) == ["hostfile", ".deepspeed_env", "run.sh"]
    assert SECRET not in out


@pytest.mark.parametrize(
    ("text", "arguments", "problem"),
    [
        ("slurm: {nodes: 2}", ["--to", "shell"], "found slurm, wanted hosts: only --to sbatch"),
        ("hosts: {a: }", [], "found hosts, wanted slurm for sbatch; for hosts there is --to shell"),
        ("hosts: {a: }", ["--to", "shell", "--port", "0"], "--port: found 0, wanted a port from 1 to 65535"),
        ("hosts: {a: }", ["--to", "ansible", "-o", "/proc/x"], "/proc/x: cannot be written: "),
    ],
)
def test_what_cannot_be_exported_is_refused(
    text: str, arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.yaml").write_text(text)
    assert main(["export", str(tmp_path / "lab.yaml"), *arguments]) == 1
    assert problem in capsys.readouterr().err
