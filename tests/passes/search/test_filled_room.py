"""What is tried in the room that a choice leaves: never more than that, never slower, by the prices of the search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from passes.search.filled_room import with_more_memory
from passes.search.solvers.stage_search import StageSearch
from tests.passes.search.small_chains import searches


def kept(search: StageSearch, picks: tuple[int, ...]) -> float:
    return float(search.costs.memory[range(len(picks)), list(picks)].sum())


@given(searches(most_ranks=1), st.integers(0, 60), st.data())
def test_choices_keep_to_the_room_and_are_faster(search: StageSearch, room: int, data: st.DataObject) -> None:
    costs = search.costs
    blocks, strategies = costs.time.shape
    picks = data.draw(st.lists(st.integers(0, strategies - 1), min_size=blocks, max_size=blocks))
    choice = search.ordered((0,), picks)
    followers = with_more_memory(search, choice, room)
    for each in followers:
        assert kept(search, each.picks) <= kept(search, choice.picks) + room
        assert each.time_s < choice.time_s and each.time_s == search.times.timed(each.first_blocks, each.picks)
        assert len({*zip(choice.picks, each.picks, strict=True)} - {(pick, pick) for pick in choice.picks}) >= 1
    assert [each.time_s for each in followers] == sorted(each.time_s for each in followers)
    more = with_more_memory(search, choice, 2 * room)
    assert not followers or (more and more[0].time_s <= followers[0].time_s)


@given(searches(most_ranks=1))
def test_nothing_is_left_to_try_where_all_blocks_are_at_their_fastest(search: StageSearch) -> None:
    costs = search.costs
    picks = costs.time.argmin(axis=1)
    assert with_more_memory(search, search.ordered((0,), picks.tolist()), 1e9) == []
