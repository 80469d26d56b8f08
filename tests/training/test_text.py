"""The task text: rows of all formats and what is wrong with them, the shipped sentences, training and saving."""

import json
import re
import shutil
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import train

from nodekit.training import Task
from nodekit.training.apply import load
from nodekit.training.tasks import TaskError, load_task, rows
from nodekit.training.tasks.rows import Row, find_rows, read_rows, read_splits
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
        ("a.txt", '好\t天晴了，真好\n坏\tsay "no", twice\n'),
        ("a.json", '[["天晴了，真好", "好"],\n ["say \\"no\\", twice", "坏"]]\n'),
        (
            "a.json",
            '\ufeff[\n {"text": "天晴了，真好", "label": "好"}, {"label": "坏", "content": "say \\"no\\", twice"}\n]',
        ),
        ("a.json", '["天晴了，真好", "好"]\n["say \\"no\\", twice", "坏"]\n'),
        ("a.jsonl", '["天晴了，真好", "好"]\n{"text": "say \\"no\\", twice", "label": "坏"}\n'),
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
        ("a.jsonl", b'[{"label": "1", "text": "x"}]', r'a.jsonl:1: found .*, wanted {"label": .*} or \[text, label\]'),
        ("a.json", '[["天", "好"], ["地"]]'.encode(), r"""a.json:item 2: found '\["地"\]', wanted {"label": .*\]"""),
        ("a.json", '[["天", "好"], ["地", "差"]]'.encode(), "json:item 2: found the label '差', wanted one of 好, 坏"),
        ("a.json", '[["天", "好"],\n ["地" "坏"]]'.encode(), "a.json:2: found no JSON .*, wanted an array of"),
        ("a.json", b"[]", "a.json:1: found no rows"),
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
        ("a.xls", "好\t天\n".encode(), "ends in '.xls': wanted one of .tsv, .txt, .jsonl, .json, .csv"),
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_with_its_line(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(TaskError, match=message) as refused:
        read_rows(folder / name, ["好", "坏"])
    assert str(refused.value).startswith(str(folder / name))


def test_a_split_is_one_file(folder: Path) -> None:
    with pytest.raises(
        TaskError, match=r"has none of them: wanted one of train.tsv, train.txt, train.jsonl, train.json,"
    ):
        find_rows(folder, "train")
    (folder / "train.csv").touch()
    assert find_rows(folder, "train") == folder / "train.csv"
    (folder / "train.tsv").touch()
    with pytest.raises(TaskError, match=r"has train.csv and train.tsv: wanted one"):
        find_rows(folder, "train")
    with pytest.raises(TaskError, match="no folder nowhere for the data, from /"):
        find_rows(Path("nowhere"), "train")


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (("cnews.train.txt", "cnews.val.txt", "cnews.test.txt"), ("cnews.vocab.txt", "._cnews.train.txt")),
        (("train.tsv", "valid.json", "test.csv"), ("old_train.tsv", "train.tsv~")),
        (("my-train.csv", "validation.tsv", "my-test.jsonl"), ("trains.csv", "contest.txt")),
    ],
)
def test_the_splits_are_found_by_the_names_that_they_have(
    folder: Path, names: tuple[str, ...], others: tuple[str, ...]
) -> None:
    for name in (*names, *others):
        (folder / name).touch()
    assert [find_rows(folder, split).name for split in SPLITS] == list(names)


def test_without_a_dev_split_a_share_of_train_is_held_out_always_the_same(folder: Path) -> None:
    """The layout of the tutorials' emotions: one train.json, an array of [text, number of the label]."""
    pairs = [[f"第 {number} 句", number % 6] for number in range(100)]
    (folder / "train.json").write_text(json.dumps(pairs), encoding="utf-8")
    splits = read_splits(folder)
    assert splits == read_splits(folder)
    assert {split: len(found) for split, found in splits.items()} == {"train": 92, "dev": 8}
    everything = [Row(str(label), text) for text, label in pairs]
    assert sorted(splits["train"] + splits["dev"], key=everything.index) == everything
    assert splits["dev"] != everything[-8:]

    (folder / "labels.txt").write_text("\n".join(EMOTIONS) + "\n", encoding="utf-8")
    named = read_splits(folder)
    assert [row.text for row in named["dev"]] == [row.text for row in splits["dev"]]
    assert [row.label for row in named["dev"]] == [EMOTIONS[int(row.label)] for row in splits["dev"]]
    (folder / "labels.txt").write_text("其他\n喜好\n", encoding="utf-8")
    with pytest.raises(TaskError, match=r"train.json:item 3: found the label '2', wanted one of 其他, 喜好"):
        read_splits(folder)
    (folder / "labels.txt").unlink()
    (folder / "train.json").write_text('[["x", 1]]')
    with pytest.raises(TaskError, match=r"has one row, and .* no dev split: wanted more rows, or dev.tsv"):
        read_splits(folder)


def test_text_and_label_the_other_way_round_are_told(folder: Path) -> None:
    (folder / "train.txt").write_text("".join(f"第 {n} 句\t{n % 3}\n" for n in range(100)), encoding="utf-8")
    with pytest.raises(
        TaskError, match=r"train.txt has 100 labels and 3 texts: they seem to be the other way round"
    ):
        read_splits(folder)


def test_labels_that_are_numbers_are_in_their_order(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "cnews.train.txt").write_text("".join(f"{n}\t第 {n} 句\n" for n in range(12)), encoding="utf-8")
    (folder / "cnews.val.txt").write_text("10\t句\n", encoding="utf-8")
    task = Text(data=folder)
    assert task.labels == tuple(map(str, range(12)))
    assert task.test_data() == [("句", 10)]
    assert task.notes() == []


def test_of_many_texts_it_is_estimated_how_many_are_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("nodekit.training.tasks.text._MOST_COUNTED", 3)
    words = ["abcdefgh"] * 4 + ["ab  cd"] * 4  # ten tokens; six, of six characters
    (folder / "train.tsv").write_text("".join(f"a\t{text}\n" for text in words), encoding="utf-8")
    (folder / "dev.tsv").write_text("a\t好\n", encoding="utf-8")
    assert Text(data=folder, max_length=7).notes() == [
        "about 5 of 8 train texts (62.5%) are cut at --max-length 7 tokens"
    ]


def test_how_many_texts_are_cut_is_told(folder: Path) -> None:
    pytest.importorskip("transformers")
    # With [CLS] and [SEP] 8, 9, 4 and 10 tokens, the last ones' after much white space.
    texts = ["好" * 6, "好" * 7, "好" + " " * 100 + "好", "好好" + " " * 100 + "好" * 6]
    (folder / "train.tsv").write_text("".join(f"a\t{text}\n" for text in texts), encoding="utf-8")
    (folder / "dev.tsv").write_text("a\t好\n", encoding="utf-8")
    assert Text(data=folder, max_length=8).notes() == [
        "2 of 4 train texts (50.0%) are cut at --max-length 8 tokens"
    ]
    assert Text(data=folder, max_length=10).notes() == []
    (folder / "dev.tsv").unlink()
    assert Text(data=folder, max_length=10).notes() == [
        "the data has no dev split: 8% of train's rows (1) are held out for it"
    ]


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
    assert done.stdout == "the task text needs transformers: pip install transformers\n", done.stderr


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_tutorials_own_file_is_trained_and_its_weights_are_used_as_they_were_trained(
    text: Text, folder: Path
) -> None:
    pairs = [[" ".join(row.text), EMOTIONS.index(row.label)] for row in shipped("train")[:300]]
    (folder / "data").mkdir()
    (folder / "data" / "train.json").write_text(json.dumps(pairs, ensure_ascii=False), encoding="utf-8")
    (folder / "data" / "labels.txt").write_text("\n".join(EMOTIONS), encoding="utf-8")
    own = ["--data", str(folder / "data"), "--max-length", "16", "--eval-batch-size", "30", "--seed", "123"]
    said = train(folder / "out", "--task", "text", "--epochs", "1", *own, "--no-pin-memory")
    notes = json.loads((folder / "out" / "result.json").read_text())["notes"].split("; ")
    assert notes[0] == "the data has no dev split: 8% of train's rows (24) are held out for it"
    assert re.fullmatch(r"\d+ of 276 train texts \([\d.]+%\) are cut at --max-length 16 tokens", notes[1])
    assert len(notes) == 3
    for note in notes:
        assert f"note: {note}\n" in said
    found, _, facts = load(folder / "out" / "best")
    assert isinstance(found, Text)
    assert (found.max_length, found.labels, facts["notes"]) == (16, EMOTIONS, notes)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_in_half_precision_is_trained_in_full(folder: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    text = Text()  # of its own: what is saved in half precision has its configuration say so
    bert = text.model().to(dtype)
    bert.save_pretrained(folder)
    text.tokenizer.save_pretrained(folder)
    task = Text(model=folder)
    module = task.model()
    assert {each.dtype for each in module.parameters()} == {torch.float32}
    assert torch.equal(next(module.parameters()), next(bert.parameters()).float())
    task.export(folder)
    assert Text(model=folder).model().dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


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
