import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.pages import OutOfPages, PageAllocator, block_table, pages_for


def test_pages_come_out_ascending_and_lowest_first():
    allocator = PageAllocator(8)
    first, second = allocator.alloc(3), allocator.alloc(2)
    assert first.tolist() == [0, 1, 2] and second.tolist() == [3, 4]
    allocator.free(first)
    assert allocator.alloc(4).tolist() == [0, 1, 2, 5]
    assert first.dtype == np.int32


def test_extending_prefers_pages_above_the_last_one():
    allocator = PageAllocator(8)
    low, mine = allocator.alloc(2), allocator.alloc(2)
    allocator.free(low)
    mine = allocator.extend(mine, 4)
    assert mine.tolist() == [2, 3, 4, 5, 6, 7]
    assert allocator.extend(mine, 2).tolist()[-2:] == [0, 1]  # only lower ones are left


def test_extending_nothing_is_an_allocation():
    assert PageAllocator(3).extend(np.zeros(0, np.int32), 2).tolist() == [0, 1]


def test_asking_for_too_many_pages_names_both_counts_and_takes_nothing():
    allocator = PageAllocator(4)
    allocator.alloc(3)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 4 free"):
        allocator.alloc(2)
    assert allocator.num_free == 1


@pytest.mark.parametrize(
    "pages, message",
    [
        ([0, 0], "page 0 is freed twice"),
        ([3], "page 3 is freed twice"),
        ([-1], "page -1 is not one of the 4 pages"),
        ([4], "page 4 is not one of the 4 pages"),
        ([[0, 1]], r"shape \(1, 2\)"),
    ],
    ids=["named-twice", "already-free", "padding-id", "past-the-end", "two-axes"],
)
def test_a_wrong_free_raises_and_frees_nothing(pages, message):
    allocator = PageAllocator(4)
    allocator.alloc(3)
    with pytest.raises(ValueError, match=message):
        allocator.free(pages)
    assert allocator.num_free == 1


@pytest.mark.parametrize("count", [0, -3])
def test_an_allocator_without_pages_is_refused(count):
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(count)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="count is -1"):
        PageAllocator(2).alloc(-1)


@given(st.lists(st.tuples(st.sampled_from(["alloc", "extend", "free"]), st.integers(0, 5))))
def test_no_page_has_two_owners_and_none_is_lost(steps):
    allocator, owned = PageAllocator(16), []
    for action, number in steps:
        if action == "free" and owned:
            allocator.free(owned.pop(number % len(owned)))
        elif number <= allocator.num_free:
            if action == "extend" and owned:
                owned.append(allocator.extend(owned.pop(), number))
            elif action == "alloc":
                owned.append(allocator.alloc(number))
        held = [page for pages in owned for page in pages.tolist()]
        assert len(held) == len(set(held))
        assert len(held) + allocator.num_free == 16


def test_page_counts_round_up():
    assert [pages_for(tokens, 16) for tokens in (0, 1, 15, 16, 17)] == [0, 1, 1, 1, 2]


def test_a_block_table_is_padded_with_minus_one():
    table = block_table([np.array([4, 2]), np.array([], np.int32)], 3)
    assert table.tolist() == [[4, 2, -1], [-1, -1, -1]] and table.dtype == np.int32
    with pytest.raises(ValueError, match="4 pages in a table 3 pages wide"):
        block_table([np.arange(4)], 3)
