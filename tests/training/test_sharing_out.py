"""What sharded engines hold of the whole: it is shared out and gathered a tensor at a time, and resumed by parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nodekit.training.engines import deepspeed
from nodekit.training.engines.fsdp import Engine
from nodekit.training.snapshots.hostcopy import Gathered, HostCopy, gather_for_others, map_tensors

NUM_RANKS = 4
NUM_LAYERS = 8
LAYER_BYTES = 256 * 256 * 4
WHOLE = NUM_LAYERS * LAYER_BYTES


class Memory(TorchDispatchMode):
    """Counts the bytes of the storages that appear in it, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {self._storage(each)._cdata for each in tree_leaves((args, kwargs)) if self._counts(each)}
        for each in tree_leaves(result):
            if self._counts(each) and (storage := self._storage(each))._cdata not in before | self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _counts(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.device.type == "cpu"
        )

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        return tensor.untyped_storage()

    def _gone(self, known: int, size_bytes: int) -> None:
        self._known.discard(known)
        self.now -= size_bytes


@pytest.fixture
def one_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 1 of four, whose collectives leave everything as it is."""
    monkeypatch.setattr(torch.UntypedStorage, "clone", None)  # by copy.deepcopy, which Memory does not see
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=NUM_RANKS)
    yield SimpleNamespace(
        device=torch.device("cpu"), world_size=NUM_RANKS, rank=1, local_rank=1, is_first_on_node=False
    )
    dist.destroy_process_group()


def resumed(world: Any) -> tuple[Engine, dict[str, Any], Memory]:
    """An engine around a model and an optimizer that have a snapshot's state, and what making it has taken."""
    layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(NUM_LAYERS))
    model = torch.nn.Sequential(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    optimizer.step()
    optimizer.zero_grad()
    state = map_tensors(torch.clone, optimizer.state_dict())
    with Memory() as memory:
        engine = Engine(SimpleNamespace(amp="off", compress="off"), world, model, optimizer, None)  # type: ignore[arg-type]
    return engine, state, memory


def test_a_resume_takes_a_ranks_part_and_no_second_whole(one_of_four: Any) -> None:
    engine, state, memory = resumed(one_of_four)
    # Its part of weights and moments, and FSDP's own while it shards a layer; five times the whole it was.
    assert memory.most <= 3 * WHOLE / NUM_RANKS + 3 * LAYER_BYTES
    values = engine._plain.state_dict()["state"]
    for number in range(NUM_LAYERS):
        assert values[number]["step"] == 1
        for name in ("exp_avg", "exp_avg_sq"):
            own = values[number][name]
            assert own.shape == (256, 256)
            assert own.to_local().equal(state["state"][number][name][64:128])


def test_a_rank_that_does_not_save_keeps_nothing_that_is_gathered(one_of_four: Any) -> None:
    engine, _, _ = resumed(one_of_four)
    with Memory() as memory:
        gather_for_others(engine.state())
    assert memory.most <= 3 * LAYER_BYTES
    with Memory() as memory:
        weights = engine.weights()
    assert not weights
    assert memory.most <= 3 * LAYER_BYTES


def test_a_rank_that_saves_has_the_copy_and_one_tensor(one_of_four: Any) -> None:
    engine, _, _ = resumed(one_of_four)
    state = engine.state()
    gathered = [each for each in state["model"].values() if isinstance(each, Gathered)]
    assert len(gathered) == NUM_LAYERS
    copies = HostCopy()
    with Memory() as memory:
        copied = copies.take(state)
    assert memory.most <= 3 * WHOLE + 4 * LAYER_BYTES
    assert copied["optimizer"]["state"][7]["exp_avg"].shape == (256, 256)
    assert copied["optimizer"]["state"][7]["step"] == 1


def test_small_tensors_leave_some_ranks_without_a_part(one_of_four: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 5))  # five rows of four ranks: 2, 2, 1 and none
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    moment = optimizer.state[model[0].weight]["exp_avg"].clone()
    engine = Engine(SimpleNamespace(amp="off", compress="off"), one_of_four, model, optimizer, None)  # type: ignore[arg-type]
    own = engine._plain.state_dict()["state"][0]["exp_avg"]
    assert own.to_local().equal(moment[2:4])
    assert own.shape == (5, 1)


@pytest.mark.parametrize("is_there_twice", [True, False])
def test_layers_that_share_weights_go_on_sharing_them(one_of_four: Any, is_there_twice: bool) -> None:
    own, first, second = (torch.nn.Linear(8, 8) for _ in range(3))
    second.weight = first.weight
    layers = torch.nn.ModuleList([own, first, first if is_there_twice else second])
    model = torch.nn.Sequential(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = SimpleNamespace(amp="off", compress="off")
    engine = Engine(options, one_of_four, model, optimizer, None)  # type: ignore[arg-type]
    assert [isinstance(each, FSDPModule) for each in layers] == [True, False, False]
    assert layers[1].weight is layers[2].weight
    assert {id(each) for each in model.parameters()} == {
        id(each) for each in optimizer.param_groups[0]["params"]
    }
    state, shards = engine.state(), engine.shards()
    assert state["model"]["0.1.weight"] is state["model"]["0.2.weight"]
    assert shards["tied"].get("0.2.weight") == "0.1.weight"
    assert shards["model"].keys() == state["model"].keys() - shards["tied"].keys()


def test_zero_3_partitions_the_weights_itself_and_brings_the_buffers_to_the_device() -> None:
    told: list[Any] = []
    library = SimpleNamespace(  # which knows no more than this
        init_distributed=lambda *, dist_init_required: told.append(dist_init_required),
        zero=SimpleNamespace(Init=lambda **given: told.append(given)),
    )
    module, config = torch.nn.BatchNorm1d(3), {"zero_optimization": {"stage": 3}}
    deepspeed._partition(library, module, config, torch.device("meta"))
    assert told == [False, {"module": module, "config_dict_or_path": config, "dtype": torch.float32}]
    assert told[1]["config_dict_or_path"] is not config, "it writes into it"
    assert {each.device.type for each in module.buffers()} == {"meta"}
    assert {each.device.type for each in module.parameters()} == {"cpu"}, "they are DeepSpeed's to move"
