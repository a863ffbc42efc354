"""Nothing that a killed process has started goes on, even what it was starting."""

import os
import select
import time

import psutil
import pytest

from cellfeed_tuner._measuring._process import kill_tree

N_MOST = 200  # of one started by another, so that a kill that fails ends all the same


def sleeping_child():
    """Start a process that sleeps."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


def starting_more(ready):
    """Start one process after the other, each by the last."""
    for number in range(N_MOST):
        if number == 10:
            os.write(ready, b"x")
        if os.fork():
            time.sleep(600)
            os._exit(0)


def with_an_orphan(ready):
    """Start a process whose parent has ended."""
    parent = os.fork()
    if parent == 0:
        sleeping_child()
        os._exit(0)
    os.waitpid(parent, 0)
    os.write(ready, b"x")
    time.sleep(600)


@pytest.mark.parametrize("start", [starting_more, with_an_orphan])
def test_nothing_goes_on(start):
    # All hold the other end of a pipe, which ends with the last of them.
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            start(sender)
        finally:
            os._exit(0)
    os.close(sender)
    assert os.read(receiver, 1) == b"x"
    kill_tree(pid)
    os.waitpid(pid, 0)
    ready, _, _ = select.select([receiver], [], [], 300.0)
    assert ready
    assert os.read(receiver, 1) == b""
    os.close(receiver)


def test_what_leads_no_group_is_killed_without_its_group():
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    kill_tree(pid)
    assert os.waitpid(pid, 0)[1] == 9
    kill_tree(pid)  # of what is gone, nothing is left to kill
    assert not psutil.pid_exists(pid)
