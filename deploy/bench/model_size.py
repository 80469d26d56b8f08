"""Number of a model's parameters: from a number, or a transformers config.json, without torch.

Computed by a formula for each architecture as transformers builds it. Of the heads only the language model's counts,
if its weights are not those of the embeddings.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodekit.inventory.errors import KitError

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\+?\d+)?)\s*([KMBGT]?)", re.IGNORECASE)
_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "ernie")
_GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "granite", "smollm3")


def num_parameters(model: str) -> int:
    """Parse ``110e6`` or ``7B``, or compute the number from a config.json or the folder that contains it.

    Raises:
        KitError: `model` is none of these, or there is no formula for its architecture.
    """
    if (found := _NUMBER.fullmatch(model.strip())) is not None:
        number = float(found[1].replace("_", "")) * _UNITS[found[2].upper()]
        if not 1 <= number < math.inf:
            raise KitError(f"--plan {model}: found no parameters", wanted="a number such as 110e6 or 7B")
        return round(number)
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KitError(
            f"--plan {model}: {error.strerror or error}",
            wanted="a number of parameters such as 110e6 or 7B, a transformers config.json or its folder, or "
            "`job` for the inventory's own model",
        ) from error
    except ValueError as error:
        raise KitError(f"{path}: found no JSON ({error})", wanted="a transformers config.json") from error
    if not isinstance(config, dict):
        raise KitError(
            f"{path}: found {type(config).__name__}", wanted="an object, as transformers writes it"
        )
    try:
        number = of_config(config)
        if number < 1:
            raise ValueError(f"found {number} parameters")
        return number
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise KitError(
            f"{path}: {what}", cure="give the number of parameters in its place, as --plan 110e6"
        ) from error


def of_config(config: Mapping[str, Any]) -> int:
    """Compute the number of parameters from the values of a transformers config.json.

    Raises:
        KeyError: a value is missing.
        ValueError: there is no formula for its ``model_type``.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(config)
    if kind in _ENCODERS:
        return _encoder(config)
    if kind == "distilbert":
        own = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "intermediate_size": "hidden_dim"}
        return _encoder(
            {**config, **{to: config[name] for to, name in own.items()}, "type_vocab_size": 0}, pooler=False
        )
    if kind in _GATED:
        return _gated(config)
    raise ValueError(
        f"there is no formula for the model_type {kind!r} (there is for {', '.join([*_ENCODERS, 'gpt2', *_GATED])})"
    )


def _encoder(config: Mapping[str, Any], *, pooler: bool = True) -> int:
    """Count embeddings, layers of attention and two feed-forward matrices, all with biases, and a pooler."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    rows = config["vocab_size"] + config["max_position_embeddings"] + config.get("type_vocab_size", 2)
    attention = 4 * (hidden * hidden + hidden)
    feed_forward = 2 * hidden * inner + inner + hidden
    layer = attention + feed_forward + 2 * 2 * hidden
    total = rows * hidden + 2 * hidden + config["num_hidden_layers"] * layer
    return int(total + (hidden * hidden + hidden if pooler else 0))


def _gpt2(config: Mapping[str, Any]) -> int:
    hidden = config["n_embd"]
    inner = config.get("n_inner") or 4 * hidden
    attention = 4 * (hidden * hidden + hidden)
    layer = attention + 2 * hidden * inner + inner + hidden + 2 * 2 * hidden
    rows = config["vocab_size"] + config["n_positions"]
    return int(rows * hidden + config["n_layer"] * layer + 2 * hidden)


def _gated(config: Mapping[str, Any]) -> int:
    """Count models like Llama: grouped key and value heads, three feed-forward matrices, perhaps several experts."""
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * heads * width + 2 * hidden * keys * width
    norms = 2 * hidden
    if kind == "qwen2":
        attention += heads * width + 2 * keys * width  # the biases of query, key and value
    if kind == "qwen3":
        norms += 2 * width  # norms of query and key
    if kind == "gemma2":
        norms += 2 * hidden
    experts = config.get("num_local_experts", 1)
    feed_forward = experts * 3 * hidden * inner + (hidden * experts if experts > 1 else 0)
    tied = config.get("tie_word_embeddings", kind.startswith("gemma"))
    embeddings = config["vocab_size"] * hidden * (1 if tied else 2)
    return int(embeddings + config["num_hidden_layers"] * (attention + feed_forward + norms) + hidden)
