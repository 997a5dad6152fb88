"""Nodes that are refused, again and again: how often, when it is hopeless, what a record has of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fleet import FOUR, decided, fleet_with, node, seen, wish

from stretto.core.cluster import Wish
from stretto.core.events import Event, NodeAdded, NodeLost, NodeRefused
from stretto.journal.folds.nodes import HOPELESS, NodeRecord, Refusals, end_of
from stretto.substrate.fleet.fleet import Fleet
from stretto.substrate.fleet.nodes import LaunchFailure


class TestHopeless:
    @staticmethod
    def refuse(fleet: Fleet, times: int, why: str = "no quota at {}", begin: int = 1) -> list[Event]:
        """Two nodes are asked for so many times, and both fail, one after the other."""
        told: list[Event] = []
        for number in range(begin, begin + times):
            told.append(decided(float(number), wish(2)))
            for order in fleet.wish(wish(2), float(number)).orders:
                told += fleet.began(order.name, float(number)).events
                assert fleet.hopeless is None
                told += fleet.failed(
                    {order.name: LaunchFailure(why.format(f"{number}:00"))}, number + 0.5
                ).events
        return told

    def test_it_is_after_so_many_refusals_alike_in_a_row(self) -> None:
        fleet = Fleet([FOUR])
        self.refuse(fleet, HOPELESS - 1)
        assert fleet.hopeless is None
        self.refuse(fleet, HOPELESS - 1, "no line")
        assert fleet.hopeless is None, "that is something else"
        self.refuse(fleet, 1, "no line")
        assert fleet.hopeless is not None
        assert (fleet.hopeless.times, fleet.hopeless.instance) == (HOPELESS, "four")
        assert fleet.hopeless.why == "no line"

    def test_it_is_not_while_a_node_is_there_or_on_the_way(self) -> None:
        fleet = Fleet([FOUR])
        fleet.begin([seen("own", instance="")])
        self.refuse(fleet, HOPELESS)
        assert fleet.hopeless is None
        fleet.see([replace(seen("small", instance=""), slots=1)], 90.0)
        assert fleet.hopeless is not None, "one of another size is of no use"
        fleet.wish(wish(1), 91.0)
        assert fleet.hopeless is None

    def test_it_is_not_where_a_node_came_before(self) -> None:
        fleet = fleet_with("four-1")
        fleet.see([], 20.0)
        self.refuse(fleet, 2 * HOPELESS, begin=30)
        assert fleet.hopeless is None

    def test_it_is_where_the_kind_is_not_known_but_not_where_nodes_are_fixed(self) -> None:
        launches, fixed = Fleet([FOUR]), Fleet()
        for number in range(HOPELESS):
            for fleet in (launches, fixed):
                assert fleet.hopeless is None
                fleet.wish(Wish((("eight", 1),)), float(number))
        assert launches.hopeless is not None
        assert "nodes of four only" in launches.hopeless.why
        assert fixed.hopeless is None

    @pytest.mark.parametrize("adopts", [False, True])
    def test_a_run_that_goes_on_has_one_more_try(self, adopts: bool) -> None:
        history = self.refuse(Fleet([FOUR], adopts=adopts), HOPELESS)
        fleet = Fleet([FOUR], adopts=adopts)
        fleet.recall(history, [], 60.0)
        assert fleet.hopeless is None
        self.refuse(fleet, 1, begin=70)
        assert fleet.hopeless is not None
        mended = Fleet([FOUR], adopts=adopts)
        came = NodeAdded(t_s=70.0, node=node("four-99"), init_s=5.0)
        mended.recall([*history, came, NodeLost(t_s=80.0, node_id="four-99")], [], 90.0)
        self.refuse(mended, HOPELESS, begin=100)
        assert mended.hopeless is None


class Rounds:
    """A fleet, what is done to it, and the record of that."""

    def __init__(self) -> None:
        self.fleet = Fleet([FOUR], start_s=100.0)
        self.history: list[Event] = []
        self.t_s = 0.0

    def do(self, deed: str, count: int, later_s: float) -> None:
        self.t_s += later_s
        waiting = [name for name in self.fleet.rented if self.fleet.key_of(name) is None]
        match deed:
            case "wish":
                self.wish(wish(count))
            case "wish for others too":
                self.wish(Wish((("eight", 1), ("four", count), ("nine", 2))))
            case "begin":
                for name in waiting[:count]:
                    self.history += self.fleet.began(name, self.t_s).events
            case "come":
                self.history += self.fleet.see([seen(name) for name in waiting[:1]], self.t_s).events
            case "be late":
                self.t_s += 100.0
                self.history += self.fleet.see([], self.t_s).events
            case why:
                failures = {name: LaunchFailure(why.format(name)) for name in waiting[:count]}
                self.history += self.fleet.failed(failures, self.t_s).events

    def wish(self, wished: Wish) -> None:
        self.history.append(decided(self.t_s, wished))
        self.history += self.fleet.wish(wished, self.t_s).events


REASONS = ("no quota", "{} has no quota", "no line to {}")
DEEDS = st.sampled_from(("wish", "wish", "begin", *REASONS, "be late", "wish for others too"))
LATER_S = st.sampled_from((0.0, 1.0, 1.0))


class TestRecord:
    @given(
        rounds=st.lists(st.tuples(DEEDS, st.integers(0, 4), LATER_S), max_size=40),
        comes=st.integers(0, 200),
    )
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_it_counts_as_the_fleet_does(self, rounds: list[tuple[str, int, float]], comes: int) -> None:
        made = Rounds()
        for number, (deed, count, later_s) in enumerate(rounds):
            made.do("come" if number == comes else deed, count, later_s)
            assert NodeRecord.of(made.history).refusals == made.fleet._refusals

    def test_nodes_that_fail_together_each_with_its_own_words_count_once(self) -> None:
        made = Rounds()
        for _ in range(HOPELESS - 1):
            for deed in ("wish", "begin", "{} has no quota"):
                made.do(deed, 4, 1.0)
        told = [event for event in made.history if isinstance(event, NodeRefused)]
        assert len(told) == 4 * (HOPELESS - 1)
        assert NodeRecord.of(made.history).refusals.times == HOPELESS - 1
        again = Fleet([FOUR])
        again.recall(made.history, [], 60.0)
        again.wish(wish(4), 61.0)
        assert again.hopeless is None


class TestWords:
    """Which refusals are alike."""

    @staticmethod
    def times(*said: str) -> int:
        refusals = Refusals()
        for number, why in enumerate(said):
            event = NodeRefused(t_s=float(number), instance="four", count=1, why=why)
            refusals = refusals.after(event, awaits=False)
        return refusals.times

    @pytest.mark.parametrize(
        ("text", "letters", "end"),
        [
            ("all  of\nit", 9, "all of it"),
            ("not all of it", 9, "… of it"),
            ("no/space/in/it", 5, "…in/it"),
            ("", 9, ""),
        ],
    )
    def test_a_text_is_cut_at_a_word_and_that_shows(self, text: str, letters: int, end: str) -> None:
        assert end_of(text, letters) == end

    @given(words=st.lists(st.sampled_from(("a", "word", "quota", "longest")), min_size=12, max_size=40))
    @settings(max_examples=100, deadline=None, derandomize=True)
    def test_what_is_cut_off_does_not_matter(self, words: list[str]) -> None:
        """Numbers of nodes become longer, so that elsewhere less is left of the same text."""
        text = " ".join(["{0}", *words, "{0}"])
        said = [
            f"exit code 1: {end_of(text.format(name), 40)}" for name in ("four-9", "four-10", "four-1000")
        ]
        assert self.times(*said) == 3

    def test_a_text_that_just_fits_is_like_one_that_is_cut(self) -> None:
        whole, cut = (f"it said: {end_of(f'no quota here for four-{n}', 24)}" for n in (9, 10))
        assert "…" in cut
        assert "…" not in whole
        assert self.times(whole, cut, whole) == 3

    def test_one_long_word_that_is_cut_is_like_another_end_of_it(self) -> None:
        said = [f"it said: {end_of('no/quota/' * 9 + more, 40)}" for more in ("at/all", "of/any/kind")]
        assert self.times(*said) == 2

    @pytest.mark.parametrize(
        "other", ["it said: no line", "they said: … no quota", "it said: … no quota at all", "it said: quota"]
    )
    def test_other_words_are_something_else(self, other: str) -> None:
        assert self.times("it said: … really no quota", other) == 1
        assert self.times(other, "it said: … really no quota") == 1
