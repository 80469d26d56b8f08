"""A GPU leaves updates out once its process has left the others, and it is known which step it is at."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from nodekit.training.group import nccl
from nodekit.training.loop import Loop
from nodekit.training.snapshots.emergency import LastWholeStep
from nodekit.training.steps.guarded import GuardedUpdates, can_guard, shared_flag

CPU = torch.device("cpu")


class Trained:
    """A model with batch norm, on a CPU in place of the GPU, whose kernels run when they are launched."""

    def __init__(self, how: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(
            torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        )
        self.optimizer = how(self.module.parameters(), lr=0.1, fused=True)  # type: ignore[call-arg]
        flag = shared_flag(CPU)
        assert flag is not None
        self.updates = GuardedUpdates(self.module, self.optimizer, flag)
        self.step = 0

    def forward(self) -> None:
        self.updates.next_begins()
        generator = torch.Generator().manual_seed(self.step)
        self.module(torch.randn(4, 3, generator=generator)).square().mean().backward()

    def update(self) -> None:
        self.updates.update_begins()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.updates.is_done(self.step, {"at": self.step})

    @property
    def state(self) -> list[torch.Tensor]:
        own = list(self.module.state_dict().values())
        for values in self.optimizer.state_dict()["state"].values():
            own += [each for each in values.values() if torch.is_tensor(each)]
        return [each.clone() for each in own]


@pytest.fixture(params=[torch.optim.AdamW, torch.optim.Adam])
def trained(request: pytest.FixtureRequest) -> Iterator[Trained]:
    nccl.prepare(aborts=False)
    yield Trained(request.param)
    nccl.prepare(aborts=False)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("launched_after", [0, 1, 2])
def test_what_is_launched_after_a_loss_changes_nothing(trained: Trained, launched_after: int) -> None:
    for _ in range(3):
        trained.forward()
        trained.update()
    before = trained.state
    trained.forward()  # batch norm's means are those of the next step by now
    nccl.leave()
    for number in range(launched_after):
        trained.update()
        if number < launched_after - 1:
            trained.forward()
    assert trained.updates.newest == 3 + launched_after
    assert trained.updates.found() == 3
    assert trained.updates.values == {"at": 3}
    assert same(trained.state, before)


def test_the_newest_step_is_found_where_nothing_is_lost(trained: Trained) -> None:
    assert trained.updates.found() is None
    assert trained.updates.newest is None
    for step in range(1, 8):
        trained.forward()
        trained.update()
        assert trained.updates.found() == step


def test_a_step_that_was_loaded_is_found_before_the_first_update(trained: Trained) -> None:
    trained.updates.is_done(12, {"at": 12})
    before = trained.state
    trained.forward()
    assert trained.updates.found() == 12
    assert same(trained.state, before)


def test_without_a_loaded_step_none_is_found_before_the_first_update(trained: Trained) -> None:
    nccl.leave()
    trained.forward()
    trained.update()
    assert trained.updates.found() is None


@pytest.mark.parametrize(("flags", "kind"), [((True, True), GuardedUpdates), ((True, False), LastWholeStep)])
def test_all_ranks_wait_in_each_step_where_one_gpu_cannot_read_what_its_host_says(
    flags: tuple[bool, ...], kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    world = SimpleNamespace(aborts_nccl=True, device=CPU, is_main=True, gather=lambda own: (own, *flags[1:]))
    loop = SimpleNamespace(world=world, options=SimpleNamespace(amp="off"), module=module)
    assert type(Loop._watch_updates(loop, optimizer)) is kind  # type: ignore[arg-type]
    assert ("each step waits for its gradients" in caplog.text) == (kind is LastWholeStep)


def test_a_device_that_cannot_read_the_hosts_memory_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert shared_flag(torch.device("cuda", 0)) is None  # there is no CUDA in this torch
    assert "cuda:0 cannot read the host's memory" in caplog.text


def test_what_fails_before_the_abort_does_not_keep_it_from_happening(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    calls: list[str] = []
    nccl.before_abort(fail)
    group = SimpleNamespace(abort=lambda: calls.append("aborted"))
    world = SimpleNamespace(pg_names=[group])
    monkeypatch.setattr(nccl, "dist", SimpleNamespace(distributed_c10d=SimpleNamespace(_world=world)))
    nccl.leave()
    nccl.leave()
    nccl.wait_until_ended()
    assert calls == ["aborted"]


@pytest.mark.parametrize(
    ("fused", "scales", "can"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_only_a_fused_optimizer_that_nobody_scales_for_can(fused: bool, scales: bool, can: bool) -> None:
    optimizer = torch.optim.AdamW(torch.nn.Linear(1, 1).parameters(), lr=0.1, fused=fused)
    assert not can_guard(
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1, fused=True), scales=False
    )
    assert can_guard(optimizer, scales=scales) is can


def test_who_has_left_hears_of_it_until_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl.prepare(aborts=True)
    nccl.check()
    nccl.leave()
    assert nccl.has_left()
    with pytest.raises(nccl.LostRank):
        nccl.check()
    nccl.prepare(aborts=False)
    nccl.check()
