"""The task text: classify texts by a pretrained or a small BERT; the default data are sentences of six emotions."""

import importlib
import logging
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from nodekit.training.tasks import TaskError
from nodekit.training.tasks.rows import HELD_OUT, has_rows, read_splits
from nodekit.training.weights.export import difference

EMOTIONS = ("其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴")
"""The labels of kit's own sentences: other, liking, sadness, disgust, anger, joy."""

_log = logging.getLogger("nodekit.training")

_IDEOGRAPH = re.compile("[\u4e00-\u9fff]")  # for BERT's tokenizers, each ideograph is a word
_MOST_COUNTED = 5000
"""The most texts that are tokenized to count how many are cut; of more texts, about so many are a sample."""

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Sample = tuple[str, int]
"""A text and its label's index in ``Text.labels``."""

Batch = dict[str, torch.Tensor]
"""``input_ids``, ``token_type_ids``, ``attention_mask``: int64 ``(num, longest)``; ``labels``: int64 ``(num,)``."""


class Text:
    """Texts and ``BertForSequenceClassification``; reaches some 75 % accuracy on the emotions in a minute on one core.

    A pretrained BERT needs a smaller learning rate than ``--lr``'s default, such as 3e-5.
    """

    def __init__(
        self,
        *,
        data: str | Path | None = None,
        model: str | Path | None = None,
        ignore_mismatched_sizes: bool = False,
        max_length: int = 64,
    ) -> None:
        """Read the data and create the tokenizer.

        Args:
            data: a folder with train, dev and test as .tsv, .txt, .json, .jsonl or .csv; see ``rows``. Without dev, a
                share of train is held out. None: the emotions.
            model: a BERT's folder, or its name at the hub. None: a small BERT with random weights, whose vocabulary is
                the characters of the training texts.
            ignore_mismatched_sizes: load only the weights of ``model`` whose shapes fit, and list the others.
            max_length: the most tokens per text, [CLS] and [SEP] included; longer texts are cut.

        Raises:
            TaskError: transformers is not installed, or a row of the data or the model is invalid.
        """
        self._transformers = _transformers()
        self._name = None if model is None else str(model)
        self.max_length = max_length
        self._ignore_mismatched_sizes = ignore_mismatched_sizes
        config = None if self._name is None else self._config(self._name)
        folder = Path(__file__).parent / "emotions" if data is None else Path(data)
        splits = read_splits(folder, EMOTIONS if data is None else None)
        self._is_held_out = not has_rows(folder, "dev")
        self.labels = _labels({row.label for rows in splits.values() for row in rows}, config)
        self._data = {
            split: [(row.text, self.labels.index(row.label)) for row in rows]
            for split, rows in splits.items()
        }
        self.tokenizer = (
            self._character_tokenizer(row.text for row in splits["train"])
            if self._name is None
            else self._load("tokenizer", self._transformers.AutoTokenizer, self._name)
        )
        # If a tokenizer's files are missing, transformers makes one without a vocabulary instead of raising an error.
        if config is not None and not len(SPECIAL_TOKENS) < len(self.tokenizer) <= config.vocab_size:
            raise TaskError(
                f"the tokenizer of {self._name} has {len(self.tokenizer)} tokens and the model {config.vocab_size}: "
                "wanted a vocab.txt or tokenizer.json of the same model"
            )
        self._bert = config or self._transformers.BertConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=max_length,
        )
        self._bert.architectures = ["BertForSequenceClassification"]
        self._bert.id2label = dict(enumerate(self.labels))
        self._bert.label2id = {name: i for i, name in enumerate(self.labels)}

    def model(self) -> nn.Module:
        """Return a ``BertForSequenceClassification``; random weights come from torch's global generator.

        Raises:
            TaskError: the pretrained weights cannot be loaded, or do not fit and ``ignore_mismatched_sizes`` is False.
        """
        bert = self._transformers.BertForSequenceClassification
        if self._name is None:
            return cast(nn.Module, bert(self._bert))
        says = self._transformers.utils.logging
        verbosity = says.get_verbosity()
        says.set_verbosity_error()  # each rank would print a table of the weights that are listed once below
        try:
            module, found = self._load(
                "model",
                bert,
                self._name,
                config=self._bert,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        finally:
            says.set_verbosity(verbosity)
        module.float()  # transformers 5 keeps the checkpoint's dtype; weights in half precision do not train
        self._bert.dtype = module.dtype
        shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        other = [difference(name, here, there) for name, there, here in sorted(found["mismatched_keys"])]
        if other and not self._ignore_mismatched_sizes:
            raise TaskError(
                f"the model {self._name} has other shapes: {'; '.join(other[:3])}{'; …' if len(other) > 3 else ''}; "
                "--ignore-mismatched-sizes leaves them out, for random ones, and takes the rest"
            )
        other += [difference(name, shapes.get(name), None) for name in sorted(found["missing_keys"])]
        if other and (not dist.is_initialized() or dist.get_rank() == 0):
            listed = "\n  ".join(other)
            _log.warning("of the model %s these were left out, and are random:\n  %s", self._name, listed)
        return cast(nn.Module, module.train())

    def train_data(self) -> list[Sample]:
        """Return the train split; 1,088 samples of the emotions."""
        return self._data["train"]

    def test_data(self) -> list[Sample]:
        """Return the dev split, for the evaluation after each epoch; 204 samples of the emotions."""
        return self._data["dev"]

    def final_data(self) -> list[Sample]:
        """Return the test split, for `kit test`; 204 samples of the emotions.

        Raises:
            TaskError: the data has no test split.
        """
        if "test" not in self._data:
            raise TaskError(
                "the data has no test split: wanted test.tsv, .txt, .json, .jsonl or .csv next to train"
            )
        return self._data["test"]

    def notes(self) -> list[str]:
        """Return remarks if dev was taken from train, and on how many texts are cut."""
        notes = []
        if self._is_held_out:
            num = len(self._data["dev"])
            notes.append(
                f"the data has no dev split: {HELD_OUT:.0%} of train's rows ({num:,}) are held out for it"
            )
        for split, samples in self._data.items():
            num, is_exact = self._num_cut([text for text, _ in samples])
            if num:
                notes.append(
                    f"{'' if is_exact else 'about '}{num:,} of {len(samples):,} {split} texts "
                    f"({num / len(samples):.1%}) are cut at --max-length {self.max_length} tokens"
                )
        return notes

    def encode(self, texts: Sequence[str]) -> Batch:
        """Return texts as input for the model, without ``labels``, padded to the longest."""
        encoded = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        return dict(encoded)  # a plain dict, which the loop can move to the GPU

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return samples as a batch, with ``labels``."""
        texts, labels = zip(*samples, strict=True)
        return {**self.encode(texts), "labels": torch.tensor(labels)}

    def predict(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the scores before softmax, float32 ``(num, len(labels))``; ``.argmax(1)`` gives indices of labels."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return cast(torch.Tensor, model(**inputs).logits).float()

    def targets(self, batch: Batch) -> torch.Tensor:
        """Return the right indices into ``labels``, int64 ``(num,)``."""
        return batch["labels"]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy, the mean over the batch."""
        return functional.cross_entropy(self.predict(model, batch), batch["labels"])

    def export(self, folder: Path) -> None:
        """Write configuration and vocabulary, for transformers' ``from_pretrained``."""
        self._bert.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        # transformers 5 writes tokenizer.json only; older readers of BERT need vocab.txt.
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")

    def _config(self, name: str) -> Any:
        """Return a model's configuration, loaded first of its files so that a wrong name is reported soon."""
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

    def _num_cut(self, texts: Sequence[str]) -> tuple[int, bool]:
        """Return how many texts have more than ``max_length`` tokens, and whether the number is exact."""
        num, unsure = 0, list[str]()
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        splits_ideographs = getattr(getattr(backend, "normalizer", None), "handle_chinese_chars", False)
        for text in texts:
            if len(text) + 2 <= self.max_length:  # with [CLS] and [SEP]; a token has one character or more
                continue
            # An ideograph is a token, and a word is one or more: counting these is faster than tokenizing.
            start = text[: 4 * self.max_length]
            if splits_ideographs and len(_IDEOGRAPH.sub(" x ", start).split()) + 2 > self.max_length:
                num += 1
            else:
                unsure.append(text)
        tried = unsure[:: -(-len(unsure) // _MOST_COUNTED) or 1]
        num_tried = sum(size > self.max_length for size in self._num_tokens(tried))
        return num + round(num_tried * len(unsure) / max(1, len(tried))), len(tried) == len(unsure)

    def _num_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self.tokenizer(list(texts), verbose=False)["input_ids"]] if texts else []

    def _character_tokenizer(self, texts: Iterable[str]) -> Any:
        """Return a BERT tokenizer of single characters; within Latin words and numbers, tokens begin with ##."""
        make = self._transformers.BertTokenizerFast
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "vocab.txt")
            path.write_text("\n".join(SPECIAL_TOKENS), encoding="utf-8")
            backend = make(str(path)).backend_tokenizer
            characters, others = set[str](), set[str]()
            for text in texts:
                characters.update(text)
                others.update(_IDEOGRAPH.sub(" ", text).split(" "))
            tokens = set(filter(_IDEOGRAPH.fullmatch, characters))
            for text in others:  # each once, since splitting into words as the tokenizer does takes long
                for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
                    tokens.add(word[0])
                    tokens.update(f"##{character}" for character in word[1:])
            path.write_text("\n".join([*SPECIAL_TOKENS, *sorted(tokens)]), encoding="utf-8")
            return make(str(path), model_max_length=self.max_length)


def _transformers() -> Any:
    """Import transformers, which is large, for this task only.

    Raises:
        TaskError: transformers is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise TaskError("the task text needs transformers: pip install transformers") from error


def _labels(found: set[str], config: Any) -> tuple[str, ...]:
    """Return the labels in an order that is the same in every run: the model's, if it was trained on these labels."""
    if config is not None and set(config.id2label.values()) == found:
        return tuple(config.id2label[i] for i in range(len(found)))
    if found == set(EMOTIONS):
        return EMOTIONS
    # Sort numbers by value, so that 0, 1, … are also the indices of the model's outputs.
    return tuple(
        sorted(
            found, key=lambda label: (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)
        )
    )
