"""`kit test` and `kit predict`, and the module they run where the weights lie: exact counts, and what is refused."""

import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import warm_agents
import warm_python
from agents import no_process_left, processes_of, until
from kit_runs import Kit
from places import ROOT
from rich.cells import cell_len
from rich.console import Console

from nodekit.deploy.commands import cli
from nodekit.deploy.connect.channel import ChannelLost, open_local
from nodekit.deploy.plan.command import weights_folders
from nodekit.deploy.records.runs import Run
from nodekit.deploy.results import apply as kit_apply
from nodekit.inventory.errors import KitError
from nodekit.training import apply
from nodekit.training.tasks import Task, load_task, rows
from nodekit.training.tasks.text import Text
from nodekit.training.weights.export import write_weights

OWN = """
import torch
print("this task talks")
class Bare:
    def model(self): return torch.nn.Linear(2, 2)
    def train_data(self): return [(torch.eye(2)[i % 2], i % 2) for i in range(4)]
    def test_data(self): return self.train_data()
    def loss(self, model, batch): return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    def measure(self, model, batch): return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).sum(), "one": 4}
class Full(Bare):
    def predict(self, model, batch): return model(batch[0])
    def targets(self, batch): return batch[1]
class Three(Full):
    labels = ["a", "b", "c"]
"""


def trained(task: Task, *, lr: float) -> torch.nn.Module:
    """A model after one epoch of a plain loop."""
    torch.manual_seed(0)
    module, data = task.model().train(), task.train_data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    collate = getattr(task, "collate", torch.utils.data.default_collate)
    for places in torch.randperm(len(data)).split(32):
        task.loss(module, collate([data[i] for i in places.tolist()])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()


def written(folder: Path, name: str, task: Task, module: torch.nn.Module, step: int = 34) -> Path:
    facts = {"task": name, "data": None, "model": None, "engine": "single", "step": step, "epoch": 1}
    write_weights(folder, module.state_dict(), task, facts)
    return folder


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run on the emotions would have its best weights, after an epoch."""
    pytest.importorskip("transformers")
    task = load_task("text")
    return written(tmp_path_factory.mktemp("run") / "best", "text", task, trained(task, lr=0.002))


def by_plain_transformers(folder: Path, texts: list[str]) -> torch.Tensor:
    """The scores, without a line of ours."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    encoded = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores: torch.Tensor = model(**encoded).logits
    return scores


def check_report(told: dict[str, Any], right: list[int], said: list[int], labels: list[str]) -> None:
    """Every number is scikit-learn's."""
    from sklearn.metrics import classification_report, confusion_matrix  # 1.7 s, for every worker at the top

    report = classification_report(
        right, said, labels=range(len(labels)), target_names=labels, output_dict=True, zero_division=0
    )
    names = {"precision": "precision", "recall": "recall", "f1": "f1-score"}
    for each in told["classes"]:
        assert each["support"] == report[each["label"]]["support"]
    for key, row in [
        *((each["label"], each) for each in told["classes"]),
        ("macro avg", told["macro"]),
        ("weighted avg", told["weighted"]),
    ]:
        assert {theirs: row[ours] for ours, theirs in names.items()} == pytest.approx(
            {theirs: report[key][theirs] for theirs in names.values()}
        )
    assert told["accuracy"] == pytest.approx(sum(map(int.__eq__, right, said)) / len(right))
    assert told["confusion"] == confusion_matrix(right, said, labels=range(len(labels))).tolist()
    assert told["num"] == len(right)


def run_module(
    folder: Path, *args: str, text: str = "", cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    argv = [warm_python.program(), "-m", "nodekit.training.apply", str(folder), *args]
    env = {**os.environ, **warm_python.environment()}
    return subprocess.run(
        argv, input=text, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env
    )


@pytest.mark.slow
def test_every_count_is_what_plain_transformers_and_scikit_learn_give(text_folder: Path) -> None:
    task, module, facts = apply.load(text_folder)
    assert isinstance(task, Text)
    assert facts["labels"] == list(task.labels)
    told = apply.test(task, module)
    data = task.final_data()
    said = by_plain_transformers(text_folder, [sentence for sentence, _ in data]).argmax(1).tolist()
    assert len(set(said)) > 1, "too little was learned to tell anything"
    check_report(told, [label for _, label in data], said, list(task.labels))


@pytest.mark.slow
def test_of_digits_every_count_is_what_plain_torch_gives(tmp_path: Path) -> None:
    task = load_task("digits")
    folder = written(tmp_path / "best", "digits", task, trained(task, lr=0.003))
    done = run_module(folder, "--test", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    module = task.model()
    module.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    images, right = task.test_data().images, task.test_data().labels.tolist()
    check_report(told, right, module(images).argmax(1).tolist(), list("0123456789"))
    assert told["accuracy"] > 0.5
    assert (told["task"], told["step"]) == ("digits", 34)
    refused = run_module(folder, "--predict", text='["一"]')
    assert refused.returncode == 2
    assert "this task takes no texts: it lacks encode()" in refused.stderr


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tasks of the user's, which is the working folder."""
    (tmp_path / "own_apply.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def of_own(own: Path, name: str) -> Path:
    task = load_task(f"own_apply.py:{name}")
    module = task.model()
    module.load_state_dict({"weight": torch.eye(2), "bias": torch.tensor([0.0, 2.0])})
    return written(own / name, f"own_apply.py:{name}", task, module)


def test_a_users_own_task_has_its_table_or_is_told_what_it_lacks(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert apply.main([str(of_own(own, "Full")), "--test", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    check_report(told, [0, 1, 0, 1], [1, 1, 1, 1], ["0", "1"])
    assert apply.main([str(of_own(own, "Full")), "--test"]) == 0
    assert "true \\ predicted\t0\t1\n0\t0\t2\n1\t0\t2\n" in capsys.readouterr().out
    assert apply.main([str(of_own(own, "Bare")), "--test", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["means"], told["lacks"]) == ({"accuracy": 0.5, "one": 1.0}, ["predict", "targets"])
    assert json.loads(
        apply.as_json({**told, "means": {"accuracy": 0.5, "one": math.nan}}), parse_constant=pytest.fail
    )
    told["means"]["one"] = None  # as nan is in JSON
    monkeypatch.setattr(kit_apply, "_apply", lambda *_: told)
    assert kit_apply.test(None, kit_apply.Options(weights="best", timeout_s=1, json=False, ssh=None)) == 0  # type: ignore[arg-type]
    assert capsys.readouterr().out == (
        "4 samples: accuracy 0.5000, one nan\n"
        "For precision and recall of each class the task lacks predict() and targets() (see nodekit.training.Task).\n"
    )
    assert apply.main([str(of_own(own, "Three")), "--test"]) == 2
    assert "the task has 3 labels and its predict 2 classes: wanted as many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            '{"task": ',
            r"n1: .*/best/nodekit\.json cannot be read \(Expecting value: .*\): wanted a JSON object",
        ),
        ("[1]", r"n1: .*/best/nodekit\.json cannot be read \('list' object .*\): wanted a JSON object"),
        (OSError(5, "Input/output error"), r"\[Errno 5\] Input/output error"),
    ],
)
def test_weights_that_cannot_be_read_are_not_said_to_be_missing(facts: str | OSError, message: str) -> None:
    def call(*_: object, **__: object) -> str:
        if isinstance(facts, OSError):
            raise facts
        return facts

    run: Any = SimpleNamespace(run_id="a-run", state="succeeded")
    channels: Any = {"n1": SimpleNamespace(call=call)}
    with pytest.raises(KitError, match=message) as raised:
        kit_apply._find(
            run,
            {"n1": {"argv": ["train.py"], "env": {"NODEKIT_OUTPUT_DIR": "/run/n1/output"}}},
            channels,
            "best",
        )
    first = str(raised.value).splitlines()[0]
    assert first.startswith(
        "no best weights of a-run were found where they could be looked for: n1:/run/n1/output/best"
    )


@pytest.mark.parametrize("stdin", ["", "[]", '["a", " "]', '{"a": 1}', "[1]"])
def test_what_is_no_list_of_texts_is_refused_before_torch_is_imported(tmp_path: Path, stdin: str) -> None:
    with pytest.raises(ValueError, match=r"^stdin (is no JSON|has no JSON list of texts)"):
        apply._texts(stdin)


SAID = {"text": "今天真高兴", "label": "高兴 🙂", "probability": 0.5}


@pytest.mark.parametrize(
    ("encoding", "is_plain"), [("utf-8", True), ("gb18030", True), ("gbk", False), ("ascii", False), ("cp1252", False)]
)  # fmt: skip
@pytest.mark.parametrize("indent", [None, 2])
def test_chinese_is_printed_as_it_is_unless_the_encoding_lacks_a_letter(
    encoding: str, is_plain: bool, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    text = apply.as_json(SAID, indent=indent)
    assert json.loads(text.encode(encoding).decode(encoding)) == SAID
    assert ("今天真高兴" in text) == is_plain


def test_columns_are_printed_whatever_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, shown in (("utf-8", "准确率\t0.5"), ("ascii", r"\u51c6\u786e\u7387" + "\t0.5")):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert apply._printable("准确率\t0.5") == shown


@pytest.mark.parametrize(
    ("raw", "encoding"),
    [
        ('["今天真高兴"]'.encode(), "ascii"),
        ('\ufeff["今天真高兴"]'.encode(), "cp1252"),
        ('["今天真高兴"]'.encode("gbk"), "gbk"),
    ],
)
def test_texts_on_stdin_may_be_in_the_terminals_encoding(
    raw: bytes, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding=encoding))
    assert apply._texts(apply._stdin()) == ["今天真高兴"]


def test_texts_in_no_known_encoding_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'["\xbd\xf1"]'), encoding="ascii"))
    with pytest.raises(ValueError, match=r"^stdin is neither UTF-8 nor ascii: wanted a JSON list of texts$"):
        apply._stdin()


def test_texts_are_arguments_too(text_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert apply.main([str(text_folder), "--predict", "今天真高兴", "气死我了"]) == 0
    shown = capsys.readouterr().out
    assert '"text": "今天真高兴"' in shown
    assert [each["text"] for each in json.loads(shown)["texts"]] == ["今天真高兴", "气死我了"]
    assert apply.main([str(text_folder), "--predict", "今天真高兴", " "]) == 2
    assert "--predict: found an empty text, wanted some words" in capsys.readouterr().err


def test_the_data_may_be_elsewhere_but_have_the_same_labels(
    text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved, data = tmp_path / "best", tmp_path / "data"
    shutil.copytree(text_folder, moved)
    shutil.copytree(Path(rows.__file__).parent / "emotions", data)
    facts = json.loads((moved / "nodekit.json").read_text(encoding="utf-8"))
    (moved / "nodekit.json").write_text(json.dumps({**facts, "data": "no such folder"}))
    assert apply.main([str(moved), "--predict", "今天真高兴"]) == 2
    assert "no folder no such folder for the data" in capsys.readouterr().err
    assert apply.main([str(moved), "--data", str(data), "--predict", "今天真高兴"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] == facts["labels"]
    for split in ("train", "dev", "test"):
        text = (data / f"{split}.tsv").read_text(encoding="utf-8")
        (data / f"{split}.tsv").write_text(text.replace("高兴\t", "欢喜\t"), encoding="utf-8")
    assert apply.main([str(moved), "--data", str(data), "--test"]) == 2
    said = capsys.readouterr().err
    assert (
        "was trained on the labels 其他, 喜好, 悲伤, 厌恶, 愤怒, 高兴, and the task has 其他, 厌恶, " in said
    )


def test_what_the_python_lacks_is_one_line(
    text_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert apply.main([str(text_folder), "--test"]) == 2
    assert capsys.readouterr().err == (
        f"python -m nodekit.training.apply: {sys.executable} has no torch: pip install torch\n"
    )


def test_a_folder_of_weights_is_taken_for_what_it_is(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(
        run_id="best-1122-060115-77ab",
        name="best",
        inventory_path="",
        inventory={},
        command=None,
        created=1.0,
    )
    run.save()
    monkeypatch.chdir(tmp_path)
    assert cast(Run, kit_apply.find("best", "best")).run_id == run.run_id
    for folder in ("best", "out put/last", "empty"):
        Path(folder).mkdir(parents=True)
    assert cast(Run, kit_apply.find("best", "best")).run_id == run.run_id, "a folder without weights is none"
    for folder in ("best", "out put/last"):
        Path(folder, "nodekit.json").write_text('{"task": "digits"}')
    for name, weights, found in [
        ("best", "last", "best"),
        ("./best/", "best", "best"),
        (str(tmp_path / "best"), "best", str(tmp_path / "best")),
        ("out put", "last", "out put/last"),
    ]:
        assert kit_apply.find(name, weights) == Path(found)
    assert cast(Run, kit_apply.find(None, "best")).run_id == run.run_id
    for name, message in [
        (
            "out put/best",
            "there is no folder out put/best: wanted a folder of weights that a run has written",
        ),
        ("./empty", r"\./empty has no nodekit\.json and no best/nodekit\.json: wanted a folder of weights"),
        ("empty", r"no run 'empty' on record; .*; the folder empty has no nodekit\.json"),
        ("none", "no run 'none' on record; the latest are best-1122"),
    ]:
        with pytest.raises(KitError, match=message):
            kit_apply.find(name, "best")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; wanted a file with a text on each line"),
        (b"", "found no text, wanted one on each line"),
        (b"\n \n", "found no text, wanted one on each line"),
        (b"a\n\nb\n", ":2: found an empty line, wanted a text"),
        (b"a\n" + "好".encode("gb18030"), ":2: found the byte 0xba, wanted UTF-8"),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "it's; $HOME.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KitError) as refused:
        kit_apply.read_texts(str(path))
    assert str(refused.value).startswith(f"{path}")
    assert str(refused.value).endswith(message)


def test_a_file_is_a_text_on_each_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeff天晴了\r\n a b \n\n".encode())
    assert kit_apply.read_texts(str(tmp_path / "a.txt")) == ["天晴了", "a b"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python", "-u", "-m", "nodekit.training"], ["/n/output/best"]),
        (["python", "-u", "job.py", "--output", "out"], ["/n/output/best"]),
        (["python", "-u", "-m", "nodekit.training", "--output", "my out"], ["/c/my out/best", "/c/my out/node1/best"]),
        (["python", "-u", "-m", "nodekit.training", "--output", "/o"], ["/o/best", "/o/node1/best"]),
    ],
)  # fmt: skip
def test_where_weights_may_lie(argv: list[str], expected: list[str]) -> None:
    node = {"argv": argv, "env": {"NODEKIT_OUTPUT_DIR": "/n/output"}, "code_dir": "/c", "max_nodes": 2}
    assert weights_folders(node, "best") == expected


def test_columns_are_aligned_whatever_the_script_of_the_labels() -> None:
    classes = [
        {"label": label, "precision": 1.0, "recall": 0.5, "f1": 0.6667, "support": 10}
        for label in ("其他", "joy", "[b]")
    ]
    mean = {"precision": 1.0, "recall": 0.5, "f1": 0.6667}
    told = {
        "num": 30, "accuracy": 0.5, "classes": classes, "macro": mean, "weighted": mean,
        "confusion": [[5, 123, 0], [0, 5, 5], [1, 2, 3]],
    }  # fmt: skip
    console = Console(width=200)
    with console.capture() as captured:
        console.print(kit_apply.classes_table(told))
    table = captured.get()
    assert len({cell_len(line) for line in table.splitlines()}) == 1, table
    assert [line.split()[0] for line in table.splitlines()][1:] == [
        "其他",
        "joy",
        "[b]",
        "accuracy",
        "macro",
        "weighted",
    ]
    with console.capture() as captured:
        console.print(kit_apply.confusion_table(told))
    assert captured.get() == (
        "true \\ predicted  其他  joy  [b]\n"
        "其他                 5  123    0\n"
        "joy                  0    5    5\n"
        "[b]                  1    2    3\n"
    )


JOB = """
import json, os, pathlib, shutil
node = int(os.environ["GROUP_RANK"])
folder = pathlib.Path(os.environ["NODEKIT_OUTPUT_DIR"], "best")
shutil.copytree(os.environ["TRAINED"], folder)
facts = json.loads((folder / "nodekit.json").read_text())
(folder / "nodekit.json").write_text(json.dumps({**facts, "step": 30 + node}))
if node == 0:  # older ones, which nobody may take
    (folder / "pytorch_model.bin").write_bytes(b"")
"""


@pytest.fixture
def local(tmp_path: Path, own_home: Path, text_folder: Path) -> Iterator[Kit]:
    """Kit in a project with two local nodes, whose job has written weights on both, newer ones on the second."""
    kit = Kit(tmp_path / "my 'project' $HOME", None)
    (kit.folder / "job.py").write_text(JOB)
    (kit.folder / "lab.yaml").write_text(
        f"connection: local\npython: {warm_agents.program()}\n"
        f"workdir: {str(tmp_path / 'work dir')!r}\nhosts: {{a: , b: }}\n"
        f"job: {{command: [job.py], env: {{TRAINED: {str(text_folder)!r}}}}}\n"
    )
    yield kit
    kit.close()
    kit.run("down", "--force")
    no_process_left(f"HOME={own_home}")


@pytest.mark.slow
def test_kit_tests_and_predicts_with_the_newest_weights_of_a_run(local: Kit, text_folder: Path) -> None:
    up = local.run("up", "lab.yaml", "-q")
    assert up.returncode == 0, up.stdout + up.stderr
    done = local.run("test", "--json")
    assert done.returncode == 0, done.stderr
    assert ", step 31, on b:" in done.stderr
    told = json.loads(done.stdout)
    task = load_task("text")
    assert isinstance(task, Text)
    said = by_plain_transformers(text_folder, [sentence for sentence, _ in task.final_data()]).argmax(1)
    check_report(told, [label for _, label in task.final_data()], said.tolist(), list(task.labels))

    texts = ["今天的天气真好，我很高兴", '--"$HOME"; 气死我了', "真好"]
    (local.folder / "some texts").write_text("\n".join(texts), encoding="utf-8")
    found = json.loads(local.run("predict", "lab", "--file", "some texts", "--json").stdout)["texts"]
    scores = torch.cat([by_plain_transformers(text_folder, [each]) for each in texts])
    assert [each["text"] for each in found] == texts
    assert [each["label"] for each in found] == [task.labels[place] for place in scores.argmax(1)]
    assert [each["probabilities"] for each in found] == [
        pytest.approx(row, abs=1e-5) for row in scores.double().softmax(1).tolist()
    ]

    # A folder of weights on this machine says the same, to a terminal that has no Chinese too.
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    here = local.run("predict", str(text_folder), "--file", "some texts", "--json", env=ascii_only)
    assert json.loads(here.stdout)["texts"] == found, here.stderr
    assert r"\u4eca\u5929" in here.stdout

    readme = (ROOT / "README.md").read_text()
    for line in re.findall(r"^kit (?:test|predict) .*", readme, re.MULTILINE):
        shown = local.run(*shlex.split(line.replace(" RUN ", " lab "), comments=True)[1:])
        assert shown.returncode == 0, shown.stderr
        assert re.search(r"^(高兴 .*|.* 今天真高兴)$", shown.stdout, re.MULTILINE), shown.stdout

    missing = local.run("test", "--weights", "last")
    assert missing.returncode == 1
    assert "has no last weights (yet; it has succeeded): looked for a:" in missing.stderr
    assert "/b/output/last" in missing.stderr
    late = local.run("test", "--timeout", "0.05")
    assert late.returncode == 1
    assert "b: no result within 0.05 s, and it was stopped" in late.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("lab",), "wanted either TEXT… or --file F"),
        (("lab", "a", "--file", "f"), "wanted either TEXT… or --file F"),
        (("lab", "a", " "), "found an empty text"),
        (("none", "a"), "no run on record in "),
        (("none/best", "a"), "there is no folder none/best: wanted a folder of weights"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    assert cli.main(["predict", *args]) == 1
    assert message in capsys.readouterr().err


def test_what_is_computed_on_a_node_ends_with_the_link(tmp_path: Path) -> None:
    channel = open_local("a", sys.executable)
    signs: list[float] = []
    lost: list[Exception] = []

    def attend() -> None:
        argv = [sys.executable, "-c", "import sys, time; sys.stdin.read(); time.sleep(100)"]
        where = {"cwd": str(tmp_path), "kit_dir": "", "env": {"MARK": str(tmp_path)}}
        try:
            channel.stream("attend", signs.append, argv=argv, limit_s=100, text="x", **where)
        except ChannelLost as error:
            lost.append(error)

    waiting = threading.Thread(target=attend)
    waiting.start()
    until(lambda: signs, what="a sign of life")
    assert len(processes_of(f"MARK={tmp_path}")) == 1
    channel.close()
    waiting.join(20)
    assert lost
    until(lambda: not processes_of(f"MARK={tmp_path}"), what="its end")
