"""Random losses of ranks, at every point of a step and of a re-forming: all go on with one state, without a gap."""

import functools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from nodekit.training.data.sampler import ElasticSampler
from nodekit.training.process.kept import Made
from nodekit.training.snapshots.exchange import source_of_all

NUM_SAMPLES, BATCH, MICRO_BATCH, EPOCHS = 23, 6, 2, 3
STEPS = EPOCHS * -(-NUM_SAMPLES // BATCH)


@dataclass(frozen=True)
class State:
    """What a step leaves: the samples of all updates, in their order, and the place in the data."""

    step: int = 0
    batches: tuple[tuple[int, frozenset[int]], ...] = ()
    place: tuple[int, int] = (0, 0)
    made_in: tuple[int, ...] = ()
    """The attempt of each step: one that is done again has another rounding."""


@functools.cache
def shared_out(epoch: int, offset: int, world_size: int) -> tuple[frozenset[int], tuple[int, int]]:
    """The samples of the global batch at a place, as the sampler shares them out, and the place after it."""
    parts: Counter[int] = Counter()
    num_micro_batches: Counter[int] = Counter()
    for rank in range(world_size):
        sampler = ElasticSampler(
            NUM_SAMPLES, batch_size=BATCH, rank=rank, world_size=world_size, micro_batch=MICRO_BATCH
        )
        sampler.epoch, sampler.offset = epoch, offset
        for micro in sampler.micro_batches():
            num_micro_batches[rank] += 1
            if micro.share:
                parts.update(micro.indices)
            if micro.is_last:
                break
    assert set(parts.values()) == {1}, "a sample is in two ranks' parts"
    assert len(set(num_micro_batches.values())) == 1, "a rank would wait in a collective for the others"
    sampler.advance()
    if not sampler.steps_left:
        sampler.next_epoch()
    return frozenset(parts), (sampler.epoch, sampler.offset)


@dataclass
class Node:
    """A host with one rank, and a disk that outlives it."""

    disk: dict[tuple[int, int], State] = field(default_factory=dict)
    kept: tuple[Made, State] | None = None
    is_here: bool = True


class Job:
    """Nodes that train together, lose each other, and meet again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nodes = [Node() for _ in range(self.rng.randint(2, 5))]
        self.generation = 0
        self.num_faults = self.rng.randint(1, 12)
        self.attempt_number = 0

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def run(self) -> State:
        for _ in range(1000):
            state = self.attempt()
            if state is not None and state.step == STEPS:
                return state
        raise AssertionError("it does not end")

    def attempt(self) -> State | None:
        """Meet, agree on a state, and train until somebody is lost."""
        faults = self.num_faults > 0
        self.attempt_number += 1
        for node in self.nodes:  # one that was lost may be back, one that is here may be lost while it joins
            node.is_here = not faults or self.chance(0.8)
        if faults and self.chance(0.1):
            self.generation += 1  # the rendezvous host was lost
        members = [node for node in self.nodes if node.is_here]
        for node in self.nodes:
            # If not, it is only out of reach, and may come back with it.
            if not node.is_here and self.chance(0.5):
                node.kept = None
        if not members:
            self.num_faults -= 1
            return None
        state = self.agreed(members)
        if faults and self.chance(0.2):  # while the state is sent
            self.lose(members)
            return None
        for node in members:
            node.kept = self.made(state)
        return self.train(members, state)

    def made(self, state: State) -> tuple[Made, State]:
        return Made((self.generation, state.step), str(self.attempt_number)), state

    def agreed(self, members: list[Node]) -> State:
        made = [node.kept[0] if node.kept else None for node in members]
        on_disk = [max(node.disk, default=None) for node in members]
        source = source_of_all(made, on_disk)
        if source is not None:
            kept = members[source].kept
            assert kept is not None
            same = {node.kept[1] for node in members if node.kept and node.kept[0] == kept[0]}
            assert same == {kept[1]}, "ranks that name the same step have the same state, so none is sent"
            found = kept[1]
        else:
            newest = max((age for age in on_disk if age), default=None)
            holder = next((node for node in members if newest in node.disk), None)
            found = holder.disk[newest] if holder and newest else State()
        ages = [each.age for each in made if each] + [each for each in on_disk if each]
        assert not ages or found.step >= max(ages)[1], "a step is lost"
        return found

    def train(self, members: list[Node], state: State) -> State | None:
        while state.step < STEPS:
            following = self.stepped(members, state)
            if self.num_faults > 0 and self.chance(0.15):
                # A collective may have ended on some and failed on others, if the lost rank had given its part.
                may_end = self.chance(0.5)
                for node in members:
                    if may_end and self.chance(0.5):
                        node.kept = self.made(following)
                    if self.chance(0.1):  # it was within its update, and is ended: its weights are of no step
                        node.kept = None
                self.lose(members)
                return None
            state = following
            for node in members:
                node.kept = self.made(state)
            if state.step % 4 == 0:
                for node in members:
                    if self.chance(0.9):  # it may not have come to the disk
                        node.disk[self.generation, state.step] = state
            if self.num_faults > 0 and self.chance(0.05):  # a node comes in: all pause after this step
                self.num_faults -= 1
                return None
        return state

    def stepped(self, members: list[Node], state: State) -> State:
        """What all ranks have after their common update."""
        batch, place = shared_out(*state.place, len(members))
        made_in = (*state.made_in, self.attempt_number)
        return State(state.step + 1, (*state.batches, (state.place[0], batch)), place, made_in)

    def lose(self, members: list[Node]) -> None:
        self.num_faults -= 1
        for node in self.rng.sample(members, self.rng.randint(1, len(members))):
            node.kept = None
            if self.chance(0.1):
                node.disk.clear()
        for node in members:
            if node.kept and self.chance(0.1):  # it does not hear of it, so it saves its step, and ends
                made, state = node.kept
                if self.chance(0.9):  # there may be no room for it
                    node.disk[made.age] = state
                node.kept = None


@pytest.mark.parametrize("first", range(0, 5000, 500))
def test_whoever_is_lost_whenever_all_go_on_with_one_state_and_each_sample_once(first: int) -> None:
    for seed in range(first, first + 500):
        state = Job(seed).run()
        assert state.step == STEPS == len(state.batches), seed
        for epoch in range(EPOCHS):
            seen = Counter(sample for at, batch in state.batches if at == epoch for sample in batch)
            assert seen == Counter(range(NUM_SAMPLES)), f"seed {seed}, epoch {epoch}"


@pytest.mark.parametrize(
    ("kept", "on_disk", "source"),
    [
        ([None, None], [(0, 7), None], None),
        ([None, (0, 5)], [(0, 4), None], 1),
        ([(0, 5), (0, 6)], [(0, 5), (0, 5)], 1),
        ([(0, 6), (0, 6)], [None, None], 0),
        ([(0, 6), None], [None, (0, 7)], None),
        ([(0, 6), None], [None, (0, 6)], 0),
        ([(0, 9), (1, 2)], [None, None], 1),
        ([(0, 9), None], [None, (1, 2)], None),
    ],
)
def test_the_newest_state_of_all_is_the_source(
    kept: list[tuple[int, int] | None], on_disk: list[tuple[int, int] | None], source: int | None
) -> None:
    made = [Made(age, str(rank)) if age else None for rank, age in enumerate(kept)]
    assert source_of_all(made, on_disk) == source
