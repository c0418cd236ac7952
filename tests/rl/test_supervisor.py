"""Tests the limits on restarts and the killing of process trees."""

import signal
import subprocess

import pytest

from keel.rl.supervisor import RestartLimit, kill_tree
from tests.agents.episodes import alive
from tests.waiting import PATIENCE_S, wait_for


def test_restarts_are_counted_within_a_period() -> None:
    now = [0.0]
    limit = RestartLimit(2, 7200.0, lambda: now[0])
    assert [limit.count() for _ in range(3)] == ["", "", "3 times within 2 hours"]
    now[0] = 7200.0
    assert limit.count() == ""
    assert RestartLimit(0).count() == "1 time within 3 hours"


@pytest.mark.e2e
@pytest.mark.parametrize(
    "command", ["setsid sh -c 'echo $$; exec sleep 1000' & wait", "sleep 1000 & echo $!"]
)
def test_tree_is_killed_with_or_without_its_leader(command: str) -> None:
    leader = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout
    child = int(leader.stdout.readline())
    if "wait" not in command:
        assert leader.wait(PATIENCE_S) == 0
    kill_tree(leader)
    wait_for(lambda: not alive(child), "end of the child")
    assert leader.wait(PATIENCE_S) in (0, -signal.SIGKILL)
