"""Weights for others: what a folder holds, what a kill leaves of it, what is refused, and loading a part."""

import builtins
import errno
import json
import multiprocessing
import os
import re
import signal
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import until
from torch import nn

from nodekit.training.errors import TrainingError
from nodekit.training.tasks.digits import Digits
from nodekit.training.weights import export
from nodekit.training.weights.digest import weights_sha256
from nodekit.training.weights.export import load_weights, read_facts, read_weights, write_weights

DIGITS = Digits()


def layer(value: float = 0.0, *, num_outputs: int = 3) -> nn.Module:
    """Two layers of one value, the last of another size if asked for."""
    module = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, num_outputs)))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def test_a_folder_is_what_plain_torch_reads_and_says_what_it_is_of(tmp_path: Path) -> None:
    folder = tmp_path / "it's $HOME" / "best"
    module = DIGITS.model()
    whole = torch.zeros(1000, 10)
    weights = {**module.state_dict(), "view": whole[3:5]}
    write_weights(folder, weights, DIGITS, {"task": "digits", "step": 7})
    plain = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert list(plain) == list(weights)
    assert all(torch.equal(plain[name], value) for name, value in weights.items())
    assert plain["view"].untyped_storage().nbytes() == 2 * 10 * 4
    assert not any(each.requires_grad for each in plain.values())
    facts = read_facts(folder)
    assert facts == {**facts, "task": "digits", "step": 7, "num_classes": 10, "labels": list("0123456789")}
    write_weights(folder, layer(2.0).state_dict(), DIGITS, {"task": "digits", "step": 8})
    assert set(read_weights(folder)) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    assert [path.name for path in folder.parent.iterdir()] == ["best"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    class Full(Digits):
        def export(self, folder: Path) -> None:
            raise OSError("No space left on device")

    write_weights(tmp_path / "best", layer(1.0).state_dict(), DIGITS, {"task": "digits", "step": 1})
    with pytest.raises(OSError, match="No space"):
        write_weights(tmp_path / "best", layer(2.0).state_dict(), Full(), {"task": "digits", "step": 2})
    assert read_facts(tmp_path / "best")["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def _write_on(folder: Path, first: int) -> None:
    for step in range(first, first + 100_000):
        write_weights(folder, layer(step).state_dict(), DIGITS, {"task": "digits", "step": step})


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_moment_leaves_one_of_them_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    folder = tmp_path / "best"
    if not exchanges:  # as on a file system that cannot
        monkeypatch.setattr(export, "_exchange", lambda *_: False)
    write_weights(folder, layer(1).state_dict(), DIGITS, {"task": "digits", "step": 1})
    steps = [1]
    for wait_ms in (1, 3, 7, 11, 17, 23):
        writer = multiprocessing.get_context("fork").Process(target=_write_on, args=(folder, steps[-1] + 1))
        writer.start()
        until(lambda last=steps[-1]: read_facts(folder)["step"] > last + 1, timeout_s=60)
        time.sleep(wait_ms / 1000)
        assert writer.pid
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert folder.is_dir() or not exchanges
        facts, weights = read_facts(folder), read_weights(folder)
        assert {float(value) for each in weights.values() for value in each.flatten()} == {facts["step"]}
        steps.append(facts["step"])
    assert steps == sorted(steps)
    write_weights(folder, layer(0).state_dict(), DIGITS, {"task": "digits", "step": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_between_the_two_renamings_the_old_one_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    write_weights(folder, layer(1).state_dict(), DIGITS, {"task": "digits", "step": 1})
    folder.rename(tmp_path / ".best.old")
    assert read_facts(folder)["step"] == 1
    assert float(read_weights(folder)["head.bias"][0]) == 1
    write_weights(folder, layer(2).state_dict(), DIGITS, {"task": "digits", "step": 2})
    assert float(read_weights(folder)["head.bias"][0]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
@pytest.mark.parametrize("name", ["a.bin", "a.safetensors"])
def test_what_was_wrapped_around_a_module_does_not_count(tmp_path: Path, name: str, prefix: str) -> None:
    state = {f"{prefix}{key}": value for key, value in layer(3.0).state_dict().items()}
    if name.endswith(".safetensors"):
        pytest.importorskip("safetensors.torch").save_file(state, tmp_path / name)
    else:
        torch.save(state, tmp_path / name)
    module, weights = layer(), read_weights(tmp_path / name)
    assert load_weights(module, weights, tmp_path, ignore_mismatched_sizes=False) == []
    assert all(bool((each == 3.0).all()) for each in module.parameters())


def test_a_part_may_be_wrapped_or_have_the_name_of_a_wrapper() -> None:
    """torch.compile around a layer; and a model whose only part is called module, as kit itself has saved it."""
    module = layer()
    weights = {
        name.replace("body", "body._orig_mod"): value for name, value in layer(2.0).state_dict().items()
    }
    assert load_weights(module, weights, Path("a.pt"), ignore_mismatched_sizes=False) == []
    assert all(bool((each == 2.0).all()) for each in module.parameters())
    within = nn.Sequential(OrderedDict(module=layer()))
    for weights in (within.state_dict(), nn.DataParallel(within).state_dict(), module.state_dict()):
        assert load_weights(within, weights, Path("a.pt"), ignore_mismatched_sizes=False) == []
    assert all(bool((each == 2.0).all()) for each in within.parameters())


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "MODEL_STATE", "model", "module"])
def test_weights_beside_other_things_are_found(tmp_path: Path, key: str) -> None:
    state = {"epoch": 3, "optimizer": {"state": {}}, "scheduler_state_dict": {"last_epoch": 3}}
    torch.save({**state, key: layer(3.0).state_dict()}, tmp_path / "a.pth")
    assert set(read_weights(tmp_path / "a.pth")) == set(layer().state_dict())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "weights.pt is not there: wanted a folder with pytorch_model.bin or"),
        (b"no pickle", "weights.pt is no file of weights"),
        (b"", "weights.pt is no file of weights"),
        ([1, 2], "weights.pt holds a list: wanted a state dict"),
        ({}, "weights.pt holds an empty one: wanted"),
        ({"net": {"a": torch.ones(1)}, "step": 3}, "at 'net' a dict: .*, perhaps its 'net', saved alone"),
        ({"model": {"a": 3}, "step": 3}, "weights.pt/model holds at 'a' a int: wanted a state dict"),
        ({"model": {}, "step": 3}, "weights.pt/model is empty: wanted a state dict"),
        ({"a": torch.ones(1), "step": 3}, "holds at 'step' a int: wanted a state dict"),
        (Path("x"), r"weights.pt is no file of weights \(it holds a pathlib\S*, and to load that could run code\)"),
    ],
)  # fmt: skip
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message) as refused:
        read_weights(path)
    assert str(refused.value).startswith(str(path))


def test_a_folder_that_no_run_has_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither: wanted a folder with pytorch_model\.bin or model\.s"):
        read_weights(tmp_path)
    with pytest.raises(ValueError, match=r"has no nodekit\.json: wanted a folder that a run has written"):
        read_facts(tmp_path)
    (tmp_path / "nodekit.json").write_text("[")
    with pytest.raises(ValueError, match=r"nodekit\.json cannot be read"):
        read_facts(tmp_path)
    (tmp_path / "nodekit.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(ValueError, match=r"nodekit\.json names no task"):
        read_facts(tmp_path)


@pytest.mark.parametrize("call", ["stat", "open"])
def test_weights_that_may_not_be_read_are_not_said_to_be_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_weights(tmp_path / "best", {"weight": torch.ones(1)}, object(), {"task": "digits"})
    allowed = os.stat if call == "stat" else builtins.open

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(str(tmp_path / "best")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return allowed(path, *args, **options)

    monkeypatch.setattr(os if call == "stat" else builtins, call, refuse)
    with pytest.raises(TrainingError, match=r"^the weights cannot be read: .*Permission denied: '.*/best"):
        read_weights(tmp_path / "best")


def test_weights_that_fit_are_loaded_all() -> None:
    module = layer(0.0)
    assert load_weights(module, layer(1.0).state_dict(), Path("a.pt"), ignore_mismatched_sizes=False) == []
    assert all(torch.equal(each, torch.ones_like(each)) for each in module.parameters())


def test_extra_state_of_a_module_is_written_and_loaded(tmp_path: Path) -> None:
    class Counted(nn.Linear):
        num = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"num": self.num}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.num = state["num"]

    trained, module, plain = (
        nn.Sequential(Counted(2, 1)),
        nn.Sequential(Counted(2, 1)),
        nn.Sequential(nn.Linear(2, 1)),
    )
    trained[0].num = 5
    write_weights(tmp_path / "best", trained.state_dict(), DIGITS, {"task": "digits"})
    weights = read_weights(tmp_path / "best")
    assert load_weights(module, weights, tmp_path, ignore_mismatched_sizes=False) == []
    assert module[0].num == 5
    assert weights_sha256(weights) == weights_sha256(module.state_dict())
    assert load_weights(plain, weights, tmp_path, ignore_mismatched_sizes=False) == []


LESS = {name: value for name, value in layer(1.0).state_dict().items() if name != "body.bias"}


@pytest.mark.parametrize(
    ("weights", "left_out"),
    [
        (
            layer(1.0, num_outputs=5).state_dict(),
            ["head.weight: (3, 4) here, (5, 4) there", "head.bias: (3,) here, (5,) there"],
        ),
        (LESS, ["body.bias: (4,) here, none there"]),
        ({**layer(1.0).state_dict(), "extra": torch.ones(2)}, ["extra: none here, (2,) there"]),
        ({**LESS, "body.bias": torch.ones(())}, ["body.bias: (4,) here, () there"]),
    ],
)
def test_what_does_not_fit_is_refused_or_listed(
    weights: Mapping[str, torch.Tensor], left_out: list[str]
) -> None:
    module = layer(0.0)
    refusal = (
        re.escape("; ".join(left_out)) + r"\); --ignore-mismatched-sizes takes the \d that fit, and lists"
    )
    with pytest.raises(ValueError, match=refusal):
        load_weights(module, weights, Path("a.pt"), ignore_mismatched_sizes=False)
    assert all(not each.any() for each in module.parameters()), "nothing was loaded"
    assert load_weights(module, weights, Path("a.pt"), ignore_mismatched_sizes=True) == left_out
    kept = {line.split(":")[0] for line in left_out}
    for name, value in module.state_dict().items():
        assert torch.equal(value, torch.full_like(value, 0.0 if name in kept else 1.0)), name


@pytest.mark.parametrize("ignore", [True, False])
def test_where_nothing_fits_there_is_nothing_to_ignore(ignore: bool) -> None:
    other = {f"other{number}": torch.ones(1) for number in range(9)}
    with pytest.raises(ValueError, match=r"^a\.pt: 13 of 13 .*; …\); none fits: they are of another model$"):
        load_weights(layer(), other, Path("a.pt"), ignore_mismatched_sizes=ignore)
