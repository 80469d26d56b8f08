"""The supervisor's judgement: for each story, what is seen and what is done about it."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.story.causes import TOO_FEW_NODES
from nodekit.deploy.supervise.policy import begin, decide
from nodekit.deploy.supervise.state import (
    PAUSE_S,
    Action,
    Drain,
    Exclude,
    Fence,
    Finish,
    Join,
    NodeHistory,
    Notice,
    Observation,
    Rules,
    SetVoters,
    Start,
    State,
    Stop,
)

NODES = ("a", "b", "c", "d", "e")
RULES = Rules(nodes=NODES, min_nodes=2, max_nodes=4)  # e is a spare
FOUR = ("a", "b", "c", "d")
UNSTARTED = Observation()
UNSEEN = Observation(reachable=False)


def agent(state: str = "running", *, generation: int = 0, name: str = "x", **more: Any) -> Observation:
    fields: dict[str, Any] = {"port": 1, "fence": generation, "held": (0, 100)}
    return Observation(alive=True, agent=name, generation=generation, state=state, **{**fields, **more})


def ended(state: str = "running", *, generation: int = 0, **more: Any) -> Observation:
    return dataclasses.replace(agent(state, generation=generation, **more), alive=False)


def running(*members: str, **more: Any) -> Observation:
    return agent("running", members=members, **more)


def lost(seen: Observation) -> Observation:
    """The same, last seen a while ago."""
    return dataclasses.replace(seen, reachable=False)


class Story:
    """Decisions one after the other, and what was done."""

    def __init__(self, rules: Rules = RULES, nodes: tuple[str, ...] = FOUR, host: str = "a") -> None:
        self.rules = rules
        self.state = begin(rules, generation=0, host=host, port=1, nodes=nodes)
        self.now = 1000.0
        self.seen: dict[str, Observation] = dict.fromkeys(rules.nodes, UNSTARTED)

    def sees(self, for_s: float = 0.2, **seen: Observation) -> list[Action]:
        """What is done in the next seconds, but for what is said."""
        return [action for action in self.all(for_s, **seen) if not isinstance(action, Notice)]

    def says(self, for_s: float = 0.2, **seen: Observation) -> list[str]:
        return [action.text for action in self.all(for_s, **seen) if isinstance(action, Notice)]

    def all(self, for_s: float, **seen: Observation) -> list[Action]:
        self.seen.update(seen)
        done: list[Action] = []
        for _ in range(max(1, round(for_s / 0.2))):
            self.now += 0.2
            self.state, actions = decide(self.state, self.seen, self.now, self.rules)
            done += actions
        return done

    def all_run(self, members: tuple[str, ...] = FOUR) -> "Story":
        """After a good start."""
        self.sees(1, **{name: running(*members) for name in members})
        return self


def test_a_job_begins_with_a_start_on_each_node_but_the_spares() -> None:
    assert Story().sees() == [Start(name, is_new=True) for name in FOUR]


def test_a_host_that_lost_its_own_store_is_no_host_any_more() -> None:
    """Its agent lives, and the others wait for it: a store is never opened twice in one generation."""
    story = Story()
    others = {name: agent("starting") for name in "bcd"}
    assert story.says(3, a=agent("fenced"), **others) == [
        "the rendezvous host a is lost: fencing generation 0"
    ]
    assert story.state.next_generation == 1


def test_a_start_is_asked_for_again_after_a_minute_only() -> None:
    story = Story()
    assert len(story.sees(59)) == 4
    assert len(story.sees(5)) == 4
    assert all(len(known.failures) == 1 for name, known in story.state.known.items() if name in FOUR)


def test_nothing_is_done_while_all_train() -> None:
    assert Story().all_run().all(600) == []


def test_an_agent_that_ended_is_started_anew() -> None:
    story = Story().all_run()
    three = {name: running("a", "b", "d") for name in "abd"}
    assert story.sees(c=ended(), **three) == [Start("c")]


def test_out_of_sight_while_its_peers_train_with_it_is_nobody_lost() -> None:
    story = Story().all_run()
    assert story.all(600, c=lost(story.seen["c"])) == []
    assert story.state.known["c"].failures == ()


def test_a_spare_comes_in_for_a_node_its_peers_train_without() -> None:
    story = Story().all_run()
    three = {name: running("a", "b", "d") for name in "abd"}
    assert story.sees(c=lost(story.seen["c"]), **three) == [Start("e", is_new=True)]
    assert len(story.state.known["c"].failures) == 1


def test_a_loss_counts_once_though_peers_that_are_heard_later_still_name_the_node() -> None:
    """It came in, and was lost, between two looks at the others."""
    story = Story().all_run(("a", "b", "d"))
    story.sees(1, c=running(*FOUR))
    story.sees(1, c=UNSEEN)
    story.sees(1, a=running(*FOUR), b=running(*FOUR), d=running(*FOUR))
    story.sees(1, **{name: running("a", "b", "d") for name in "abd"})
    assert len(story.state.known["c"].failures) == 1


def test_one_that_was_called_in_and_is_lost_is_not_called_again_while_as_many_train_as_may() -> None:
    story = Story().all_run()
    three = {name: running("a", "b", "d") for name in "abd"}
    older = agent("fenced", generation=-1)
    assert story.sees(c=lost(story.seen["c"]), e=older, **three) == [Join("e")]
    four = {name: running(*FOUR) for name in FOUR}
    assert story.sees(1, e=agent("rendezvous"), **four) == []
    assert story.sees(30, e=ended("rendezvous"), **four) == []


def test_a_spare_comes_in_for_one_that_does_not_find_the_others_and_has_no_vote() -> None:
    story = Story(nodes=("a", "b", "c"))
    three = {name: running("a", "b", "c") for name in "abc"}
    assert Start("e", is_new=True) in story.sees(600, d=agent("orphaned"), **three)


def test_a_spare_does_not_come_for_one_that_does_not_find_the_others_while_they_do_not_train() -> None:
    """They may be about to meet, and would be too many."""
    story = Story(nodes=("a", "b", "c"))
    three = {name: agent("rendezvous") for name in "abc"}
    done = story.sees(15, d=agent("orphaned"), **three)
    assert not [action for action in done if isinstance(action, Start)]


def test_who_does_not_find_the_others_is_told_again_where_they_are_and_does_not_count_as_coming() -> None:
    """What it was told may be of an earlier process there."""
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR)).all_run()
    three = {name: running("a", "b", "d") for name in "abd"}
    assert story.sees(4, c=agent("orphaned"), **three) == [Join("c")]
    smaller = Voters(0, 1, ("a", "b", "d"))
    done = story.sees(4)
    assert sorted(map(str, done)) == sorted(str(SetVoters(name, smaller)) for name in FOUR), "each once"
    seen = {name: running("a", "b", "d", voters=smaller) for name in "abd"}
    assert story.sees(40, c=agent("orphaned", voters=smaller), **seen) == [Join("c"), Join("c")]


def test_all_that_trained_when_they_were_seen_are_counted_while_out_of_sight() -> None:
    rules = Rules(nodes=FOUR, min_nodes=2, max_nodes=3)
    story = Story(rules, nodes=("a", "b", "c")).all_run(("a", "b", "c"))
    three = {name: running("a", "b", "d") for name in "abd"}  # d has no vote yet
    assert story.sees(1, c=ended("ended"), **three) == []
    assert story.sees(1, **{name: lost(seen) for name, seen in three.items()}) == []


def test_with_no_node_in_sight_nothing_is_done_and_it_is_said_once() -> None:
    story = Story().all_run()
    done = story.all(900, **{name: lost(story.seen[name]) for name in NODES})
    assert [type(action) for action in done] == [Notice]
    assert not any(known.failures for known in story.state.known.values())
    assert story.all(60, **{name: running(*FOUR) for name in FOUR}, e=UNSTARTED) == []


def orphans(*names: str, **more: Any) -> dict[str, Observation]:
    return {name: agent("orphaned", **more) for name in names}


def fenced(*names: str, generation: int, fence: int) -> dict[str, Observation]:
    return {name: agent("fenced", generation=generation, fence=fence) for name in names}


@pytest.mark.parametrize(
    "host",
    [pytest.param(ended(), id="its agent ended"), pytest.param(lost(running(*FOUR)), id="it is gone")],
)
def test_without_its_host_a_generation_is_fenced_and_the_next_begins_on_the_survivors(
    host: Observation,
) -> None:
    story = Story().all_run()
    in_sight = {"b", "c", "d", "e"} | ({"a"} if host.reachable else set())
    done = story.sees(1, a=host, **orphans("b", "c", "d"))
    assert {action for action in done if not isinstance(action, Start)} == {
        Fence(name, 1) for name in in_sight
    }
    assert story.state.next_generation == 1
    done = story.sees(2, **fenced("b", "c", "d", generation=0, fence=1))
    assert {Join("b"), Join("c"), Join("d")} <= set(done)
    assert (story.state.generation, story.state.host, story.state.port) == (1, "b", 1)
    assert story.state.voters == Voters(1, 0, ("b", "c", "d"))
    assert not story.state.has_trained


def test_a_host_that_has_joined_is_not_waited_for_when_the_next_node_is_lost_soon_after() -> None:
    """It was called in less than a minute ago: that is no reason to wait any more."""
    story = Story().all_run()
    story.sees(1, a=UNSEEN, **orphans("b", "c", "d"))
    story.sees(2, **fenced("b", "c", "d", generation=0, fence=1))
    story.sees(2, **{name: running("b", "c", "d", generation=1) for name in "bcd"})
    left = {name: agent("rendezvous", generation=1, blocked="too few") for name in "bc"}
    assert Fence("b", 2) in story.sees(3, d=ended(generation=1), **left)


def test_a_fence_counts_only_once_the_workers_are_gone() -> None:
    story = Story(rules=dataclasses.replace(RULES, min_nodes=1)).all_run()
    story.sees(1, a=UNSEEN, **orphans("b", "c", "d"))
    story.sees(5, b=lost(running(*FOUR, fence=1)), d=UNSEEN, **fenced("c", generation=0, fence=1))
    assert story.state.generation == 0
    story.sees(5, **fenced("b", generation=0, fence=1))
    assert story.state.generation == 1


def test_where_the_others_cannot_reach_the_host_it_is_another() -> None:
    story = Story().all_run()
    done = story.sees(62, a=agent("rendezvous"), **orphans("b", "c", "d"))
    assert {Fence(name, 1) for name in NODES} <= set(done)
    story.sees(2, **fenced(*FOUR, generation=0, fence=1))
    assert story.state.host == "b"
    assert story.state.voters.nodes == ("b", "c", "d")


def test_the_next_generation_goes_on_from_the_newest_snapshot_only() -> None:
    story = Story().all_run()
    story.sees(1, a=UNSEEN, **orphans("b", "c", "d"))
    back = {
        name: dataclasses.replace(each, held=(0, 80))
        for name, each in fenced("b", "c", "d", generation=0, fence=1).items()
    }
    story.sees(5, **{**back, "d": dataclasses.replace(back["d"], held=(0, 100))})
    assert story.state.host == "d"
    assert story.state.voters.nodes == ("d",)


def test_where_only_a_node_out_of_sight_has_the_newest_snapshot_it_is_waited_for() -> None:
    story = Story().all_run()
    story.sees(1, a=UNSEEN, **orphans("b", "c", "d"))
    back = {
        name: dataclasses.replace(each, held=(0, 80))
        for name, each in fenced("b", "c", "d", generation=0, fence=1).items()
    }
    said = story.says(60, **{**back, "d": lost(dataclasses.replace(back["d"], held=(0, 100)))})
    assert story.state.generation == 0
    assert any("step 100, is only on d" in text for text in said)


def test_those_in_sight_are_not_fenced_while_the_others_may_train() -> None:
    story = Story(rules=dataclasses.replace(RULES, max_nodes=5), nodes=NODES)
    story.all_run(NODES)
    done = story.all(900, **{n: lost(story.seen[n]) for n in "abc"}, **orphans("d", "e"))
    assert [type(action) for action in done] == [Notice]


def test_nobody_is_fenced_while_too_few_are_left_for_the_next_generation() -> None:
    """They could not come back into this one by themselves."""
    story = Story(Rules(nodes=FOUR, min_nodes=3, max_nodes=4)).all_run()
    assert story.sees(30, a=UNSEEN, b=UNSEEN, **orphans("c", "d")) == []
    assert story.sees(1, b=agent("orphaned")) == [Fence(name, 1) for name in "bcd"]


def test_nobody_is_fenced_any_more_once_those_who_went_out_of_sight_may_train() -> None:
    story = Story().all_run()
    story.sees(0.2, a=UNSEEN, **orphans("b", "c", "d"))
    assert story.state.next_generation == 1
    story.seen.update({name: lost(running(*FOUR)) for name in "bcd"})
    assert not [action for action in story.sees(60, a=agent("orphaned")) if isinstance(action, Fence)]


def test_a_voter_that_is_still_being_fenced_is_waited_for_a_moment() -> None:
    story = Story().all_run()
    story.sees(0.2, a=UNSEEN, **orphans("b", "c", "d"))
    story.sees(0.2, **fenced("b", "c", generation=0, fence=1))
    assert story.state.generation == 0
    story.sees(0.2, **fenced("d", generation=0, fence=1))
    assert story.state.voters == Voters(1, 0, ("b", "c", "d"))


def test_a_generation_begins_with_no_fewer_nodes_than_the_job_needs() -> None:
    story = Story(Rules(nodes=("a", "b", "c"), min_nodes=2, max_nodes=3), nodes=("a", "b", "c"))
    story.all_run(("a", "b", "c"))
    story.sees(0.2, a=UNSEEN, **orphans("b", "c"))
    both = fenced("b", "c", generation=0, fence=1)
    story.sees(5, b=both["b"], c=lost(both["c"]))
    assert story.state.generation == 0
    story.sees(1, **both)
    assert story.state.voters == Voters(1, 0, ("b", "c"))


def test_no_more_nodes_vote_than_may_train() -> None:
    story = Story(Rules(nodes=NODES, min_nodes=1, max_nodes=2), nodes=("a", "b")).all_run(("a", "b"))
    story.sees(1, a=ended(), **orphans("b", "c", "d"))
    story.sees(2, a=ended(fence=1), **fenced("b", "c", "d", generation=0, fence=1))
    assert story.state.generation == 1
    assert len(story.state.voters.nodes) == 2


def test_where_nobody_has_met_the_next_rendezvous_is_on_another_host() -> None:
    story = Story().all_run()
    story.sees(62, **{name: agent("rendezvous") for name in FOUR})
    story.sees(2, **fenced(*FOUR, generation=0, fence=1))
    assert (story.state.generation, story.state.host) == (1, "b")


def test_a_fencing_is_called_off_when_the_generation_trains_after_all() -> None:
    story = Story().all_run()
    story.sees(1, a=UNSEEN, **orphans("b", "c", "d"))
    three = {name: running("a", "b", "c") for name in "abc"}
    assert story.sees(d=fenced("d", generation=0, fence=1)["d"], **three) == [Join("d")]
    assert (story.state.next_generation, story.state.called_off) == (None, 1)
    assert Join("d") in story.sees(6), "its fence is of this supervisor's own"
    story.sees(1, a=UNSEEN, **orphans("b", "c", "d"))
    assert story.state.next_generation == 2


def test_how_long_nodes_have_not_met_is_counted_anew_after_none_was_in_sight() -> None:
    story = Story().all_run()
    waiting = {name: agent("rendezvous") for name in FOUR}
    story.sees(50, **waiting)
    story.sees(600, **dict.fromkeys(NODES, UNSEEN))
    assert not [action for action in story.sees(30, **waiting) if isinstance(action, Fence)]
    assert Fence("a", 1) in story.sees(40)


def test_a_host_that_could_not_be_started_is_waited_for_and_then_another_takes_its_place() -> None:
    story = Story()
    story.sees(100, **{name: agent("rendezvous") for name in "bcd"})
    assert story.state.generation == 0
    story.sees(120)
    assert story.state.next_generation == 1


def test_the_others_are_started_once_it_is_known_where_the_rendezvous_is() -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR)).all_run()
    story.sees(1, **{name: ended() for name in FOUR})
    assert story.sees(5, **{name: ended(fence=1) for name in FOUR}) == [Start("b")]
    assert (story.state.generation, story.state.host, story.state.port) == (1, "b", 0)
    young = agent("starting", generation=1, name="new", port=0)
    assert story.sees(5, b=young) == []
    assert story.sees(1, b=dataclasses.replace(young, port=7)) == [Start(name) for name in "acd"]
    assert story.state.port == 7


def test_a_round_without_a_majority_becomes_the_next_generation() -> None:
    story = Story().all_run()
    two = {name: agent("rendezvous", blocked=True, members=("a", "b")) for name in "ab"}
    done = story.sees(3, c=UNSEEN, d=UNSEEN, **two)
    assert {Fence("a", 1), Fence("b", 1)} <= set(done)


def test_later_a_round_without_a_majority_waits_for_nobody() -> None:
    story = Story().all_run()
    two = {name: agent("rendezvous", blocked=True, members=("a", "b")) for name in "ab"}
    done = story.sees(3, c=ended(), d=UNSEEN, **two)
    assert {Fence("a", 1), Fence("b", 1)} <= set(done)


def test_at_first_a_round_without_a_majority_waits_for_those_who_are_still_coming() -> None:
    story = Story()
    story.sees()
    two = {name: agent("rendezvous", blocked=True, members=("a", "b")) for name in "ab"}
    assert story.sees(30, **two) == []


def test_below_the_fewest_nodes_it_waits_and_gives_up_in_the_end() -> None:
    story = Story(rules=dataclasses.replace(RULES, min_nodes=3, wait_s=600), nodes=("a", "b", "c"))
    story.all_run(("a", "b", "c"))
    alone = {
        "a": agent("rendezvous"),
        "b": ended(problem="disk full"),
        "c": ended(),
        "d": UNSEEN,
        "e": UNSEEN,
    }
    said = story.says(10, **alone)
    assert any("1 of at least 3 nodes are there" in text for text in said)
    assert any("with nodes: 1:4 in the inventory it goes on without" in text for text in said), said
    (finish,) = {each for each in story.sees(1300) if isinstance(each, Finish)}
    assert finish == Finish("failed", "waited 600 s for enough nodes", TOO_FEW_NODES)


def test_it_is_not_said_how_a_job_goes_on_where_no_node_is_there() -> None:
    story = Story(rules=dataclasses.replace(RULES, wait_s=600), nodes=("a", "b"))
    said = story.says(10, **{name: ended() for name in "ab"}, c=UNSEEN, d=UNSEEN, e=UNSEEN)
    assert said[-1] == "0 of at least 2 nodes are there; waiting up to 600 s for a, b, c, d, e"


def test_it_never_gives_up_while_those_out_of_sight_may_be_training() -> None:
    story = Story(rules=dataclasses.replace(RULES, wait_s=600)).all_run()
    story.seen.update({name: lost(story.seen[name]) for name in "abc"})
    done = story.sees(900, d=agent("orphaned"))
    assert not [action for action in done if isinstance(action, Finish | Fence | Stop)]


def test_those_out_of_sight_that_were_fenced_before_do_not_go_on_and_are_not_waited_for() -> None:
    story = Story(rules=dataclasses.replace(RULES, min_nodes=3, wait_s=600)).all_run()
    story.sees(1, a=UNSEEN, **orphans("b", "c", "d"))
    assert story.state.next_generation == 1
    story.seen.update({name: lost(each) for name, each in fenced("b", "c", generation=0, fence=1).items()})
    done = story.sees(1300, **fenced("d", generation=0, fence=1))
    assert Finish("failed", "waited 600 s for enough nodes", TOO_FEW_NODES) in done


def test_a_node_that_is_lost_again_and_again_is_left_out_for_longer_each_time() -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR)).all_run()
    pauses = []
    for number in range(6):
        before = story.now
        done = story.sees(c=ended(name=str(number)), **{name: running("a", "b", "d") for name in "abd"})
        while Start("c") not in done:
            done = story.sees()
            assert story.now - before < 700
        pauses.append(story.now - before)
        story.sees(2, **{name: running(*FOUR, name=str(number + 1)) for name in FOUR})
    assert pauses == pytest.approx([0, 0, 10, 20, 40, 80], abs=1)


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(lambda number: ended(name=f"c{number}"), id="its agent ends before it is seen"),
        pytest.param(
            lambda number: ended(name="c", problem=f"disk full ({number})"), id="it cannot be started"
        ),
    ],
)
def test_a_node_whose_starts_come_to_nothing_is_left_out_for_longer_each_time(
    again: Callable[[int], Observation],
) -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR)).all_run()
    assert Start("c") in story.sees(c=ended(name="c"), **{name: running("a", "b", "d") for name in "abd"})
    pauses = []
    for number in range(4):
        before = story.now
        done = story.sees(c=again(number))
        while Start("c") not in done:
            done = story.sees()
            assert story.now - before < 700
        pauses.append(story.now - before)
    assert pauses == pytest.approx([0, 10, 20, 40], abs=1)


def test_losses_are_forgiven_after_a_while_in_which_all_was_well() -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR)).all_run()
    for number in range(4):
        three = {name: running("a", "b", "d") for name in "abd"}
        assert Start("c") in story.sees(c=ended(name=str(number)), **three), "it is not left out"
        story.sees(700, **{name: running(*FOUR, name=str(number + 1)) for name in FOUR})


def test_who_was_asked_and_went_out_of_sight_is_asked_again_when_it_is_back() -> None:
    story = Story().all_run()
    three = {name: running("a", "b", "d") for name in "abd"}
    drain(story, "e")
    assert story.sees(c=ended(), **three) == [Start("c")]
    assert story.sees(1, c=lost(ended())) == []
    assert story.sees(1, c=ended()) == [Start("c")]


def test_the_voters_are_reduced_to_those_who_train_on_and_extended_again() -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR))
    story.all_run()
    three = {name: running("a", "b", "c") for name in "abc"}
    smaller = Voters(0, 1, ("a", "b", "c"))
    done = story.sees(6, d=UNSEEN, **three)
    assert done == [SetVoters(name, smaller) for name in "abc"]
    assert (story.state.voters.version, story.state.newest) == (0, smaller)
    story.sees(1, a=running("a", "b", "c", voters=smaller))
    assert story.state.voters.version == 0  # b, c and d could still train by the old one
    story.sees(1, b=running("a", "b", "c", voters=smaller))
    assert (story.state.voters, story.state.granted) == (smaller, None)
    larger = Voters(0, 2, FOUR)
    done = story.sees(7, **{name: running(*FOUR, voters=smaller) for name in FOUR})
    assert done == [SetVoters(name, larger) for name in FOUR]


def test_the_voters_stay_while_a_node_is_missed_for_a_few_seconds_now_and_then() -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR)).all_run()
    three = {name: running("a", "b", "c") for name in "abc"}
    for _ in range(3):
        assert story.sees(4, d=lost(agent("orphaned")), **three) == []
        assert story.sees(1, **{name: running(*FOUR) for name in FOUR}) == []
    assert len(story.sees(6, d=lost(agent("orphaned")), **three)) == 3


def test_fewer_voters_count_only_once_most_of_them_hold_what_was_committed() -> None:
    """Else those who lack it could go on without, though it was with a majority of the old voters."""
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR)).all_run()
    smaller = Voters(0, 1, ("a", "b", "c"))
    three = {name: running("a", "b", "c", held=(0, 90)) for name in "abc"}
    assert story.sees(6, d=UNSEEN, **three) == [SetVoters(name, smaller) for name in "abc"]
    three = {name: dataclasses.replace(each, voters=smaller) for name, each in three.items()}
    waits = story.sees(6, **{**three, "a": dataclasses.replace(three["a"], held=(0, 100))})
    assert waits == [], "all have written them down, and need not again"
    assert story.state.voters.version == 0
    story.sees(5, b=dataclasses.replace(three["b"], held=(0, 100)))
    assert story.state.voters == smaller


def test_while_nodes_name_different_rounds_the_voters_stay() -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR)).all_run()
    assert story.sees(30, a=running("a", "b", "c"), b=running("a", "b", "d"), c=UNSEEN, d=UNSEEN) == []


def test_a_newcomer_has_no_vote_before_it_holds_what_the_others_do() -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR), nodes=("a", "b", "c"))
    for name in "abc":
        story.seen[name] = running(*FOUR)
    assert story.sees(60, d=running(*FOUR, held=(-1, 0))) == []
    assert len(story.sees(1, d=running(*FOUR, held=(0, 120)))) == 4


def test_while_voters_are_being_written_down_both_must_be_fenced() -> None:
    story = Story(rules=Rules(nodes=NODES, min_nodes=1, max_nodes=5), nodes=NODES)
    story.state = dataclasses.replace(story.state, granted=Voters(0, 1, ("a", "b", "c")))
    assert story.state.voters.is_fenced_by(("c", "d", "e"))
    assert not story.state.is_fenced_by(("c", "d", "e"))
    assert story.state.is_fenced_by(("b", "c", "d"))
    assert story.state.may_train(("a", "b"))


def test_a_node_whose_disk_is_lost_has_no_vote_until_it_is_a_new_one() -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR))
    story.all_run()
    three = {name: running("a", "b", "c") for name in "abc"}
    done = story.sees(7, d=UNSTARTED, **three)
    smaller = Voters(0, 1, ("a", "b", "c"))
    assert done == [SetVoters(name, smaller) for name in "abc"]
    done = story.sees(2, **{name: running("a", "b", "c", voters=smaller) for name in "abc"})
    assert done == [Start("d", is_new=True)]


def test_a_fence_on_a_lost_disk_proves_nothing() -> None:
    story = Story(rules=Rules(nodes=("a", "b", "c"), min_nodes=1, max_nodes=3), nodes=("a", "b", "c"))
    story.all_run(("a", "b", "c"))
    story.sees(3, a=UNSEEN, b=UNSTARTED, c=ended("orphaned"))
    story.sees(5, b=Observation(fence=1), c=ended("orphaned", fence=1))
    assert story.state.generation == 0  # a, and what b has forgotten, may have gone further than c
    story.sees(5, a=Observation(fence=1, held=(0, 120)))
    assert (story.state.generation, story.state.host) == (1, "a")
    assert story.state.forgot == frozenset(), "of this generation it has promised what it holds"


@pytest.mark.parametrize(
    ("states", "outcome"),
    [
        pytest.param(("succeeded", "succeeded"), "succeeded", id="trained to the end"),
        pytest.param(("succeeded", "stopped"), "succeeded", id="a late one was stopped"),
        pytest.param(("failed", "stopped"), "failed", id="failed, and the other was stopped for it"),
        pytest.param(("failed", "succeeded"), "failed", id="failed on one"),
        pytest.param(("stopped", "stopped"), "stopped", id="stopped by someone"),
    ],
)
def test_when_nobody_runs_any_more_the_job_is_over(states: tuple[str, str], outcome: str) -> None:
    story = Story(rules=Rules(nodes=("a", "b"), min_nodes=2, max_nodes=2), nodes=("a", "b"))
    story.all_run(("a", "b"))
    assert story.sees(a=ended(states[0]), b=ended(states[1])) == [Finish(outcome)]  # type: ignore[arg-type]


def test_a_node_that_is_missed_for_a_moment_only_is_not_spoken_of() -> None:
    story = Story(rules=dataclasses.replace(RULES, min_nodes=4)).all_run()
    alone = {name: agent("rendezvous") for name in "abc"}
    assert not [text for text in story.says(2.8, d=ended(), **alone) if "waiting" in text]
    assert [text for text in story.says(1) if "3 of at least 4 nodes are there; waiting" in text]


def test_a_node_that_finished_first_is_no_lost_host() -> None:
    story = Story().all_run()
    assert story.sees(60, a=ended("succeeded"), **{name: agent("waiting") for name in "bcd"}) == []


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_the_others_are_stopped_after_their_last_words(state: str) -> None:
    story = Story().all_run()
    assert story.sees(2.8, b=ended(state)) == []
    assert story.sees(1) == [Stop("a"), Stop("c"), Stop("d")]


def test_how_an_older_generation_ended_says_nothing() -> None:
    story = Story()
    story.state = dataclasses.replace(story.state, generation=3, voters=Voters(3, 0, FOUR))
    story.seen.update({name: running(*FOUR, generation=3) for name in "abc"})
    assert story.sees(d=ended("stopped", generation=2)) == [Start("d")]


def test_who_still_trains_in_a_generation_that_is_over_is_stopped_when_the_job_has_succeeded() -> None:
    story = Story()
    story.state = dataclasses.replace(story.state, generation=1, voters=Voters(1, 0, ("a", "b", "c")))
    story.seen.update({name: ended("succeeded", generation=1) for name in "abc"})
    assert story.sees(10, d=running(*FOUR)) == [Stop("d")]


def test_the_end_names_who_cannot_be_reached() -> None:
    story = Story(rules=Rules(nodes=("a", "b"), min_nodes=1, max_nodes=2), nodes=("a", "b"))
    story.all_run(("a", "b"))
    (finish,) = story.sees(a=ended("succeeded"), b=lost(running("a", "b")))
    assert finish == Finish("succeeded", "b cannot be reached; an agent may still run there")


def test_a_run_is_not_over_where_nodes_out_of_reach_may_be_training_together() -> None:
    """Else the next `kit up` would begin a second group beside them."""
    story = Story(rules=dataclasses.replace(RULES, min_nodes=2)).all_run()
    (finish,) = story.sees(a=ended("stopped"), **{name: lost(running(*FOUR)) for name in "bcd"})
    assert (finish.outcome, finish.may_go_on) == ("stopped", ("b", "c", "d"))  # type: ignore[union-attr]
    story = Story(rules=dataclasses.replace(RULES, min_nodes=2)).all_run()
    few = {name: lost(running(*FOUR)) for name in "cd"}
    (finish,) = story.sees(a=ended("failed"), b=ended("stopped"), **few)
    assert (finish.outcome, finish.may_go_on) == ("failed", ())  # type: ignore[union-attr]
    story = Story(rules=dataclasses.replace(RULES, min_nodes=2)).all_run()
    (finish,) = story.sees(a=ended("succeeded"), **{name: lost(running(*FOUR)) for name in "bcd"})
    assert (finish.outcome, finish.may_go_on) == ("succeeded", ()), "all ranks have ended"  # type: ignore[union-attr]


def starts_the_lost_rendezvous_host_again() -> Story:
    """On `a` of two nodes, both of which the job needs."""
    story = Story(Rules(nodes=("a", "b"), min_nodes=2, max_nodes=2), ("a", "b")).all_run(("a", "b"))
    assert Fence("a", 1) in story.sees(1, a=ended(name="old"), b=agent("orphaned"))
    done = story.sees(2, a=ended(name="old", fence=1), b=agent("fenced", fence=1))
    assert Start("a") in done, done
    return story


def test_a_node_that_was_started_and_has_ended_since_it_was_observed_is_waited_for() -> None:
    """What its ranks printed last is not shown yet."""
    story = starts_the_lost_rendezvous_host_again()
    assert story.sees(1, b=ended("succeeded", generation=1)) == []
    new = ended("succeeded", generation=1, name="new")
    assert story.sees(a=new) == [Finish("succeeded")]


def test_a_node_that_was_started_and_never_came_is_not_waited_for_for_long() -> None:
    story = starts_the_lost_rendezvous_host_again()
    assert Finish("succeeded") in story.sees(4, b=ended("succeeded", generation=1))


def test_a_generation_of_another_supervisor_is_left_alone() -> None:
    story = Story().all_run()
    theirs = {name: running(*FOUR, generation=7) for name in FOUR}
    done = story.all(600, **theirs)
    assert done == [Notice("generation 7 was begun by another kit up; this one leaves it alone")]
    assert story.sees(**{name: ended("succeeded", generation=7) for name in FOUR}) == [Finish("succeeded")]


def test_nodes_that_another_supervisor_has_fenced_are_left_alone() -> None:
    story = Story().all_run()
    done = story.all(600, **{name: agent("fenced", fence=1) for name in FOUR})
    assert done == [Notice("generation 1 was begun by another kit up; this one leaves it alone")]


def taken_over(story: Story) -> Story:
    """Another supervisor, with what the one before had written down."""
    other = Story(rules=story.rules)
    other.state = State.from_dict(json.loads(json.dumps(story.state.to_dict())), story.rules)
    other.seen, other.now = dict(story.seen), 5.0  # its clock is another
    return other


def test_who_takes_over_a_job_that_trains_does_nothing() -> None:
    assert taken_over(Story().all_run()).all(600) == []


def test_who_takes_over_while_fencing_goes_on_with_it() -> None:
    story = Story().all_run()
    story.sees(1, a=UNSEEN, **orphans("b", "c", "d"))
    other = taken_over(story)
    assert other.sees() == [Fence(name, 1) for name in "bcde"]
    other.sees(2, **fenced("b", "c", "d", generation=0, fence=1))
    assert other.state.voters == Voters(1, 0, ("b", "c", "d"))


def test_what_must_be_written_down_is_and_does_not_change_with_time() -> None:
    story = Story().all_run()
    story.state = dataclasses.replace(
        story.state,
        granted=Voters(0, 1, ("a", "b")),
        next_generation=4,
        called_off=3,
        forgot=frozenset("c"),
        known={**story.state.known, "d": NodeHistory(failures=(1.0, 2.0, 900.0))},
    )
    fields = json.loads(json.dumps(story.state.to_dict()))
    again = State.from_dict(fields, RULES)
    assert again.to_dict() == fields
    for name in ("generation", "host", "port", "voters", "granted", "next_generation", "called_off"):
        assert getattr(again, name) == getattr(story.state, name)
    assert (again.had_folder, again.forgot) == (frozenset(FOUR), frozenset("c"))
    assert again.known["d"].paused_until - again.elapsed_s == PAUSE_S
    before = Story().all_run()
    fields = before.state.to_dict()
    before.all(600)
    assert before.state.to_dict() == fields


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_changes_nothing(jump: float) -> None:
    story = Story(rules=dataclasses.replace(RULES, nodes=FOUR), nodes=FOUR)
    story.sees(5, a=agent("rendezvous"), **dict.fromkeys("bcd", UNSEEN))
    story.now += jump
    assert story.sees(5) == []
    story.sees(1, **dict.fromkeys("bcd", UNSTARTED))
    story.now += jump
    assert len(story.sees(65)) == 3  # asked again after a minute of its own


def test_decide_does_not_change_what_it_is_given() -> None:
    story = Story().all_run()
    state, seen = story.state, {**story.seen, "a": ended()}
    known: Mapping[str, NodeHistory] = dict(state.known)
    decide(state, seen, story.now, RULES)
    assert state.known == known
    assert decide(state, seen, story.now, RULES) == decide(state, seen, story.now, RULES)


# --- nodes that the user wants out ----------------------------------------------------------------------------


def drain(story: Story, *nodes: str) -> Story:
    story.rules = dataclasses.replace(story.rules, drained=frozenset(nodes))
    return story


def test_a_drained_node_leaves_and_a_spare_comes() -> None:
    story = drain(Story().all_run(), "c")
    assert story.sees(40) == [Drain("c")]
    three = {name: running("a", "b", "d") for name in "abd"}
    assert story.sees(1, c=ended("ended"), **three) == [Start("e", is_new=True)]
    four = {name: running("a", "b", "d", "e") for name in "abde"}
    assert {type(action) for action in story.sees(600, **four)} == {SetVoters}
    assert story.state.known["c"].failures == ()


def test_a_drained_node_comes_back_when_that_is_undone() -> None:
    rules = dataclasses.replace(RULES, nodes=FOUR)
    story = drain(Story(rules).all_run(), "c")
    story.sees(1)
    story.sees(1, c=ended("ended"), **{name: running("a", "b", "d") for name in "abd"})
    assert drain(story).sees(1) == [Start("c")]


def test_a_drained_host_of_the_rendezvous_is_followed_by_another_generation() -> None:
    story = drain(Story().all_run(), "a")
    assert story.sees(1) == [Drain("a")]
    orphans = {name: agent("orphaned") for name in "bcd"}
    done = story.all(1, a=ended("ended"), **orphans)
    assert {Fence(name, 1) for name in "abcd"} <= set(done)
    assert Notice("the rendezvous host a is drained: fencing generation 0") in done
    fenced = {name: agent("fenced", fence=1) for name in "bcd"}
    done += story.sees(1, a=ended("ended", fence=1), **fenced)
    assert story.state.generation == 1
    assert story.state.host != "a"
    assert "a" not in {action.node for action in done if isinstance(action, Start | Join)}


def test_a_lost_host_is_fenced_at_once_when_all_who_are_left_know_it() -> None:
    story = Story().all_run()
    assert story.sees(0.1, a=lost(story.seen["a"]), **orphans("b", "c")) == []
    assert Fence("b", 1) in story.sees(0.1, **orphans("d"))


def test_a_node_that_the_job_needs_is_not_drained_before_another_is_there() -> None:
    story = Story(Rules(nodes=("a", "b"), min_nodes=2, max_nodes=2), nodes=("a", "b")).all_run(("a", "b"))
    assert drain(story, "b").all(60) == [Notice("b is not drained yet: 1 of at least 2 nodes are left")]


def test_who_is_left_out_for_a_while_does_not_count_as_one_that_can_come() -> None:
    rules = Rules(nodes=("a", "b", "c"), min_nodes=2, max_nodes=3)
    story = Story(rules, nodes=("a", "b", "c")).all_run(("a", "b", "c"))
    failures = (story.state.elapsed_s,) * 6
    known = {**story.state.known, "c": dataclasses.replace(story.state.known["c"], failures=failures)}
    story.state = dataclasses.replace(story.state, known=known)
    done = drain(story, "b").all(5, c=ended(), **{name: running("a", "b") for name in "ab"})
    assert not [action for action in done if isinstance(action, Drain)]


def test_a_job_that_is_short_of_nodes_says_that_some_are_drained() -> None:
    rules = Rules(nodes=("a", "b", "c"), min_nodes=2, max_nodes=3)
    story = drain(Story(rules, nodes=("a", "b", "c")).all_run(("a", "b", "c")), "c")
    story.sees(1)
    two = {name: running("a", "b") for name in "ab"}
    story.sees(20, c=ended("ended"), **two)
    (text,) = story.says(4, a=agent("rendezvous"), b=UNSEEN)
    assert text.endswith("for b (c: drained; kit drain --undo)")


BROKEN = "GPU 3: Xid 79 (it has fallen off the bus)"


def test_a_broken_node_is_drained_once_and_a_spare_comes() -> None:
    story = Story().all_run()
    three = {name: running("a", "b", "d") for name in "abd"}
    left = ended("ended", broken=BROKEN, name="c1")
    assert story.sees(0.2, c=left, **three) == [Exclude("c", BROKEN), Start("e", is_new=True)]
    drain(story, "c")
    assert not [action for action in story.sees(60) if action.node == "c"]
    # The user takes it back: then it is tried once more, and drained again if it breaks again.
    drain(story)
    story.rules = dataclasses.replace(story.rules, max_nodes=5)
    assert Start("c") in story.sees(2)
    assert Exclude("c", BROKEN) in story.sees(1, c=ended("ended", broken=BROKEN, name="c2"))


def test_a_broken_node_that_was_not_started_is_drained_too() -> None:
    story = Story().all_run()
    back = dataclasses.replace(ended("running", name="c1"), broken=BROKEN, problem=BROKEN)
    assert Exclude("c", BROKEN) in story.sees(1, c=back, **{name: running("a", "b", "d") for name in "abd"})


def test_a_broken_node_that_the_job_needs_is_tried_again() -> None:
    story = Story(Rules(nodes=("a", "b"), min_nodes=2, max_nodes=2), nodes=("a", "b")).all_run(("a", "b"))
    done = story.all(3, b=ended("ended", broken=BROKEN), a=agent("rendezvous"))
    assert Start("b") in done
    said = [action.text for action in done if isinstance(action, Notice)]
    assert f"b: {BROKEN}; it is tried again: at least 2 nodes are needed, and without it 1 are left" in said


def test_at_the_end_it_is_said_where_an_agent_may_still_run() -> None:
    story = Story().all_run()
    seen = {"a": ended("failed"), "b": lost(running(*FOUR)), "c": lost(ended("failed")), "d": ended("failed")}
    (finish,) = story.sees(**seen)
    assert isinstance(finish, Finish)
    assert (finish.outcome, finish.text) == ("failed", "b cannot be reached; an agent may still run there")


def test_who_succeeds_later_is_waited_for_and_not_where_another_does_not_find_the_others() -> None:
    story = Story().all_run()
    done = {name: ended("succeeded") for name in "ad"}
    assert story.sees(60, **done, b=running(*FOUR), c=agent("waiting", members=FOUR)) == []
    assert story.sees(1, c=agent("orphaned")) == [Stop("b"), Stop("c")]


def test_how_long_a_job_waits_for_nodes_is_counted_anew_each_time_and_not_while_enough_are_here() -> None:
    two = ("a", "b")
    story = Story(Rules(nodes=two, min_nodes=2, max_nodes=2, wait_s=100.0), nodes=two)

    def ends(for_s: float, **seen: Observation) -> bool:
        return any(isinstance(action, Finish) for action in story.sees(for_s, **seen))

    alone = {"a": agent("starting"), "b": UNSEEN}
    assert not ends(60, **alone)
    assert not ends(10, **{name: running(*two) for name in two})
    assert not ends(60, **alone), "it has trained meanwhile"
    assert not ends(1, **{name: agent("starting") for name in two})
    assert not ends(60, **alone), "both were here meanwhile"
    assert ends(50)
