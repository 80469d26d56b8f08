"""Classification of text with BERT, one from a folder or the hub, or a small one; by default six emotions."""

import importlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from nodekit.training.tasks import TaskError
from nodekit.training.tasks.rows import find_rows, read_rows

EMOTIONS = ("其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴")
"""The labels of the sentences that are shipped: other, liking, sadness, disgust, anger, joy."""

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Sample = tuple[str, int]
"""A text and its label's place in ``Text.labels``."""

Batch = dict[str, torch.Tensor]
"""``input_ids``, ``token_type_ids``, ``attention_mask``: int64 ``(num, longest)``; ``labels``: int64 ``(num,)``."""


class Text:
    """Sentences and ``BertForSequenceClassification``; on the emotions it reaches some 75 % in a minute on one core.

    A BERT that was trained before wants a smaller learning rate than ``--lr``'s default, such as 3e-5.
    """

    def __init__(
        self, *, data: str | Path | None = None, model: str | Path | None = None, max_length: int = 64
    ) -> None:
        """Read the data and make the tokenizer.

        Args:
            data: a folder with train, dev and test (the last may be absent) as .tsv, .jsonl or .csv; see ``rows``.
                Absent: the emotions.
            model: a BERT's folder, or its name at the hub. Absent: a small one with random weights, whose vocabulary
                is the characters of the training texts.
            max_length: tokens per text, [CLS] and [SEP] included; what is longer is cut.

        Raises:
            TaskError: transformers is not installed, or a row of the data or the model is not as it should be.
        """
        self._transformers = _transformers()
        self._name = None if model is None else str(model)
        self.max_length = max_length
        config = None if self._name is None else self._config(self._name)
        folder = Path(__file__).parent / "emotions" if data is None else Path(data)
        train = read_rows(find_rows(folder, "train"), EMOTIONS if data is None else None)
        self.labels = _labels({row.label for row in train}, config)
        self._data = {"train": [(row.text, self.labels.index(row.label)) for row in train]}
        for split in ("dev", "test") if any(folder.glob("test.*")) else ("dev",):
            rows = read_rows(find_rows(folder, split), self.labels)
            self._data[split] = [(row.text, self.labels.index(row.label)) for row in rows]
        self.tokenizer = (
            self._character_tokenizer(row.text for row in train)
            if self._name is None
            else self._load("tokenizer", self._transformers.AutoTokenizer, self._name)
        )
        # transformers gives one without a vocabulary, rather than an error, where there are no files for it.
        if config is not None and not len(SPECIAL_TOKENS) < len(self.tokenizer) <= config.vocab_size:
            raise TaskError(
                f"the tokenizer of {self._name} has {len(self.tokenizer)} tokens and the model {config.vocab_size}: "
                "wanted a vocab.txt or tokenizer.json of the same model"
            )

    def model(self) -> nn.Module:
        """A ``BertForSequenceClassification``; what is random in it comes from torch's global generator.

        Raises:
            TaskError: the model's weights cannot be had.
        """
        bert = self._transformers.BertForSequenceClassification
        names = dict(enumerate(self.labels))
        settings: dict[str, Any] = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
        if self._name is not None:
            # A last layer of another task's size is replaced by a random one.
            module = self._load("model", bert, self._name, ignore_mismatched_sizes=True, **settings)
            return cast(nn.Module, module.train())
        config = self._transformers.BertConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=self.max_length,
            **settings,
        )
        return cast(nn.Module, bert(config))

    def train_data(self) -> list[Sample]:
        """What to train on; of the emotions 1,088."""
        return self._data["train"]

    def test_data(self) -> list[Sample]:
        """The dev split, since it is looked at after each epoch; of the emotions 204."""
        return self._data["dev"]

    def final_data(self) -> list[Sample]:
        """The test split, for the end; of the emotions 204.

        Raises:
            TaskError: the data has none.
        """
        if "test" not in self._data:
            raise TaskError(
                "the data has no test split: wanted test.tsv, test.jsonl or test.csv next to train"
            )
        return self._data["test"]

    def encode(self, texts: Sequence[str]) -> Batch:
        """The texts as the model takes them, without ``labels``; padded to the longest of them."""
        encoded = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        return dict(encoded)  # a plain one, which the loop can move to the GPU

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """A batch of samples, with ``labels``."""
        texts, labels = zip(*samples, strict=True)
        return {**self.encode(texts), "labels": torch.tensor(labels)}

    def predict(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The scores before softmax, float32 ``(num, len(labels))``; ``.argmax(1)`` gives places in ``labels``."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return cast(torch.Tensor, model(**inputs).logits).float()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross-entropy, the mean over the batch."""
        return functional.cross_entropy(self.predict(model, batch), batch["labels"])

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor | float]:
        """How many are right, and the sum of the losses."""
        scores = self.predict(model, batch)
        return {
            "accuracy": (scores.argmax(1) == batch["labels"]).sum(),
            "loss": functional.cross_entropy(scores, batch["labels"], reduction="sum"),
        }

    def save(self, model: nn.Module, folder: str | Path) -> None:
        """Write weights, configuration and vocabulary to a folder that transformers' ``from_pretrained`` reads.

        ``model`` is what ``model()`` gave, not wrapped in DDP.
        """
        cast(Any, model).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        # transformers 5 writes tokenizer.json alone; older readers of BERT want this.
        Path(folder, "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")

    def _config(self, name: str) -> Any:
        """The configuration, before all else: a name that is wrong should not have to wait for the rest."""
        config = self._load("configuration", self._transformers.AutoConfig, name)
        if config.model_type != "bert":
            raise TaskError(f"the model {name} is of the type {config.model_type!r}: wanted 'bert'")
        if self.max_length > config.max_position_embeddings:
            raise TaskError(
                f"max_length is {self.max_length} and the model {name} takes {config.max_position_embeddings} "
                "tokens at most: wanted that or less"
            )
        return config

    def _load(self, what: str, kind: Any, name: str, **settings: Any) -> Any:
        if not Path(name).is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
            raise TaskError(f"no folder {name} for the model, from {Path.cwd()}")
        try:
            return kind.from_pretrained(name, **settings)
        except (OSError, TypeError, ValueError) as error:  # transformers 4: TypeError for no vocab.txt
            if Path(name).is_dir():
                wanted = "wanted config.json, model.safetensors (or pytorch_model.bin) and vocab.txt"
                raise TaskError(f"the folder {name} gives no {what}: {wanted} ({error})") from error
            raise TaskError(
                f"no {what} of the model {name!r}: there is no such folder in {Path.cwd()}, and from the hub it "
                "cannot be had: check the name, or download it where there is a network (`hf download "
                f"{name} --local-dir FOLDER`) and give the folder ({str(error).splitlines()[0]})"
            ) from error

    def _character_tokenizer(self, texts: Iterable[str]) -> Any:
        """A BERT tokenizer whose words are single characters; within Latin words and numbers they begin with ##."""
        make = self._transformers.BertTokenizerFast
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "vocab.txt")
            path.write_text("\n".join(SPECIAL_TOKENS), encoding="utf-8")
            backend = make(str(path)).backend_tokenizer
            tokens = set()
            for text in texts:  # cut into words as the tokenizer itself does it
                for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
                    tokens.add(word[0])
                    tokens.update(f"##{character}" for character in word[1:])
            path.write_text("\n".join([*SPECIAL_TOKENS, *sorted(tokens)]), encoding="utf-8")
            return make(str(path), model_max_length=self.max_length)


def _transformers() -> Any:
    """Imported late, since it is large, and no other task needs it."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise TaskError("the task text needs transformers: pip install 'nodekit[text]'") from error


def _labels(found: set[str], config: Any) -> tuple[str, ...]:
    """The labels in an order that is the same in every run and, for a model trained on them before, that model's."""
    if config is not None and set(config.id2label.values()) == found:
        return tuple(config.id2label[i] for i in range(len(found)))
    return EMOTIONS if found == set(EMOTIONS) else tuple(sorted(found))
