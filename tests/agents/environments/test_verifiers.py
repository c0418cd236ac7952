"""Environments of PrimeIntellect's `verifiers`, run in an interpreter that has the real package."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.program import resolve_command
from keel.agents.environments import verifiers_env
from keel.rewards.sandbox.environments import find_runtime
from keel.rl.types import ENVIRONMENT, Prompt, Verdict
from tests.agents.endpoint.kit import check_law
from tests.agents.endpoint.test_driven import drive
from tests.agents.sandboxes import wrap_of
from tests.agents.scripted import Policy
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent

SUMS = """
import random
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.answer))

    @vf.metric
    async def length(self, trace) -> int:
        return len(trace.last_reply)

    @vf.metric
    async def draw(self) -> float:
        return random.random()

class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for n in range(3):
            yield SumTask(SumData(prompt="1 + 1?", answer=2 + n // 2), self.config.task)

__all__ = ["SumTaskset"]
"""
JUDGED = SUMS.replace(
    "return float(trace.last_reply == str(task.answer))",
    "import openai; return float(bool(openai.OpenAI()))",
)
VAULT = """
import verifiers.v1 as vf

class VaultTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "vault"

    @vf.tool
    def look(self, place: str) -> str:
        '''What is in a place.'''
        return f"the code of the {place} is 7"

class VaultTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [VaultTools(vf.ToolsetConfig())]

    @vf.reward
    async def opened(self, trace) -> float:
        return float(trace.last_reply == "7") - 1

class VaultTaskset(vf.Taskset[VaultTask]):
    def load(self):
        yield VaultTask(vf.TaskData(prompt="Look."), self.config.task)

class VaultConfig(vf.EnvConfig):
    guard: vf.AgentConfig = vf.AgentConfig()
    user: vf.AgentConfig = vf.AgentConfig()
    asks_user: bool = False

class VaultEnv(vf.Env[VaultConfig]):
    async def setup(self, agents):
        agents.user.trainable = False

    async def run(self, task, agents):
        if self.config.asks_user:
            return await agents.user.run(task)
        async with agents.guard.interaction(task) as guard:
            await guard.turn()
            await guard.turn("And the code?")

__all__ = ["VaultTaskset", "VaultEnv"]

if __name__ == "__main__":
    VaultTools.run()
"""


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """An interpreter with `verifiers`, and with the environments above as packages."""
    python = os.environ.get("KEEL_TEST_VERIFIERS", "")
    if not python:
        pytest.skip(
            "needs verifiers, whose 570 MB take minutes to install: set KEEL_TEST_VERIFIERS to the "
            "interpreter of a virtual environment with verifiers==0.4.0"
        )
    (packages,) = (Path(python).parent.parent / "lib").glob("python*/site-packages")
    environments = {"tiny_sums": SUMS, "tiny_judged": JUDGED, "tiny_vault": VAULT}
    files = {packages / f"{name}.py": source for name, source in environments.items()}
    for file, source in files.items():
        file.write_text(source)
    yield python
    for file in files:
        file.unlink()


def rows_of(python: str, *words: str) -> list[dict[str, Any]]:
    script = [python, "-P", verifiers_env.__file__, *words]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_S)
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def played(python: str, policy: Policy, row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the verdict of a task and its messages."""
    ended, finished = drive(
        "",
        policy=policy,
        task=Prompt(
            prompt_id="p",
            domain="d",
            messages=({"role": "user", "content": row["prompt"]},),
            reward={"kind": ENVIRONMENT, "environment": row["environment"]},
        ),
        command=resolve_command(
            "keel.agents.environments.verifiers_env:rollout", python=python, folder=HERE
        ),
        python=python,
        folder=HERE,
        memory_mib=4096,
        sandbox=wrap_of(network="loopback"),
        readable=find_runtime(python).paths,
        tells_reward=True,
    )
    assert not ended.failed, ended
    check_law(policy, finished.segments)
    return ended.verdict, list(finished.index.messages)


def test_single_turn(python: str) -> None:
    first, second, third = rows_of(python, "tiny-sums", "--scale", "-2", "2")
    assert [row["prompt"] for row in (first, second)] == ["1 + 1?", "1 + 1?\n\n(task 1)"]
    draws = set[Any]()
    for row, score, right in ((first, 1.0, 2.0), (third, 0.5, 0.0)):
        verdict, _ = played(python, Policy(["2"]), row)
        draws.add(verdict.facts["draw"])
        facts = {"reward": right, "right": right, "length": 1, "draw": verdict.facts["draw"]}
        assert verdict == Verdict(parts={"correct": score}, facts=facts)
    assert len(draws) == 1, "a group shares its seed"


def test_tools_and_turns(python: str) -> None:
    (row,) = rows_of(python, "tiny-vault", "--scale", "-1", "0")
    verdict, messages = played(python, Policy(['@vault_look "safe"', "I see.", "7"]), row)
    roles = [message["role"] for message in messages]
    assert roles == ["assistant", "tool", "assistant", "user", "assistant"]
    assert "the code of the safe is 7" in messages[1]["content"]
    assert verdict.parts == {"correct": 1.0}


def test_untrained_agents_need_their_own_client(python: str) -> None:
    (row,) = rows_of(python, "tiny-vault", "--config", '{"asks_user": true}')
    assert "agent 'user' isn't trained" in played(python, Policy(["7"]), row)[0]


def test_rewards_outside_the_scale_are_named(python: str) -> None:
    row, *_ = rows_of(python, "tiny-sums")
    assert "reward 2 is outside --scale 0 1" in played(python, Policy(["2"]), row)[0]


def test_failed_scoring_gives_no_verdict(python: str) -> None:
    """A judge without its own key fails instead of sampling from the policy."""
    row, *_ = rows_of(python, "tiny-judged", "--scale", "0", "2")
    policy = Policy(["2"])
    assert "scoring: OpenAIError" in played(python, policy, row)[0]
    assert len(policy.requests) == 1


def test_missing_packages_are_named(python: str) -> None:
    for interpreter, cure in ((sys.executable, "'verifiers>=0.4'"), (python, "its package")):
        script = [interpreter, "-P", verifiers_env.__file__, "no-such-environment"]
        done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_S)
        assert cure in done.stderr
