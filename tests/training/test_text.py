"""The task text: rows of all formats and what is wrong with them, the shipped sentences, training and saving."""

import json
import shutil
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nodekit.training import Task
from nodekit.training.tasks import TaskError, load_task, rows
from nodekit.training.tasks.rows import Row, find_rows, read_rows
from nodekit.training.tasks.text import EMOTIONS, SPECIAL_TOKENS, Text
from nodekit.training.weights.export import write_weights

SHIPPED = Path(rows.__file__).parent / "emotions"
SPLITS = ("train", "dev", "test")
TWO = [Row("好", "天晴了，真好"), Row("坏", 'say "no", twice')]


@pytest.fixture(scope="module")
def text() -> Text:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    return Text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user's data lies."""
    path = tmp_path / "it's $HOME; 数据"
    path.mkdir()
    return path


def shipped(split: str) -> list[Row]:
    return read_rows(find_rows(SHIPPED, split), EMOTIONS)


def bare(row: Row) -> str:
    """The text without punctuation and white space."""
    return "".join(each for each in row.text if unicodedata.category(each)[0] in "LN")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", '好\t天晴了，真好\n坏\tsay "no", twice\n'),
        ("a.tsv", '\ufeff好\t天晴了，真好\r\n坏\t say "no", twice \r\n\r\n'),
        (
            "a.jsonl",
            '{"label": "好", "text": "天晴了，真好"}\n{"text": "say \\"no\\", twice", "label": "坏", "id": 7}',
        ),
        (
            "a.json",
            '{"label": "好", "sentence": "天晴了，真好"}\n{"label": "坏", "content": "say \\"no\\", twice"}\n',
        ),
        ("a.csv", 'label,text\n好,"天晴了，真好"\n坏,"say ""no"", twice"\n'),
        ("a.csv", '\ufeffid,sentence,label\r\n1,天晴了，真好,好\r\n2,"say ""no"", twice",坏\r\n'),
    ],
)
def test_rows_are_the_same_from_every_format(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode())
    assert read_rows(folder / name) == TWO
    assert read_rows(folder / name, ["坏", "好"]) == TWO


def test_a_text_may_hold_what_only_looks_like_the_end_of_a_line(folder: Path) -> None:
    (folder / "a.tsv").write_text("好\t一\u2028二\n坏\t三\n", encoding="utf-8")
    assert [row.text for row in read_rows(folder / "a.tsv")] == ["一\u2028二", "三"]


def test_a_label_that_is_a_number_is_taken_as_its_digits(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"label": 102, "sentence": "x"}\n')
    assert read_rows(folder / "a.jsonl") == [Row("102", "x")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"", "a.tsv:1: found no rows, wanted one or more of label and text"),
        ("a.tsv", "好\t天\n坏 地\n".encode(), "a.tsv:2: found no tabs in '坏 地', wanted label<TAB>text"),
        ("a.tsv", "1\t好\t天\n".encode(), r"a.tsv:1: found 2 tabs in '1\\t好\\t天', wanted label<TAB>text"),
        ("a.tsv", "好\t天\n\n坏\t地\n".encode(), "a.tsv:2: found an empty line, wanted label<TAB>text"),
        ("a.tsv", "label\ttext\n好\t天\n".encode(), "a.tsv:1: found a header, wanted label<TAB>text"),
        ("a.tsv", "好\t天\n坏\t \n".encode(), "a.tsv:2: found an empty text, wanted a text"),
        ("a.tsv", "\t天\n".encode(), "a.tsv:1: found an empty label, wanted a label"),
        ("a.tsv", "好\t天\n差\t地\n".encode(), "a.tsv:2: found the label '差', wanted one of 好, 坏"),
        ("a.tsv", "好\t天\n好\t".encode() + "好".encode("gb18030"), "a.tsv:2: found the byte 0xba, wanted UTF-8"),
        ("a.jsonl", b"", "a.jsonl:1: found no rows"),
        ("a.jsonl", '{"label": "好", "text": "x"}\n{"label"'.encode(), r"a.jsonl:2: .* which is not JSON .*, wanted"),
        ("a.jsonl", b'[{"label": "1", "text": "x"}]', "a.jsonl:1: found .*, wanted one object per line"),
        ("a.json", b'{"text": "x"}', "a.json:1: found as label none, in"),
        ("a.json", b'{"label": "1", "txt": "x"}', "a.json:1: found as text or sentence or content none, in"),
        ("a.json", b'{"label": true, "text": "x"}', "a.json:1: found as label 'true', which is no string, in"),
        ("a.json", b'{"label": "1", "text": 5}', "found as text or sentence or content '5', which is no string, in"),
        ("a.json", '{"label": "好", "text": ""}'.encode(), "a.json:1: found an empty text"),
        ("a.csv", b"", "a.csv:1: found the header '', wanted a header with label and text"),
        ("a.csv", "好,天\n".encode(), "a.csv:1: found the header '好,天', wanted a header with label and text"),
        ("a.csv", b"label,text\n", "a.csv:1: found no rows"),
        ("a.csv", 'label,text\n好,"一\n二"\n坏\n'.encode(), r"a.csv:4: found 1 column\(s\), wanted 2 columns"),
        ("a.csv", 'label,text\n好,天\n坏,"地\n'.encode(), "a.csv:3: found no CSV"),
        ("a.csv", "label,text\n好,\n".encode(), "a.csv:2: found an empty text"),
        ("a.txt", "好\t天\n".encode(), "ends in '.txt': wanted one of .tsv, .jsonl, .json, .csv"),
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_with_its_line(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(TaskError, match=message) as refused:
        read_rows(folder / name, ["好", "坏"])
    assert str(refused.value).startswith(str(folder / name))


def test_a_split_is_one_file(folder: Path) -> None:
    with pytest.raises(
        TaskError, match=r"has none of them: wanted one of train.tsv, train.jsonl, train.json,"
    ):
        find_rows(folder, "train")
    (folder / "train.csv").touch()
    assert find_rows(folder, "train") == folder / "train.csv"
    (folder / "train.tsv").touch()
    with pytest.raises(TaskError, match=r"has train.tsv and train.csv: wanted one"):
        find_rows(folder, "train")
    with pytest.raises(TaskError, match="no folder nowhere for the data, from /"):
        find_rows(Path("nowhere"), "train")


def test_the_shipped_sentences_are_enough_and_of_all_emotions() -> None:
    counts = {split: Counter(row.label for row in shipped(split)) for split in SPLITS}
    assert sum(sum(count.values()) for count in counts.values()) >= 1200
    for count in counts.values():
        assert set(count) == set(EMOTIONS)
        assert max(count.values()) < 1.2 * min(count.values())
    assert all(4 <= len(row.text) <= 40 for split in SPLITS for row in shipped(split))


def test_no_shipped_sentence_is_there_twice_nor_nearly() -> None:
    seen = Counter(bare(row) for split in SPLITS for row in shipped(split))
    assert [sentence for sentence, num in seen.items() if num > 1] == []
    pairs = {each: {each[i : i + 2] for i in range(len(each) - 1)} for each in seen}
    train = [pairs[bare(row)] for row in shipped("train")]
    for split in ("dev", "test"):
        for row in shipped(split):
            own = pairs[bare(row)]
            assert max(len(own & other) / len(own | other) for other in train) < 0.5, row


def test_the_shipped_rows_are_mixed() -> None:
    for split in SPLITS:
        labels = [row.label for row in shipped(split)]
        assert max(Counter(labels[:60]).values()) < 30


def test_a_bag_of_characters_learns_the_emotions_but_not_all() -> None:
    sklearn = pytest.importorskip("sklearn")
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    assert sklearn
    train, test = shipped("train"), shipped("test")
    bag = CountVectorizer(analyzer="char")
    linear = LogisticRegression(max_iter=500).fit(
        bag.fit_transform(row.text for row in train), [row.label for row in train]
    )
    accuracy = linear.score(bag.transform(row.text for row in test), [row.label for row in test])
    assert 0.6 < accuracy < 0.95


def test_without_transformers_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from nodekit.training.tasks import TaskError, load_task\n"
        "try: load_task('text')\n"
        "except TaskError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "the task text needs transformers: pip install 'nodekit[text]'\n", done.stderr


def test_the_task_is_found_by_its_name_and_gives_what_a_task_gives(text: Text) -> None:
    task = load_task("text")
    assert isinstance(task, Task)
    assert isinstance(task, Text)
    assert task.labels == EMOTIONS
    splits = (task.train_data(), task.test_data(), task.final_data())
    for split, samples in zip(SPLITS, splits, strict=True):
        assert [Row(EMOTIONS[label], sentence) for sentence, label in samples] == shipped(split)


def test_a_batch_is_padded_to_its_longest_and_cut_at_max_length(text: Text) -> None:
    batch = text.collate([("真好", 5), ("今天下雨", 0)])
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (2, 6), "token_type_ids": (2, 6), "attention_mask": (2, 6), "labels": (2,)
    }  # fmt: skip
    assert type(batch) is dict
    assert batch["attention_mask"].sum(1).tolist() == [4, 6]
    assert batch["input_ids"][0, 4:].tolist() == [SPECIAL_TOKENS.index("[PAD]")] * 2
    assert batch["labels"].tolist() == [5, 0]
    assert text.encode(["好" * 100])["input_ids"].shape == (1, 64)


def test_a_texts_scores_do_not_depend_on_what_it_was_padded_with(text: Text) -> None:
    model = text.model().eval()
    with torch.no_grad():
        alone = text.predict(model, text.encode(["真好"]))
        padded = text.predict(model, text.encode(["真好", "今天一直在下雨"]))[:1]
    assert alone.shape == (1, 6)
    torch.testing.assert_close(alone, padded)


def test_the_small_models_weights_follow_from_the_seed(text: Text) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([each.detach().flatten() for each in text.model().parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_the_vocabulary_is_the_training_texts_characters(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "train.tsv").write_text("a\t看 GOOD 书\nb\t3月\n", encoding="utf-8")
    (folder / "dev.jsonl").write_text('{"label": "b", "text": "看"}\n', encoding="utf-8")
    task = Text(data=folder)
    tokens = task.tokenizer.convert_ids_to_tokens(range(len(task.tokenizer)))
    assert tokens == [*SPECIAL_TOKENS, "##d", "##o", "3", "g", "书", "月", "看"]
    assert task.tokenizer.tokenize("看good书吗") == ["看", "g", "##o", "##o", "##d", "书", "[UNK]"]
    assert task.labels == ("a", "b")
    assert task.test_data() == [("看", 1)]
    with pytest.raises(TaskError, match=r"the data has no test split: wanted test\.tsv"):
        task.final_data()
    (folder / "dev.jsonl").write_text('{"label": "c", "text": "看"}\n', encoding="utf-8")
    with pytest.raises(TaskError, match=r"dev.jsonl:1: found the label 'c', wanted one of a, b"):
        Text(data=folder)


def trained(task: Text, *, num_epochs: int) -> torch.nn.Module:
    """A model after some epochs of a plain loop."""
    torch.manual_seed(0)
    model, data = task.model().train(), task.train_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for _ in range(num_epochs):
        for places in torch.randperm(len(data)).split(32):
            task.loss(model, task.collate([data[i] for i in places.tolist()])).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def test_some_epochs_teach_it_much_more_than_chance_and_what_it_saves_is_plain_bert(
    text: Text, folder: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    batch = text.collate(text.final_data())

    @torch.no_grad()
    def accuracy(model: torch.nn.Module) -> float:
        return float((text.predict(model, batch).argmax(1) == text.targets(batch)).float().mean())

    assert accuracy(text.model().eval()) < 0.3
    model = trained(text, num_epochs=5)
    assert accuracy(model) > 0.5

    write_weights(folder, model.state_dict(), text, {"task": "text"})
    sentences = [sentence for sentence, _ in text.final_data()[:20]]
    plain = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    assert plain.config.id2label == dict(enumerate(EMOTIONS))
    ours = text.predict(model, text.encode(sentences))
    for kind in (transformers.AutoTokenizer, transformers.BertTokenizer):
        tokenizer = kind.from_pretrained(folder)
        encoded = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
        assert torch.equal(plain(**encoded).logits, ours)
    assert (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:5] == list(SPECIAL_TOKENS)

    again = Text(model=folder)
    torch.testing.assert_close(again.predict(again.model().eval(), again.encode(sentences)), ours)


def small_bert(text: Text, folder: Path, **changes: Any) -> Path:
    """A model of the task's, with its configuration changed."""
    write_weights(folder, text.model().state_dict(), text, {"task": "text"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_trained_models_own_order_of_the_labels_is_kept(text: Text, folder: Path) -> None:
    names = tuple(reversed(EMOTIONS))
    task = Text(model=small_bert(text, folder, id2label=dict(enumerate(names))))
    assert task.labels == names
    assert [Row(names[label], sentence) for sentence, label in task.test_data()] == shipped("dev")


def test_of_a_model_of_another_task_all_but_the_last_layer_is_taken_if_that_is_asked_for(
    text: Text, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_bert(text, folder / "model")
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("好\t天晴\n坏\t下雨\n", encoding="utf-8")
    with pytest.raises(
        TaskError,
        match=r"classifier\.bias: \(2,\) here, \(6,\) there; .*: \(2, 128\) here, .*--ignore-mismatched",
    ):
        Text(data=folder, model=model).model()
    task = load_task("text", data=folder, model=model, ignore_mismatched_sizes=True)
    assert isinstance(task, Text)
    module = task.model()
    assert task.predict(module, task.encode(["天"])).shape == (1, 2)
    kept = torch.load(model / "pytorch_model.bin", weights_only=True)
    assert all(
        torch.equal(value, kept[name])
        for name, value in module.state_dict().items()
        if "classifier" not in name
    )
    assert [record.message.split("\n") for record in caplog.records] == [
        [
            f"of the model {model} these were left out, and are random:",
            "  classifier.bias: (2,) here, (6,) there",
            "  classifier.weight: (2, 128) here, (6, 128) there",
        ]
    ]
    with pytest.raises(TaskError, match=r"digits takes no --ignore-mismatched-sizes"):
        load_task("digits", ignore_mismatched_sizes=True)
    assert load_task("digits", ignore_mismatched_sizes=False)


def test_a_model_that_does_not_fit_is_refused(
    text: Text, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TaskError, match=r"no folder \./nowhere for the model, from /"):
        Text(model="./nowhere")
    with pytest.raises(TaskError, match=r"gives no configuration: wanted config.json, model.safetensors"):
        Text(model=folder)
    with pytest.raises(TaskError, match=r"max_length is 65 and the model .* takes 64 tokens at most"):
        Text(model=small_bert(text, folder), max_length=65)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(TaskError, match=r"gives no model: wanted config.json, model.safetensors"):
        Text(model=folder).model()
    for path in [*folder.glob("vocab*"), *folder.glob("tokenizer*")]:
        path.unlink()
    with pytest.raises(TaskError, match=r"gives no tokenizer: wanted|wanted a vocab.txt or tokenizer.json"):
        Text(model=folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(TaskError, match="is of the type 'gpt2': wanted 'bert'"):
        Text(model=folder)


def test_a_hub_name_that_cannot_be_had_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # else it tries again for half a minute
    with pytest.raises(
        TaskError, match=r"no configuration of the model 'nobody/no-bert': .* \(`hf download nobody/no-"
    ):
        Text(model="nobody/no-bert")
