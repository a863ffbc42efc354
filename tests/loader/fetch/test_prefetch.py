from concurrent.futures import ThreadPoolExecutor

import pytest

from cellfeed.fetch import Stage, in_stages, prefetched


def numbers_then_error():
    yield from range(3)
    raise OSError("no more")


def test_all_come_in_order():
    with in_stages(range(5), [Stage(str, 1)]) as made:
        assert list(made) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("n_ahead", [1, 2, 3, 8])
def test_where_an_item_cannot_be_had_those_before_it_come_first(n_ahead):
    made: list[str] = []
    with ThreadPoolExecutor(2) as threads, pytest.raises(OSError, match="no more"):
        made.extend(prefetched(str, numbers_then_error(), threads, n_ahead))
    assert made == ["0", "1", "2"]


def test_an_error_comes_where_the_result_would_have_come():
    made: list[int] = []
    with ThreadPoolExecutor(2) as threads, pytest.raises(ZeroDivisionError):
        made.extend(prefetched(lambda n: 1 // (2 - n), range(5), threads, 4))
    assert made == [0, 1]


def test_nothing_is_made_that_is_not_nearly_due():
    asked: list[int] = []

    def numbers():
        for n in range(9):
            asked.append(n)
            yield n

    with ThreadPoolExecutor(1) as threads:
        assert next(prefetched(str, numbers(), threads, 2)) == "0"
        assert asked == [0, 1, 2]
