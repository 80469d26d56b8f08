"""Good inventories: what each key means, what is filled in, and that examples, schema and records agree."""

import ast
import json
import os
import subprocess
import sys
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nodekit.inventory import hostlists
from nodekit.inventory.errors import InventoryError
from nodekit.inventory.fields import Nodes, run_time_minutes
from nodekit.inventory.load import changed, dump, example_names, example_path, load_inventory, restore
from nodekit.inventory.schema import Host, Inventory, Job, json_schema

EXAMPLES = ["lab", "local", "slurm"]


def loaded(folder: Path, text: str, name: str = "lab.yaml", **options: Any) -> Inventory:
    file = folder / name
    file.write_text(text)
    return load_inventory(file, **options)


def test_a_name_alone_makes_a_host_with_every_default(tmp_path: Path) -> None:
    inventory = loaded(tmp_path, "hosts:\n  gpu1:\n")

    assert inventory.name == "lab"
    assert inventory.path == tmp_path / "lab.yaml"
    assert inventory.nodes == Nodes(1, 1)
    assert inventory.network is None
    assert inventory.slurm is None
    assert inventory.hosts == (
        Host(name="gpu1", address="gpu1", connection="ssh", python="python3", workdir="~/nodekit"),
    )
    assert inventory.job == Job(command=None, code=".", secrets=(), nproc_per_node=None, max_restarts=3)


def test_a_local_host_has_this_python_and_the_loopback_address(tmp_path: Path) -> None:
    (host,) = loaded(tmp_path, "hosts: {n: {connection: local}}").hosts

    assert (host.python, host.address, host.connection) == (sys.executable, "127.0.0.1", "local")


def test_two_local_hosts_may_share_an_address(tmp_path: Path) -> None:
    assert len(loaded(tmp_path, "connection: local\nhosts: {a: , b: }").hosts) == 2


def test_the_design_page_inventory_loads_as_it_stands(tmp_path: Path) -> None:
    inventory = loaded(
        tmp_path,
        """\
name: lab
user: train
workdir: ~/nodekit
python: ~/venv/bin/python
nodes: 2:4
network: 10.0.0.0/24
hosts:
  gpu1: {address: 10.0.0.11, gpus: 8}
  gpu[2-4]: {gpus: [0, 1, 2, 3], interface: ib0}
job:
  command: [train.py, --epochs, "3"]
  code: .
  env: {NCCL_IB_DISABLE: "1"}
  secrets: [WANDB_API_KEY]
""",
    )

    assert inventory.nodes == Nodes(2, 4)
    assert inventory.network == ip_network("10.0.0.0/24")
    assert [(host.name, host.address, host.gpus, host.interface) for host in inventory.hosts] == [
        ("gpu1", "10.0.0.11", 8, None),
        *((f"gpu{n}", f"gpu{n}", (0, 1, 2, 3), "ib0") for n in (2, 3, 4)),
    ]
    assert {(host.user, host.python) for host in inventory.hosts} == {("train", "~/venv/bin/python")}
    assert inventory.job == Job(
        command=("train.py", "--epochs", "3"), env={"NCCL_IB_DISABLE": "1"}, secrets=("WANDB_API_KEY",)
    )


@pytest.mark.parametrize(
    ("written", "nodes"),
    [
        ("1:30", Nodes(1, 30)),
        ("2:4", Nodes(2, 4)),
        ("'2:4'", Nodes(2, 4)),
        ("3", Nodes(3, 3)),
        ("", Nodes(30, 30)),
    ],
)
def test_unquoted_nodes_are_no_base_60_number(tmp_path: Path, written: str, nodes: Nodes) -> None:
    assert loaded(tmp_path, f"nodes: {written}\nhosts:\n  n[1-30]:\n").nodes == nodes


@pytest.mark.parametrize(
    "word", ["on", "off", "yes", "no", "y", "n", "2024-01-01", "1:30", "1_000", "=", "a b", "~/x"]
)
def test_words_of_yaml_1_1_stay_text(tmp_path: Path, word: str) -> None:
    inventory = loaded(tmp_path, f"hosts: {{n: {{env: {{on: {word}}}}}}}")

    assert inventory.hosts[0].env == {"on": word}


def test_host_names_that_look_like_numbers_stay_as_written(tmp_path: Path) -> None:
    inventory = loaded(tmp_path, "hosts:\n  007:\n  1e3:\n  yes:\n  null:\n")

    assert [host.name for host in inventory.hosts] == ["007", "1e3", "yes", "null"]


def test_hosts_override_the_defaults_at_the_top_and_env_merges(tmp_path: Path) -> None:
    text = """\
user: top
port: 22
python: /top
workdir: /top
gpus: 1
interface: eth0
connection: local
env: {A: top, B: top}
hosts:
  same:
  other:
    {user: own, port: 2222, python: /own, workdir: /own, gpus: [1], interface: ib0, connection: ssh,
     env: {B: own}}
"""
    same, other = loaded(tmp_path, text).hosts

    top = {"user": "top", "port": 22, "python": "/top", "workdir": "/top", "gpus": 1, "interface": "eth0"}
    own = {"user": "own", "port": 2222, "python": "/own", "workdir": "/own", "gpus": (1,), "interface": "ib0"}
    same_env, other_env = {"A": "top", "B": "top"}, {"A": "top", "B": "own"}
    assert same == Host.model_validate(
        {**top, "name": "same", "address": "127.0.0.1", "connection": "local", "env": same_env}
    )
    assert other == Host.model_validate(
        {**own, "name": "other", "address": "other", "connection": "ssh", "env": other_env}
    )


def test_key_files_are_relative_to_the_inventory(own_home: Path, tmp_path: Path) -> None:
    text = "known_hosts: keys/known hosts\nhosts:\n  a: {identity_file: ~/id}\n  b: {known_hosts: /etc/k}\n"
    a, b = loaded(tmp_path, text).hosts

    assert a.known_hosts == str(tmp_path / "keys/known hosts")
    assert a.identity_file == str(own_home / "id")
    assert b.known_hosts == "/etc/k"


def test_an_environment_that_is_an_interpreter_is_the_python_of_the_hosts(tmp_path: Path) -> None:
    inventory = loaded(
        tmp_path, "environment: {python: ~/venv/bin/python}\nhosts:\n  a:\n  b: {python: own}\n"
    )

    assert [host.python for host in inventory.hosts] == ["~/venv/bin/python", "own"]
    assert inventory.environment is None, "nothing is to be made"


def test_files_of_an_environment_are_relative_to_the_inventory(own_home: Path, tmp_path: Path) -> None:
    text = "environment: {requirements: r.txt, find_links: [wheels, ~/w, 'https://h/w']}\nhosts: {a: }\n"
    environment = loaded(tmp_path, text).environment

    assert environment is not None
    assert environment.requirements == str(tmp_path / "r.txt")
    assert environment.find_links == (str(tmp_path / "wheels"), str(own_home / "w"), "https://h/w")


def test_a_record_has_no_password_of_an_index(tmp_path: Path) -> None:
    text = """\
environment:
  requirements: r.txt
  index_url: https://me:p@ss@index.lan/simple
  extra_index_url: ["https://${USER_X}:${TOKEN_X}@more.lan", "https://token@third.lan/x"]
  find_links: ["https://me:p4ss@links.lan/"]
hosts: {a: }
"""
    inventory = loaded(tmp_path, text)
    assert inventory.environment is not None
    assert inventory.environment.index_url == "https://me:p@ss@index.lan/simple"

    recorded = dump(inventory)["environment"]
    assert recorded["index_url"] == "https://index.lan/simple"
    assert recorded["extra_index_url"] == ["https://${USER_X}:${TOKEN_X}@more.lan", "https://third.lan/x"]
    assert recorded["find_links"] == ["https://links.lan/"]
    assert restore(dump(inventory)).environment is not None


def test_hostlists_keep_order_and_pair_with_addresses(tmp_path: Path) -> None:
    text = 'hosts:\n  gpu[3,1-2]: {address: "10.0.0.[14,11-12]"}\n  "b,a": {address: "fd00::[1-2]"}\n'
    hosts = loaded(tmp_path, text).hosts

    assert [(host.name, host.address) for host in hosts] == [
        ("gpu3", "10.0.0.14"),
        ("gpu1", "10.0.0.11"),
        ("gpu2", "10.0.0.12"),
        ("b", "fd00::1"),
        ("a", "fd00::2"),
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[01-02,20]", ["gpu01", "gpu02", "gpu20"]),
        ("n[1-2]-[8,7].lan", ["n1-8.lan", "n2-8.lan", "n1-7.lan", "n2-7.lan"]),
        ("a[0-4/2]", ["a0", "a2", "a4"]),
        ("b, a[1-2]", ["b", "a1", "a2"]),
        ("fd00::1", ["fd00::1"]),
        ("fe80::1%eth0", ["fe80::1%eth0"]),
    ],
)
def test_a_hostlist_stands_for_these_names(text: str, names: list[str]) -> None:
    assert sorted(hostlists.expand(text)) == sorted(names)
    assert hostlists.expand(text)[0] == names[0]


@pytest.mark.parametrize("text", ["a[1-10000]", "a[1-20000/2]", "a[1-9999],b"])
def test_a_hostlist_may_be_of_ten_thousand(text: str) -> None:
    assert len(hostlists.expand(text)) == hostlists.MAX_HOSTS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a[1-", "a bracket is not closed or not opened"),
        ("a]", "a bracket is not closed or not opened"),
        ("a[3-1]", "the range 3-1 runs backwards"),
        ("a[01-100]", "the range 01-100 mixes lengths: write 001-100"),
        ("a[x]", "in brackets go numbers and ranges, and 'x' is neither"),
        ("a[]", "in brackets go numbers and ranges, and '' is neither"),
        ("a,,b", "a comma has no name beside it"),
        ("a[0-10000]", "it stands for more than 10,000 hosts"),
        ("a[0-20000/2]", "it stands for more than 10,000 hosts"),
        ("a[1-999999999]", "it stands for more than 10,000 hosts"),
        ("[1-200][1-200]", "it stands for more than 10,000 hosts"),
        ("a" + "[0,1,2,3,4,5,6,7,8,9]" * 9, "it stands for more than 10,000 hosts"),
        ("root@a", "the user goes under user:"),
        ("a:22", "the port goes under port:"),
        *(
            (bad, "letters, digits")
            for bad in ["", "-oProxyCommand=x", "a b", "a;b", "a'b", "$HOME", "a\nb", "a!b", "é"]
        ),
    ],
)
def test_a_wrong_hostlist_says_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011, the message is compared below
        hostlists.expand(text)
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize("name", ["a b", "a'; echo foo", "$HOME", "ünï", '"q"', "x" * 48])
def test_names_and_arguments_with_spaces_and_quotes_arrive_exactly(tmp_path: Path, name: str) -> None:
    text = json.dumps(
        {"name": name, "hosts": {"n": {"workdir": f"~/{name}"}}, "job": {"command": [name, ""], "code": name}}
    )
    inventory = loaded(tmp_path, text, f"{name}.yaml")

    assert inventory.name == name
    assert inventory.hosts[0].workdir == f"~/{name}"
    assert inventory.job.command == (name, "")
    assert inventory.job.code == name
    assert loaded(tmp_path, "hosts: {n: {}}", f"{name}.yaml").name == name


def test_sections_left_empty_are_as_if_absent(tmp_path: Path) -> None:
    text = "user:\nenv:\nhosts:\n  a: {gpus: , env: }\njob:\nslurm:\nnodes:\n"

    assert loaded(tmp_path, text) == loaded(tmp_path, "hosts: {a: }")
    assert loaded(tmp_path, "hosts: {a: }\njob: {code: , command: , max_restarts: }").job == Job()


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = """\
hosts:
  a: &big {gpus: 8, port: 1}
  b: *big
  c: {<<: *big, port: 2}
  d: {<<: [{port: 3}, *big]}
"""

    assert [(host.gpus, host.port) for host in loaded(tmp_path, text).hosts] == [
        (8, 1),
        (8, 1),
        (8, 2),
        (8, 3),
    ]


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    assert loaded(tmp_path, "\ufeffhosts:\r\n  a:\r\n").hosts[0].name == "a"


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    overrides = {"nodes": "1:2", "job.command": ["a b.py", "'"], "job.max_restarts": 0}
    inventory = loaded(
        tmp_path, "nodes: 3\nhosts: {a[1-3]: }".replace("a[1-3]", '"a[1-3]"'), overrides=overrides
    )

    assert inventory.nodes == Nodes(1, 2)
    assert inventory.job == Job(command=("a b.py", "'"), max_restarts=0)


def test_slurm_settings_are_kept_with_the_settings_at_the_top(tmp_path: Path) -> None:
    text = """\
python: /opt/python
env: {A: b}
slurm:
  {nodes: 2:4, partition: p, gpus_per_node: 4, mem_gb: 1.5, time: 1-02:03:04, exclude: "n[1-2]", array: 0-3%2,
   setup: [module load x], extra: {licenses: m, requeue: true, nice: 5, tres-per-node: x}, login: me@login}
"""
    inventory = loaded(tmp_path, text)

    assert inventory.hosts == ()
    assert inventory.nodes == Nodes(2, 4)
    assert inventory.defaults.python == "/opt/python"
    assert inventory.defaults.env == {"A": "b"}
    assert inventory.slurm is not None
    assert inventory.slurm.time_min == 1440 + 2 * 60 + 3 + 1
    assert inventory.slurm.extra == {"licenses": "m", "requeue": True, "nice": 5, "tres_per_node": "x"}
    assert inventory.slurm.shared_dir == "~/nodekit"


@pytest.mark.parametrize(
    ("written", "minutes"), [(90, 90), ("01:30:00", 90), ("2-00:00:00", 2880), ("0:00:01", 1)]
)
def test_a_run_time_is_so_many_minutes(written: int | str, minutes: int) -> None:
    assert run_time_minutes(written) == minutes


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_inventory_survives_its_record(name: str) -> None:
    inventory = load_inventory(example_path(name))
    record = json.loads(json.dumps(dump(inventory)))

    assert restore(record) == inventory
    assert dump(restore(record)) == record
    assert changed(record, inventory) == []


def test_what_has_changed_since_a_record_is_named(tmp_path: Path) -> None:
    record = dump(loaded(tmp_path, "hosts: {a: }\njob: {env: {A: x}}\n"))
    again = loaded(tmp_path, "hosts: {a: , b: }\nnotify: {command: [mail]}\njob: {env: {A: y}}\n")
    assert changed(record, again) == ["nodes", "hosts", "job.env", "notify"]
    del record["job"]["env"], record["notify"]  # as of an older kit
    assert changed(record, again) == ["nodes", "hosts"]


def test_a_record_that_is_no_inventory_is_refused() -> None:
    with pytest.raises(InventoryError, match="the run's record of its inventory cannot be read"):
        restore({"name": "x"})


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_valid_for_editors(name: str) -> None:
    text = example_path(name).read_text()

    assert text.startswith("# yaml-language-server: $schema=./schema.json\n")
    written = yaml.load(text.replace("nodes: 2:4", "nodes: '2:4'"), yaml.SafeLoader)
    jsonschema.Draft202012Validator(json_schema()).validate(written)


@pytest.mark.parametrize(
    "written",
    [
        {"hosts": {"a": None}},
        {"hosts": {"a": {"gpus": [0, 1]}}, "job": None, "nodes": "2:4", "slurm": None},
        {"slurm": {"nodes": 2, "extra": {"a": True}}, "network": "10.0.0.0/24"},
        {"hosts": {"a": {"gpu": 1}}},
        {"hosts": {"a": None}, "prot": 1},
        {"hosts": {"a": None}, "nodes": "4:"},
        {"hosts": {"a": None}, "nodes": {"min": 1, "max": 1}},
        {"hosts": {"a": None}, "port": "22"},
        {"hosts": {"a": None}, "env": {"A": 1}},
        {"hosts": {"a": None}, "env": {"1A": "x"}},
        {"hosts": {"a": None}, "job": {"cmd": []}},
        {"hosts": {"a": None}, "job": {"command": []}},
        {"hosts": {"a": None}, "slurm": {"nodes": 1}},
        {"hosts": {"a": None}, "network": "10.0.0.1"},
        {"hosts": {"a": {"gpus": [1, 1]}}},
        {"hosts": {"a": None}, "environment": {"requirements": "r.txt", "lock": None, "offline": True}},
        {"hosts": {"a": None}, "environment": {"requirements": "r.txt", "lock": "uv.lock"}},
        {"hosts": {"a": None}, "environment": {"extras": ["x"]}},
        {"hosts": {}},
        {"slurm": {}},
        {},
    ],
)
def test_editors_and_kit_agree_on_a_file(tmp_path: Path, written: dict[str, Any]) -> None:
    valid = jsonschema.Draft202012Validator(json_schema()).is_valid(written)
    if "slurm" not in written and valid and "nodes" in written:
        written["nodes"] = 1
    try:
        loaded(tmp_path, json.dumps(written).replace('"2:4"', '"1:1"'))
        accepted = True
    except InventoryError:
        accepted = False
    assert accepted == valid


def test_every_key_of_the_schema_is_described() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for model in (schema, *schema["$defs"].values()):
        assert [key for key, field in model["properties"].items() if not field.get("description")] == []


def test_the_schema_file_is_up_to_date() -> None:
    written = example_path("lab").with_name("schema.json").read_text()
    current = json.dumps(json_schema(), indent=2) + "\n"
    assert written == current, "write it again: kit schema > inventory/schema.json"


def test_the_examples_are_found_by_name() -> None:
    assert list(example_names()) == EXAMPLES
    with pytest.raises(InventoryError) as raised:
        example_path("lap")
    assert str(raised.value) == "lap: no such example, wanted one of lab, local, slurm"


def test_reading_the_folder_imports_nothing_heavy() -> None:
    code = "import sys, nodekit.inventory.load; print([m for m in sys.modules if m.split('.')[0] in %r])"
    heavy = ["yaml", "pydantic", "ClusterShell", "torch", "fabric"]
    answer = subprocess.run(
        [sys.executable, "-c", code % heavy], capture_output=True, text=True, check=True, timeout=60
    )
    assert ast.literal_eval(answer.stdout) == []


def test_an_inventory_is_read_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my lab.yaml").write_text("hosts: {a: }")
    monkeypatch.chdir(tmp_path)

    assert load_inventory("my lab.yaml").path == Path(os.getcwd()) / "my lab.yaml"  # noqa: PTH109
