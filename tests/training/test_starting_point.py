"""What a training goes on from: a snapshot before anything that its options name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nodekit.training.data.sampler import ElasticSampler
from nodekit.training.errors import TrainingError
from nodekit.training.options.options import Options
from nodekit.training.snapshots.files.manifest import Loaded
from nodekit.training.starting_point import StartingPoint, load

OPTIONS = Options(task="digits", epochs=2)


class Training:
    """A model with its optimizer, and how far it is: of ten samples, four in a step."""

    def __init__(self, value: float = 0.0, *, epoch: int = 0, offset: int = 0) -> None:
        self.module = nn.Linear(2, 1)
        nn.init.constant_(self.module.weight, value)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=value, momentum=0.9)
        self.sampler = ElasticSampler(10, batch_size=4)
        self.sampler.epoch, self.sampler.offset = epoch, offset

    def load(self, found: Loaded | None, **changes: Any) -> StartingPoint:
        return load(found, replace(OPTIONS, **changes), self.module, self.optimizer, self.sampler)

    def state(self, step: int) -> dict[str, Any]:
        parts = {"model": self.module, "optimizer": self.optimizer, "sampler": self.sampler}
        return {"step": step, **{name: part.state_dict() for name, part in parts.items()}}


def found(state: dict[str, Any], shards: Path | None = None) -> Loaded:
    unread: Any = None
    return Loaded(state, unread, "the snapshot", shards)


def test_without_anything_to_go_on_from_it_begins() -> None:
    assert Training().load(None) == StartingPoint(0, 0.0, None, ())


def test_a_snapshot_comes_before_what_the_options_name(tmp_path: Path) -> None:
    own, before = Training(), Training(3.0, epoch=1, offset=4)
    before.optimizer.state[before.module.weight]["momentum_buffer"] = torch.full((1, 2), 5.0)
    state = {**before.state(4), "trained_s": 7.5}
    named = {"init_from": tmp_path / "gone", "resume_from": tmp_path / "gone"}
    assert own.load(found(state), **named) == StartingPoint(4, 7.5, "the snapshot", [])
    assert own.module.weight.eq(3).all()
    assert own.optimizer.state[own.module.weight]["momentum_buffer"].eq(5).all()
    assert (own.sampler.epoch, own.sampler.offset) == (1, 4)


def test_the_tensors_of_a_sharded_snapshot_are_left_to_the_engine(tmp_path: Path) -> None:
    own = Training()
    state = {**Training(3.0, epoch=1, offset=4).state(4), "model": {}}
    assert own.load(found(state, shards=tmp_path)) == StartingPoint(4, 0.0, "the snapshot", [])
    assert own.module.weight.eq(0).all()
    assert (own.sampler.epoch, own.sampler.offset) == (1, 4)


def test_weights_alone_begin_at_the_first_step(tmp_path: Path) -> None:
    torch.save({"weight": torch.full((1, 2), 3.0), "bias": torch.zeros(2)}, tmp_path / "a.pt")
    own = Training()
    with pytest.raises(TrainingError, match="bias"):
        own.load(None, init_from=tmp_path / "a.pt")
    start = own.load(None, init_from=tmp_path / "a.pt", ignore_mismatched_sizes=True)
    assert (start.step, start.resumed_from) == (0, None)
    assert own.module.weight.eq(3).all()
    (note,) = start.notes
    assert note.startswith(f"left out of {tmp_path / 'a.pt'}: bias")


def test_a_scripts_checkpoint_continues_at_its_epoch(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "model": Training(3.0).module.state_dict()}, tmp_path / "a.pt")
    own, path = Training(), tmp_path / "a.pt"
    left_out = f"left out of {path}: the optimizer's state, which it does not have"
    assert own.load(None, resume_from=path) == StartingPoint(3, 0.0, str(path), [left_out])
    assert (own.sampler.epoch, own.sampler.offset) == (1, 0)
    with pytest.raises(
        TrainingError, match=r"a\.pt is in epoch 2 already and --epochs is 1: give more epochs"
    ):
        own.load(None, resume_from=path, epochs=1)


def test_what_is_trained_to_the_end_is_refused_with_what_to_do() -> None:
    state = Training(3.0, epoch=2).state(6)
    wanted = r"^the snapshot is in epoch 3 already and --epochs is 2: give more epochs\. To train anew, give another"
    with pytest.raises(TrainingError, match=wanted):
        Training().load(found(state))
    assert Training().load(found(state), epochs=3).step == 6
