"""What a command runs: told as torchrun would, wherever the file lies, and refused where no host would have it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from test_plan import TWO_FACTS, build, facts, inventory

from nodekit.deploy.host import programs
from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.plan import check, script
from nodekit.deploy.plan.command import argv_of
from nodekit.inventory.errors import KitError

ONE = "hosts: {gpu1: }\n"
TRAIN = "import os\nprint(os.environ['RANK'])\n"


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("train.py", "", "python"),
        ("train", TRAIN, "python"),
        ("train", "#!/usr/bin/env python3\n" + TRAIN, "python"),
        ("train", "#!/opt/conda/bin/python2.7 -u\n" + TRAIN, "python"),
        ("train", "#!/bin/false\n" + TRAIN, "python"),
        ("train", "#!/bin/sh\n''''exec python3 -- \"$0\" \"$@\" # '''\n" + TRAIN, "python"),
        ("run.sh", "#!/bin/bash\nset -e\nexec python train.py\n", "program"),
        ("run", "#!/bin/bash\nnvidia-smi\n", "program"),
        ("run", "#!/usr/bin/env perl\nuse strict;\n", "program"),
        ("tool", "\x7fELF\x02\x01\x00", "program"),
        ("job.zip", "PK\x03\x04\x14\x00\x00", "python"),
    ],
)
def test_a_file_is_python_as_it_is_to_torchrun_whatever_its_name_and_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    assert programs.kind(name) == kind
    found = inventory(tmp_path, ONE)
    runs = ("python", "-u", name, "--lr") if kind == "python" else (f"./{name}", "--lr")
    assert argv_of(found, [name, "--lr"]) == runs
    assert argv_of(found, ["python", name, "--lr"]) == ("python", "-u", name, "--lr")


def test_a_folder_is_python_where_it_has_a_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    found = inventory(tmp_path, ONE)
    with pytest.raises(KitError, match=r"job is a folder without a __main__\.py"):
        script.find(found, ["python", "job"])
    (tmp_path / "job/__main__.py").write_text("import torch")
    assert argv_of(found, ["job"]) == ("python", "-u", "job")
    assert script.read(found, ["job"]).imports == ("torch",)


@pytest.mark.parametrize("locked", ["code", "code/sub", "code/sub/train.py"])
def test_what_may_not_be_read_is_not_taken_for_absent_or_for_a_folder(tmp_path: Path, locked: str) -> None:
    script_file = tmp_path / "code/sub/train.py"
    script_file.parent.mkdir(parents=True)
    script_file.write_text(TRAIN)
    (tmp_path / locked).chmod(0)
    found = inventory(tmp_path, f"{ONE}job: {{code: {tmp_path / 'code'}}}\n")
    folders = [tmp_path, *tmp_path.parents][:-2] if os.getuid() == 0 else []
    modes = {each: each.stat().st_mode for each in folders}
    for each in folders:  # root may read all: be somebody else meanwhile, who reaches this far
        each.chmod(0o755)
    os.seteuid(65534) if folders else None
    try:
        with pytest.raises(KitError, match=rf"{tmp_path}/code\S* cannot be read: Permission denied"):
            script.find(found, ["sub/train.py"])
    finally:
        os.seteuid(os.getuid())
        for each, mode in modes.items():
            each.chmod(mode)
        (tmp_path / locked).chmod(0o700)


def test_a_code_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    found = inventory(tmp_path, f"{ONE}job: {{code: {tmp_path / 'gone'}}}\n")
    for command in (None, ["train.py"], ["-m", "package"]):
        with pytest.raises(KitError, match=rf"{tmp_path}/gone cannot be read: No such file or directory"):
            script.find(found, command)


def test_an_absolute_path_is_what_the_hosts_say_it_is(tmp_path: Path) -> None:
    name = "/shared/train"
    found = {host: facts(host, *each.interfaces, files={name: "python"}) for host, each in TWO_FACTS.items()}
    built = build(
        inventory(tmp_path, "hosts: {gpu1: , gpu2: }\nnetwork: 10.0.0.0/24\n"), found, command=(name, "1")
    )
    assert {node.argv for node in built.nodes} == {("python", "-u", name, "1")}


@pytest.mark.parametrize(
    ("command", "asked", "refused"),
    [
        (["train.py"], (), ""),
        (["train.py", "../data"], (), ""),
        (["-m", "pkg.nope"], (), ""),
        (["src/../train.py"], (), ""),
        (["/opt/x/train.py"], ("/opt/x/train.py",), ""),
        (["/opt/x/bin/tool", "nope"], ("/opt/x/bin/tool",), ""),
        (["nope"], ("nope",), ""),
        (["bash", "run.sh"], ("bash",), ""),
        (["bash", "-c", "python nope.py"], ("bash",), ""),
        (["bash", "-lc", "nope.sh"], ("bash",), ""),
        (["bash", "-eo", "pipefail", "--rcfile", "x", "run.sh"], ("bash",), ""),
        (["sh", "-s", "nope"], ("sh",), ""),
        (["/bin/bash", "/opt/x/run.sh"], ("/bin/bash", "/opt/x/run.sh"), ""),
        (["python3", "-W", "ignore", "-X", "dev", "-Wcome", "train.py"], ("python3",), ""),
        (["python", "-c", "nope.py"], (), ""),
        (["env", "A=1", "nsys", "profile", "nope.py"], ("env", "nsys"), ""),
        (["nohup", "nice", "-n", "5", "bash", "run.sh"], ("nohup", "nice", "bash"), ""),
        (["numactl", "-N", "0", "bash", "nope.sh"], (), "no nope.sh in {code}"),
        (["nope.py"], (), "no nope.py in {code}, the folder that is synced; run kit from"),
        (["python", "nope"], (), "no nope in {code}"),
        (["./nope"], (), "no ./nope in {code}"),
        (["bash", "nope.sh"], (), "no nope.sh in {code}"),
        (["bash", "-x", "--", "nope.sh"], (), "no nope.sh in {code}"),
        (["python3", "-O", "nope.py"], (), "no nope.py in {code}"),
        (["env", "A=1", "bash", "nope.sh"], (), "no nope.sh in {code}"),
        (["../tools/x.py"], (), "../tools/x.py lies outside of {code}, the folder that is synced, and so would not be"),
        (["bash", "src/../../tools/x.sh"], (), "src/../../tools/x.sh lies outside of {code}"),
        (["../my code/train.py"], (), "../my code/train.py would be another file on the hosts; say train.py"),
        (["own.py"], (), "own.py is not sent to the hosts: .gitignore ignores it; write !own.* into {code}/.kitignore"),
        (["./plain.sh"], (), "./plain.sh is not executable; chmod +x ./plain.sh"),
    ],
)  # fmt: skip
def test_a_file_that_no_host_would_have_is_refused_and_what_only_the_hosts_know_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], asked: tuple[str, ...], refused: str
) -> None:
    code = tmp_path / "my code"
    (code / "src").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    monkeypatch.chdir(code)
    (code / ".gitignore").write_text("own.*\n")
    for name in ("train.py", "own.py", "run.sh", "plain.sh", "../tools/x.py", "../tools/x.sh"):
        (code / name).write_text("#!/bin/sh\nexit 0\n")
    (code / "run.sh").chmod(0o755)
    found = inventory(tmp_path, ONE)
    if not refused:
        script.find(found, command)
        assert script.hosts_own(argv_of(found, command)) == asked
        return
    with pytest.raises(KitError) as error:
        script.find(found, command)
    assert str(error.value).startswith(refused.format(code=code))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("/opt/train.py", "", "gpu2: no /opt/train.py there, which the command runs; lay it at the same place"),
        ("{code}/a/train.py", "", "gpu2: no {code}/a/train.py there, which the command runs; it lies in the "
         "folder that is synced, so say a/train.py"),
        ("nsys", "", "gpu2: no program nsys on its PATH, and no such file in {code}, the folder that is synced"),
        ("nsys", "job: {env: {PATH: /x}}\n", ""),
        ("X=1", "", "gpu2: no program X=1 on its PATH, and no such file in {code}, the folder that is synced; write "
         "env in front of it, or set X under job.env"),
        ("t.py", "", "gpu2: no program t.py on its PATH; that of {code}, the folder that is synced, needs its path "
         "here; say python t.py"),
    ],
)  # fmt: skip
def test_hosts_that_lack_what_the_command_runs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(TRAIN)
    name = name.format(code=tmp_path)
    found = {host: facts(host, files={name: kind}) for host, kind in (("gpu1", "python"), ("gpu2", ""))}
    problems = check.examine(inventory(tmp_path, "hosts: {gpu1: , gpu2: }\n" + settings), found)
    assert [str(each).startswith(said.format(code=tmp_path)) for each in problems] == ([True] if said else [])


def test_a_host_says_what_it_has_and_its_ranks_find_first_what_is_beside_their_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"/usr/bin:/bin:{beside}")
    assert programs.rank_path() == f"{beside}:/usr/bin:/bin:{beside}"
    (tmp_path / "train").write_text(TRAIN)
    files: list[Any] = [str(tmp_path / "train"), str(tmp_path / "nope"), "/bin/sh", "bash", "no such program"]
    answer = hostfacts.facts(str(tmp_path / "work"), files=files)["files"]
    assert list(answer.values()) == ["python", "", "program", "program", ""]
