"""How many requests are sent at a time, and which gaps are read, on links that are simulated."""

import heapq

import pytest

from cellfeed._bytes._remote._scheduler import Link, Window

N_REQUESTS = 12_000


def sent_over(window, link, *, latency, bandwidth, n_bytes):
    """Send requests over a link that answers one after the other; return how long they take."""
    under_way = list[tuple[float, float, float]]()
    now, free_at = 1.0, 0.0
    n_sent = n_connections = 0
    while n_sent < N_REQUESTS or under_way:
        while n_sent < N_REQUESTS and len(under_way) < window.limit:
            is_new = len(under_way) >= n_connections
            n_connections += is_new
            first = max(now + latency * (1 + is_new), free_at)
            free_at = first + n_bytes / bandwidth
            heapq.heappush(under_way, (free_at, now, first))
            n_sent += 1
        done, began, first = heapq.heappop(under_way)
        now = done
        link.record(n_bytes, first - began, now)
        window.record(began, now, is_full=n_sent < N_REQUESTS)
    return now - 1.0


@pytest.mark.parametrize("latency", [0.001, 0.01, 0.05, 0.15])
@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 1e8])
def test_throughput_is_that_of_the_link(latency, bandwidth):
    window, link, n_bytes = Window(), Link(), 40_000
    seconds = sent_over(window, link, latency=latency, bandwidth=bandwidth, n_bytes=n_bytes)
    best = min(bandwidth, 256 * n_bytes / latency)
    assert N_REQUESTS * n_bytes / seconds > 0.6 * best
    needed = max(4.0, bandwidth * latency / n_bytes)  # what is under way on a link that is full
    assert window.limit < 8 * needed


@pytest.mark.parametrize(
    ("latency", "bandwidth", "least", "most"),
    [
        (0.15, 1e6, 4_096, 4_096),
        (0.05, 1.25e7, 6_000, 9_000),
        (0.15, 1.25e8, 50_000, 140_000),
        (0.001, 1e9, 200_000, 262_144),
    ],
)
def test_gaps_cost_less_than_requests(latency, bandwidth, least, most):
    link = Link()
    sent_over(Window(), link, latency=latency, bandwidth=bandwidth, n_bytes=40_000)
    assert least <= link.worthwhile_gap <= most


def test_window_halves_when_asked_to_and_not_below_what_is_least():
    window = Window()
    sent_over(window, Link(), latency=0.15, bandwidth=1e8, n_bytes=40_000)
    before = window.limit
    window.overloaded(1e6)
    assert window.limit == before // 2
    for _ in range(10):
        window.overloaded(1e6)
    assert window.limit == 4


def test_times_of_a_window_that_is_not_full_say_nothing():
    window = Window()
    for k in range(1_000):
        window.record(float(k), k + 0.1, is_full=False)
    assert window.limit == 8
