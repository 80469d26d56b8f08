"""The documentation: its commands, inventories and programs are real, its links lead somewhere, its site is whole."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import warm_python
from agents import no_process_left, processes_of, until
from kit_runs import Kit, run_id
from places import ROOT
from test_readme import BLOCKS, commands

import nodekit.training
from nodekit.deploy.commands import cli
from nodekit.inventory.errors import Problem
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import json_schema
from nodekit.inventory.source import parse
from nodekit.training.options import arguments

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in [*DOCS.rglob("*.md"), *ROOT.glob("README*.md")]}
IN_CHINESE = {"README.zh-CN.md": "README.md"} | {
    page: page.replace("/zh/", "/") for page in PAGES if page.startswith("docs/zh/")
}
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page: str, *languages: str) -> list[str]:
    """The code blocks of a page, in these languages."""
    return [code for language, _, code in FENCE.findall(PAGES[page].read_text()) if language in languages]


def titled(page: str, title: str) -> str:
    """The one complete file on a page that it gives this name."""
    found = [code for _, about, code in FENCE.findall(PAGES[page].read_text()) if f'title="{title}"' in about]
    assert len(found) == 1, (page, title)
    return str(found[0])


def from_code() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_code", DOCS / "from_code.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- commands -----------------------------------------------------------------------------------------------


def command_lines(page: str) -> list[list[str]]:
    """Each command on a page, as words: of its blocks, without comments, prompts and what follows a pipe."""
    found = []
    for block in fences(page, "sh", "console", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|;<>")
            lexer.whitespace_split = True
            lexer.commenters = "#"
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word and set(word) <= set("|;<>"):
                    found.append(words)
                    words = []
                else:
                    words.append(word)
    return [words for words in found if words]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kit's own main, up to where a command would run."""
    real = cli.parser

    def parser(name: str = "") -> Any:
        made = real(name)
        parse_args = made.parse_args

        def only_parsed(argv: list[str]) -> Any:
            args = parse_args(argv)
            args.run = lambda _: 0
            return args

        monkeypatch.setattr(made, "parse_args", only_parsed)
        return made

    monkeypatch.setattr(cli, "parser", parser)

    def main(argv: list[str]) -> str:
        """What kit has to say against this; empty if it would run."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                code = cli.main(argv)
            except SystemExit as left:
                code = int(left.code or 0)
        return said.getvalue() if code else ""

    return main


@pytest.mark.parametrize("page", PAGES)
def test_kit_takes_every_command_that_is_shown(page: str, refusal: Any) -> None:
    for words in command_lines(page):
        if words[0] == "kit":
            assert not refusal(words[1:]), shlex.join(words)
        if "nodekit.training" in words:
            arguments.read(words[words.index("nodekit.training") + 1 :], {})
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words


def test_what_kit_does_not_take_would_be_found(refusal: Any) -> None:
    assert "unrecognized arguments: --quick" in refusal(["up", "lab.yaml", "--quick"])
    assert "there is no command 'start'" in refusal(["start"])
    assert not refusal(["up", "lab.yaml", "--", "train.py", "--quick"])


@pytest.mark.parametrize("page", PAGES)
def test_a_command_within_a_sentence_exists_with_its_options(page: str) -> None:
    parsers = dict(from_code().parsers(cli.parser(), "kit"))
    prose = FENCE.sub("", PAGES[page].read_text())
    for shown in re.findall(r"`(kit [a-z][^`]*)`", " ".join(prose.split())):
        words = shown.partition(" -- ")[0].split()
        name = max((known for known in parsers if f"{' '.join(words)} ".startswith(f"{known} ")), key=len)
        assert name != "kit" or words[1].startswith("-"), f"no such command: {shown}"
        for word in words:
            if option := re.match(r"--?[a-z][\w-]*", word):
                assert option[0] in parsers[name]._option_string_actions, shown


# --- inventories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "yaml")])
def test_every_inventory_that_is_shown_is_one(page: str, tmp_path: Path) -> None:
    for block in fences(page, "yaml"):
        if not {"hosts", "slurm"} & parse(block).data.keys():  # a part, to go with hosts
            block += "hosts: {gpu1: }\n"
        (tmp_path / "lab.yaml").write_text(block)
        load_inventory(tmp_path / "lab.yaml")


def test_every_key_of_an_inventory_is_explained_by_an_example() -> None:
    shown: set[str] = set()

    def walk(values: Mapping[str, Any], path: str) -> None:
        for key, value in values.items():
            shown.add(path + key)
            if path + key == "hosts":
                for block in value.values():
                    walk(block or {}, "hosts.HOST.")
            elif isinstance(value, dict):
                walk(value, f"{path}{key}.")

    for block in fences("docs/inventory.md", "yaml"):
        walk(parse(block).data, "")
        # What goes in place of what is shown stands beside it as a comment.
        uncommented = re.sub(r"^( *)# (\w+:)", r"\1\2", block, flags=re.MULTILINE)
        walk(parse(uncommented).data, "")
    assert not from_code().dotted(json_schema()) - shown


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_each_key_of_an_inventory_that_is_named_is_one(page: str) -> None:
    text = (ROOT / page).read_text()
    parts = json_schema()["$defs"]
    of = {"timings": "Timings", "snapshots": "SnapshotSettings", "job": "Job", "logs": "LogSettings"}
    for section, part in of.items():
        named = set(re.findall(rf"`{section}\.(\w+)", text))
        assert named <= parts[part]["properties"].keys(), section


# --- programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python")])
def test_every_program_that_is_shown_is_python(page: str) -> None:
    for block in fences(page, "python"):
        compile(block, page, "exec")


def test_the_loop_of_the_snapshots_page_is_not_run_by_a_loaders_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where workers are not forked, each imports the script."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(titled("docs/snapshots.md", "train.py"))
    runpy.run_path("train.py", run_name="__mp_main__")
    assert not Path("snapshots").exists()


@pytest.mark.slow
def test_what_the_snapshots_page_names_can_be_imported_as_its_program_does() -> None:
    named = set(re.findall(r"`((?:[A-Z][a-z]+){2,})`", PAGES["docs/snapshots.md"].read_text()))
    assert {"ElasticSampler", "NotFinite"} <= named <= set(nodekit.training.__all__)
    assert all(hasattr(nodekit.training, name) for name in nodekit.training.__all__)


def test_the_loop_of_the_snapshots_page_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    python, environ = warm_python.program(), {**os.environ, **warm_python.environment()}
    # All steps take half a second: slower while a file is there, so that the job is not over before it is signalled.
    page = titled("docs/snapshots.md", "train.py")
    before = "            step += 1  # last: now the step is done, and may be saved\n"
    assert page.count(before) == 1
    held = "            __import__('time').sleep(0.05 * __import__('os').path.exists('hold'))\n"
    (tmp_path / "train.py").write_text(page.replace(before, before + held))

    def trained(folder: str, *argv: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        done = subprocess.run(
            [python, *argv, "../train.py"],
            cwd=tmp_path / folder,
            env=environ,
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    unbroken = re.search(r"trained 192 steps, loss (\d+\.\d+) ", trained("unbroken"))
    assert unbroken
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/hold").touch()
    progress = tmp_path / "broken/progress"

    def told() -> int:
        """The step, 0 while a rank tells what else it does."""
        found = re.match(r"\d+", progress.read_text()) if progress.exists() else None
        return int(found[0]) if found else 0

    with subprocess.Popen(
        [python, "../train.py"],
        cwd=tmp_path / "broken",
        env={**environ, "NODEKIT_PROGRESS_FILE": str(progress)},
    ) as process:
        until(
            lambda: told() > 20,
            timeout_s=60,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    stopped_at = int(progress.read_text().partition("/")[0])
    assert 20 < stopped_at < 192
    two_ranks = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    with subprocess.Popen(
        [python, *two_ranks, "../train.py"],
        cwd=tmp_path / "broken",
        env={**environ, "NODEKIT_PROGRESS_FILE": str(progress)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline().startswith(f"goes on at step {stopped_at} from ")
        until(lambda: told() > stopped_at + 25, timeout_s=60)
        there = processes_of(f"NODEKIT_PROGRESS_FILE={progress}")
        os.kill(max(pid for pid, argv in there.items() if argv.endswith("-u ../train.py ")), signal.SIGKILL)
        killed_at = told()
        (tmp_path / "broken/hold").unlink()
        said, _ = process.communicate(timeout=120)
    again = re.match(r"goes on at step (\d+) from ", said)
    assert again
    assert int(again[1]) >= killed_at, "the rank that was left has saved its last step"
    resumed = re.search(r"trained 192 steps, loss (\d+\.\d+) ", said)
    assert resumed
    assert float(resumed[1]) == pytest.approx(float(unbroken[1]), rel=1e-3)


@pytest.mark.slow
def test_the_commands_of_the_start_page_run_in_their_order(tmp_path: Path, own_home: Path) -> None:
    make_up, own_script, machines, lab = fences("docs/start.md", "sh")
    # These run in test_readme, on what it takes.
    assert commands(make_up) == commands(BLOCKS["Quick start"])[:1]
    init, *others = commands(machines)
    assert init.replace("lab.yaml", "found.yaml") in commands(BLOCKS["Check before a run"])
    assert set(others) < {
        *commands(BLOCKS["Check before a run"]),
        *commands(BLOCKS["Train on your machines"]),
    }
    assert [each for each in commands(BLOCKS["Try it without machines"]) if "drill" not in each] == commands(
        lab
    )

    kit = Kit(tmp_path / "my project", None)
    (kit.folder / "train.py").write_text(titled("docs/start.md", "train.py"))
    said: dict[str, str] = {}
    try:
        for command in commands(own_script):
            argv = shlex.split(command)[1:]
            if command == "kit down":  # once a reader has seen it train
                (run,) = (own_home / "nodekit/local/runs").iterdir()
                until(lambda run=run: list(run.glob("*/snapshots/epoch*.pt")), timeout_s=60)
            if command == "kit up local -- train.py":
                watching = kit.start(*argv)
                kit.wait_for("node1:0 | goes on at epoch ")
                kit.wait_for("node2:1 | goes on at epoch ")
                watching.send_signal(signal.SIGINT)
                assert watching.wait(60) == 130
                continue
            done = kit.run(*argv)
            assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
            said[command] = done.stdout
    finally:
        kit.close()
        kit.run("down", "--force")
    assert "rank 0 of 2" in said["kit status"]
    assert re.search(rf"^{run_id(kit.log())} .* stopped ", said["kit runs"], re.MULTILINE)
    no_process_left(f"HOME={own_home}")


# --- what kit says ------------------------------------------------------------------------------------------


def _literal(node: ast.AST) -> str | None:
    """A text as it stands in the code, with "…" for what is put into it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
    return None


def test_what_troubleshooting_says_that_kit_says_is_in_its_code() -> None:
    said = []
    for folder in ("deploy", "inventory", "slurm"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if (text := _literal(node)) is not None:
                    said.append(text)
                elif (
                    isinstance(node, ast.Call)
                    and node.args
                    and {each.arg for each in node.keywords} & {"wanted", "cure"}
                ):
                    more = {str(each.arg): _literal(each.value) or "…" for each in node.keywords}
                    found = _literal(node.args[-1]) or "…"
                    said.append(str(Problem(found, more.get("wanted", ""), more.get("cure", ""))))
    code = "\n".join(said)
    tables = re.findall(
        r"^\| kit says .*\n\|[-|]+\n((?:\|.*\n)+)", PAGES["docs/troubleshooting.md"].read_text(), re.M
    )
    cells = [row.split(" | ")[0].removeprefix("| ") for table in tables for row in table.splitlines()]
    assert len(cells) > 20
    for cell in cells:
        for part in cell.replace("`", "").split("…"):
            assert part.strip(" ,;:()") in code.replace("`", ""), cell


def test_every_variable_that_a_rank_is_given_is_in_the_table() -> None:
    files = [ROOT / "deploy/plan/plan.py", *(ROOT / "deploy/agent").rglob("*.py")]
    code = "".join(path.read_text() for path in files)
    given = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)*)"(?:: |\] = )', code))
    assert {"RANK", "NODE_RANK", "GLOO_SOCKET_IFNAME", "NODEKIT_SNAPSHOT_SHARED"} <= given
    assert not given - set(re.findall(r"`([A-Z_]+)`", PAGES["docs/from-torchrun.md"].read_text()))


# --- the code -----------------------------------------------------------------------------------------------


def test_the_page_of_the_code_has_the_layers_that_make_check_holds() -> None:
    code = from_code()
    wanted = code.mermaid()
    assert wanted in PAGES["docs/code.md"].read_text(), "draw them anew: python docs/from_code.py"
    inner = {name.partition("/")[0] for name in code.folders()}
    assert not [name for name in code.folders() if name not in inner and name not in wanted]


def test_every_folder_and_every_file_of_the_code_says_what_it_is_for() -> None:
    code = from_code()
    listed = code.files()
    for top in ("deploy", "inventory", "slurm", "training"):
        for path in (ROOT / top).rglob("*.py"):
            assert code.about(str(path.relative_to(ROOT))), path
            assert path.stem == "__init__" or f"| `{path.name}` | " in listed, path


# --- pictures -----------------------------------------------------------------------------------------------

PICTURE = re.compile(r"\((?:docs/)?(pictures/[\w.]+)\)")


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/index.md"])
def test_the_first_pages_show_kit_before_they_describe_it(page: str) -> None:
    before = PAGES[page].read_text().partition("\n## ")[0]
    assert set(PICTURE.findall(before)) == {f"pictures/{name}.svg" for name in ("up", "watch", "report")}


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*")), ids=lambda path: str(path.name))
def test_a_picture_is_small_and_loads_nothing(picture: Path) -> None:
    text = picture.read_text()
    assert len(text.encode()) < 60_000
    ElementTree.fromstring(text)
    loads = r"<(?:script|image|iframe)|@import|(?:href|src)=\"(?!#)|url\((?![\"']?#)| on\w+=\""
    assert not re.findall(loads, text)


# --- the same in Chinese ------------------------------------------------------------------------------------


def bare(code: str) -> list[str]:
    """A block's lines without comments."""
    return [re.sub(r"(^|\s)#( .*)?$", "", line).rstrip() for line in code.splitlines()]


@pytest.mark.parametrize(("chinese", "english"), IN_CHINESE.items())
def test_the_chinese_page_has_the_same_code_and_the_same_numbers(chinese: str, english: str) -> None:
    def codes(page: str) -> list[tuple[str, str, list[str]]]:
        return [
            (language, about, bare(code)) for language, about, code in FENCE.findall(PAGES[page].read_text())
        ]

    def rows(page: str) -> list[str]:
        return re.findall(r"^\|.*\|$", PAGES[page].read_text(), re.MULTILINE)

    def numbers(page: str) -> list[list[str]]:
        return [re.findall(r"\d+\.\d+", row) for row in rows(page)]

    assert codes(chinese) == codes(english)
    assert numbers(chinese) == numbers(english)

    def headings(page: str) -> list[str]:
        return re.findall(r"^#+ ", FENCE.sub("", PAGES[page].read_text()), re.MULTILINE)

    assert headings(chinese) == headings(english)

    def shape(page: str) -> list[tuple[int, int, int]]:
        """Items of lists, rows of tables, and paragraphs (each of these and of the codes is one) of each section."""
        text = FENCE.sub("code", PAGES[page].read_text())
        return [
            (
                len(re.findall(r"^ *- ", section, re.MULTILINE)),
                len(re.findall(r"^\|", section, re.MULTILINE)),
                len(re.split(r"\n\s*\n", section.strip())),
            )
            for section in re.split(r"^#+ .*$", text, flags=re.MULTILINE)
        ]

    assert shape(chinese) == shape(english)

    def options(page: str) -> set[str]:
        """Options, variables and commands, whatever stands around them."""
        text = FENCE.sub("", PAGES[page].read_text())
        return set(re.findall(r"(?<![\w-])--[a-z][\w-]*|\b[A-Z]{2,}_[A-Z_]+\b|`kit [a-z]+", text))

    assert not options(english) - options(chinese)


def test_the_pages_for_the_readers_of_the_tutorials_are_in_chinese_with_the_words_they_search_for() -> None:
    topics = (
        *("start", "one-machine", "two-machines", "from-torchrun", "inventory", "engines", "results"),
        *("recovery", "slurm", "windows", "troubleshooting"),
    )
    assert {f"docs/zh/{name}.md" for name in topics} <= PAGES.keys()
    text = "".join(path.read_text() for page, path in PAGES.items() if page.startswith("docs/zh/"))
    words = (
        "单机多卡",
        "多机多卡",
        "数据并行",
        "混合精度",
        "梯度累积",
        "学习率",
        "端口",
        "显存",
        "断点续训",
        "预测",
    )
    assert not [word for word in words if word not in text]


def test_the_table_of_recovery_is_the_same_wherever_it_stands() -> None:
    def rows(page: str) -> list[str]:
        return re.findall(
            r"^\| (?:a worker|a node|the node is back|  the others|the rend).*\|$", page, re.MULTILINE
        )

    shown = rows(PAGES["README.md"].read_text())
    assert len(shown) == 7
    assert rows(PAGES["docs/recovery.md"].read_text())[: len(shown)] == shown, "a second table follows there"


# --- the site -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: any warning (a dead link, a page that no menu has) is an error."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loads(HTMLParser):
    """What a page loads, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text = ""
        self.language = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "html":
            self.language = values.get("lang") or ""
        loads = values.get("src") or (values.get("href") if tag == "link" else None)
        if loads and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(loads)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path: Loads(path) for path in site.rglob("*.html")}
    assert len(pages) > 15
    for path, page in pages.items():
        for loaded in page.loaded:
            assert not re.match(r"(https?:)?//", loaded), (path, loaded)
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)[ '\"]*(https?:)?//", path.read_text()), path
    assert pages[site / "zh/start.html"].language == "zh"
    assert pages[site / "start.html"].language == "en"


def test_the_sites_search_finds_chinese_words_within_a_sentence(site: Path) -> None:
    """Chinese has no spaces: a whole sentence would be one word of the index."""
    index = json.loads((site / "search/search_index.json").read_text())
    found = re.split(index["config"]["separator"], "一张卡的显存，torchrun --nproc-per-node")
    assert [each for each in found if each] == [*"一张卡的显存，", "torchrun", "nproc", "per", "node"]


def test_every_command_and_every_key_is_on_the_site(site: Path) -> None:
    text = " ".join(Loads(site / "commands.html").text.split())
    for name, parser in from_code().parsers(cli.parser(), "kit"):
        assert f"usage: {name}" in text
        for action in parser._actions:
            assert all(option in text for option in action.option_strings), (name, action.option_strings)
    assert "quorum.py" in Loads(site / "code.html").text
    keys = Loads(site / "inventory.html").text
    described = re.findall(r'"description": ("(?:[^"\\]|\\.)*")', json.dumps(json_schema()))
    for description in described:
        assert json.loads(description).replace("`", "") in keys


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page, path in PAGES.items():
        prose = FENCE.sub("", path.read_text())
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            file, _, anchor = target.partition("#")
            if re.match(r"https?://", target):
                assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./%~-]*)?", target), (page, target)
                continue
            goal = (path.parent / file).resolve() if file else path
            assert goal.exists(), (page, target)
            if anchor:  # of a page: as headings are named on the site and on code hosts
                headings = re.findall(r"^#+ (.+)$", FENCE.sub("", goal.read_text()), re.MULTILINE)
                names = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
                assert anchor in names, (page, target)
