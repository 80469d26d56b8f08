"""The copy of a state in host memory: one block of the exact size, made beside the training, and gathered into."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nodekit.training.group.collectives import numbers_on
from nodekit.training.snapshots.hostcopy import Gathered, HostCopy, gather_for_others

GPU = torch.device("cuda", 3)


class Cudart:
    """CUDA's runtime as far as it is asked for: locks each block once, on the right GPU, and unlocks what is locked."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.locked: dict[int, int] = {}
        self.threads: list[str] = []
        self.gpu: torch.device | None = None  # of the thread: it begins with GPU 0

    @contextmanager
    def device(self, gpu: torch.device) -> Iterator[None]:
        before, self.gpu = self.gpu, gpu
        yield
        self.gpu = before

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert self.gpu == GPU, "or each rank takes memory on GPU 0"
        assert address % 64 == 0
        assert size_bytes > 0
        assert flags == 1
        assert address not in self.locked
        self.threads.append(threading.current_thread().name)
        if not self.answer:
            self.locked[address] = size_bytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """In place of all of torch.cuda: what is not asked for here fails."""
    fake = Cudart()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: fake, device=fake.device))
    return fake


def gathered(values: torch.Tensor, device: torch.device = GPU) -> Gathered:
    return Gathered(values.shape, values.dtype, device, lambda: values.clone())


def a_state() -> dict[str, Any]:
    weights = torch.randn(1000, 257)  # 1,028,000 bytes: torch's pinned memory would take 1,048,576
    return {
        "w": gathered(weights),
        "b": torch.randn(17),
        "step": torch.tensor(3.0),
        "none": torch.empty(0, 5),
        "n": 7,
    }


def test_the_block_is_of_the_exact_size_and_locked_in_a_thread_before_the_first_copy(cudart: Cudart) -> None:
    copies, state = HostCopy(), a_state()
    copies.prepare(state)
    first = copies.take(state)
    (address,) = cudart.locked
    assert cudart.locked == {address: 1_028_032 + 128 + 64}, "each tensor, rounded up to 64 bytes"
    assert cudart.threads == ["nodekit-host-memory"]
    assert first["w"].data_ptr() == address
    assert {first[name].untyped_storage().nbytes() for name in ("w", "b", "step")} == {1_028_000, 68, 4}
    assert copies.take(state)["w"].data_ptr() == address, "used again"
    larger = copies.take({**state, "more": torch.ones(9)})
    assert larger["more"].eq(1).all()
    del first
    gc.collect()
    (address,) = cudart.locked
    assert cudart.locked == {address: 1_028_032 + 128 + 64 + 64}
    del copies
    gc.collect()
    assert cudart.locked, "what was taken is used still"
    del larger
    gc.collect()
    assert not cudart.locked


def test_a_system_that_locks_no_memory_gets_a_copy_all_the_same(cudart: Cudart) -> None:
    cudart.answer = 2  # cudaErrorMemoryAllocation
    state = a_state()
    copied = HostCopy().take(state)
    assert copied["b"].equal(state["b"])
    assert copied["w"].equal(state["w"].gather())
    # CUDA keeps the error for whoever launches the next kernel in that thread.
    assert cudart.threads == ["nodekit-host-memory"]


def test_a_conjugated_view_is_copied_as_what_it_is_beside_its_base() -> None:
    """Both are of one place in memory."""
    base = torch.tensor([1 + 2j, 3 - 4j])
    state = {"base": base, "conj": base.conj(), "imag": base.imag, "neg": base.conj().imag}
    copied = HostCopy().take(state)
    assert all(copied[name].equal(each) for name, each in state.items())


def test_a_copy_from_a_gpu_is_not_conjugated_before_it_has_arrived() -> None:
    """torch does so, in host memory, right after it has started the copy (``copy_kernel_cuda``)."""

    class Copies(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.copy_ and kwargs and kwargs.get("non_blocking"):
                to, source = args
                assert (to.is_conj(), to.is_neg()) == (source.is_conj(), source.is_neg())
                copied.append(source)
            return function(*args, **(kwargs or {}))

    copied: list[torch.Tensor] = []
    base = torch.tensor([1 + 2j, 3 - 4j])
    with Copies():
        HostCopy().take({"conj": base.conj(), "neg": base.conj().imag})
    assert len(copied) == 2


def test_weights_that_are_copied_once_are_not_locked(cudart: Cudart) -> None:
    HostCopy(pins=False).take(a_state())
    assert not cudart.threads


@pytest.mark.parametrize("keeps", [True, False])
def test_tensors_are_gathered_one_at_a_time_and_only_the_copy_is_kept(keeps: bool) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def gather() -> torch.Tensor:
        nonlocal most
        whole = torch.ones(1000)
        alive.append(weakref.ref(whole))
        most = max(most, sum(each() is not None for each in alive))
        return whole

    def part() -> Gathered:
        return Gathered(torch.Size([1000]), torch.float32, torch.device("cpu"), gather)

    tied = part()
    state = {
        "model": {"a": tied, "b": part(), "tied": tied},
        "optimizer": {"state": {0: {"m": part()}}},
        "n": [1, (part(),)],
    }
    if keeps:
        copied = HostCopy().take(state)
        assert copied["n"][1][0].eq(1).all()
        assert copied["model"]["a"].data_ptr() != copied["model"]["b"].data_ptr()
        assert copied["model"]["a"] is copied["model"]["tied"]
    else:
        gather_for_others(state)
    assert len(alive) == 4
    assert most == 1
    assert not any(each() is not None for each in alive)


def test_a_scripts_default_device_is_not_that_of_the_copy() -> None:
    state = {"x": torch.ones(3), "empty": torch.ones(0)}
    with torch.device("meta"):  # torch.set_default_device("cuda") does the same
        copied = HostCopy().take(state)
        assert numbers_on(torch.device("cpu"), [2.0]).tolist() == [2.0]
    assert (copied["x"].tolist(), copied["empty"].device.type) == ([1.0] * 3, "cpu")


def test_what_is_no_tensor_is_copied_too() -> None:
    """It is saved by another thread, while the training goes on and may change it."""
    seen = {1}
    copied = HostCopy().take({"seen": seen, "nested": [({"deep": seen},)]})
    seen.add(2)
    assert copied == {"seen": {1}, "nested": [({"deep": {1}},)]}


def test_memory_that_cannot_be_had_fails_the_save_and_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise RuntimeError("not enough memory")

    copies = HostCopy()
    with monkeypatch.context() as patched:
        patched.setattr(HostCopy, "_make", none)
        copies.prepare({"a": torch.ones(3)})
        with pytest.raises(RuntimeError, match="not enough memory"):
            copies.take({"a": torch.ones(3)})
    assert copies.take({"a": torch.ones(3)})["a"].eq(1).all()
