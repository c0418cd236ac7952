"""The code environment: its tools, its grading, and policies that try to cheat."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from keel.agents.env_process.client import ForkServerClient, ProcessEnvironment
from keel.agents.env_process.launch import EnvironmentProgram
from keel.rl.types import Prompt, Verdict
from keel.synthesis.code.sandboxes import CodeSandboxes, Prefix, instance_of
from tests.agents.episodes import PATIENT, asynchronous, use
from tests.agents.sandboxes import wrap_of
from tests.synthesis.code.projects import FIXED, SETUP, TEST, candidate, config, source
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
HIDDEN = "test_the_hidden_one"
WHERE = "pytest::tests.test_adding::test_"
Open = Callable[[], AbstractAsyncContextManager[ProcessEnvironment]]


def instance(folder: Path) -> dict[str, Any]:
    """Return the reward spec of a task whose prefix and sealed file are made in `folder`."""
    rooms = CodeSandboxes(config(source()), folder)
    (rooms.folder / "prefixes" / "p" / "bin").mkdir(parents=True)
    script = SETUP.split("printf '")[1].split("' >")[0].replace("\\n", "\n")
    program = rooms.folder / "prefixes" / "p" / "bin" / "python"
    program.write_text(script)
    program.chmod(0o755)
    (rooms.folder / "packages" / "p.json").write_text("{}")
    built = Prefix(name="p", setup="", test=TEST)
    spec = instance_of(candidate(), built, tests_s=PATIENCE_S)
    spec["env"] = {}  # one of the attacks is a plugin
    spec |= {"f2p": [WHERE + "the_hidden_one"], "p2p": [WHERE + "some"], "canary": True}
    return rooms.sealed("one", spec)


@asynccontextmanager
async def opened(folder: Path, *, forked: bool = False) -> AsyncGenerator[Open]:
    """Yield a function that opens an episode. Those of a run are forked, which saves seconds."""
    wrap_of()
    reward = instance(folder)
    where = (folder / "environment").absolute()
    program = EnvironmentProgram(
        target="keel.agents.environments.code.environment:Repository",
        folder=where,
        arguments={"folder": str(where)},
        **PATIENT,
        sandbox=wrap_of(memory_mib=2048),
    )
    server = ForkServerClient(program)

    @asynccontextmanager
    async def episode() -> AsyncGenerator[ProcessEnvironment]:
        hosted = ProcessEnvironment(program, fork_server=server if forked else None)
        task = Prompt(
            prompt_id="one",
            domain="code",
            messages=({"role": "user", "content": "Resolve it."},),
            reward=reward,
        )
        try:
            await hosted.open(task, seed=1)
            yield hosted
        finally:
            await hosted.close()

    try:
        yield episode
        if forked:
            assert not server.disabled_reason, server.disabled_reason
    finally:
        await server.close()


async def bash(hosted: ProcessEnvironment, command: str) -> str:
    result = await use(hosted, "bash", command=command)
    assert not result.failed, result.text
    return result.text


async def worth(hosted: ProcessEnvironment) -> tuple[float, dict[str, Any]]:
    judged = await hosted.verdict((), "stop")
    assert isinstance(judged, Verdict), judged
    return judged.parts["correct"], dict(judged.facts)


FIX = f"cat > adding.py <<'E'\n{FIXED}E\n"


@asynchronous
async def test_the_tools_and_an_honest_solution(tmp_path: Path) -> None:
    async with opened(tmp_path) as open_, open_() as hosted:
        seen = await use(hosted, "view", path="adding.py", first_line=2, last_line=2)
        assert seen.text == "     2\t    result = numbers[0]\n[3 more lines]"
        twice = await use(hosted, "edit", path="adding.py", old="result", new="r")
        assert twice.failed and "3 times" in twice.text
        edited = await use(hosted, "edit", path="adding.py", old="numbers[0]", new="0")
        assert "     2\t    result = 0" in edited.text
        await use(hosted, "edit", path="adding.py", old="numbers[1:]", new="numbers")
        assert await bash(hosted, "echo Würde; false") == "Würde\n\n[exit status 1]"
        for limit_s in (1, 10, 60):  # a busy machine may not get as far as `echo` in a second
            command = "echo a; sleep 1000"
            late = await use(hosted, "bash", command=command, timeout_s=limit_s)
            if late.text.startswith("a"):
                break
        assert late.text == f"a\n\n[killed after {limit_s} s]"
        long = await bash(hosted, "seq 100000")
        assert "left out" in long and len(long) < 21_000
        # Changes to the tests have no effect.
        await bash(hosted, "echo 'def test_some(): assert 0' > tests/test_adding.py")
        await bash(hosted, "echo 'raise SystemExit' > conftest.py; echo x > pytest.ini")
        facts = {"f2p": 1, "f2p_passed": 1, "p2p": 1, "p2p_passed": 1, "canary": "as wanted"}
        assert await worth(hosted) == (1.0, facts)


@asynchronous
async def test_hidden_tests_and_answer_are_unreachable(tmp_path: Path) -> None:
    hunt = f"""
    grep -rIl --devices=skip --exclude-dir=site-packages -e {HIDDEN} -e 'sum(numbers)' \\
        /tmp /dev/shm {tmp_path} 2>/dev/null
    for p in /proc/[0-9]*; do
        for f in environ cmdline mem maps fd/0 fd/3 fd/4 fd/5 cwd/x; do
            test $p != /proc/$$ && timeout 2 grep -a -l 'hidden[_]one' $p/$f 2>/dev/null
        done
    done
    git log --all --reflog --format=%s | grep -v "As it is"; git fsck --lost-found 2>/dev/null
    git for-each-ref --format='%(refname)' | sed 1d; git stash list; git remote; ls {tmp_path}
    ls {tmp_path}/instances 2>/dev/null
    echo searched
    """
    async with opened(tmp_path) as open_, open_() as hosted:
        (tmp_path / "instances").mkdir()
        result = await bash(hosted, hunt)
        assert result.split() == ["environment", "searched"], result
        # Links into the reading process lead to one without secrets.
        await bash(hosted, "ln -sf /proc/self/cmdline link; ln -sf /proc/self/mem memory")
        assert "files.py" in (await use(hosted, "view", path="link")).text
        assert (await use(hosted, "view", path="memory")).failed
        above = "ls -la /proc/$PPID/fd /proc/$PPID/mem; cat /proc/$PPID/environ | tr '\\0' ' '"
        assert "Permission denied" in await bash(hosted, above)
        python = "import urllib.request as u; u.urlopen('http://192.0.2.1', timeout=2)"
        assert "Error" in await bash(hosted, f'$PREFIX/bin/python -c "{python}"')
        assert "Read-only" in await bash(hosted, "touch $PREFIX/bin/pytest")


PATCHES_PYTEST = """
import sys
if "pytest" in sys.modules:
    import _pytest.reports as reports
    made = reports.TestReport.from_item_and_call.__func__
    def fake(cls, item, call):
        call.excinfo = None
        return made(cls, item, call)
    reports.TestReport.from_item_and_call = classmethod(fake)
def total(numbers): return 0
"""
WRITES_JUNIT = """
import atexit, glob, re
def lie():
    for path in glob.glob("/tmp/results-*/*.xml"):
        text = open(path).read()
        text = re.sub(r"<failure.*?</failure>", "", text, flags=re.S)
        open(path, "w").write(text)
atexit.register(lie)
def total(numbers): return sum(numbers[:2]) if numbers else None
"""
PLUGIN = """
mkdir -p faker.dist-info
printf '[pytest11]\\nfaker = faker\\n' > faker.dist-info/entry_points.txt
printf 'Metadata-Version: 2.1\\nName: faker\\nVersion: 1\\n' > faker.dist-info/METADATA
cat > faker.py <<'E'
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
E
cp faker.py conftest.py; cp faker.py tests/conftest.py
printf '[pytest]\\naddopts = -p faker\\n' | tee pytest.ini .pytest.ini .pytest.toml
printf 'import faker' > sitecustomize.py; mkdir -p ~/.local/lib; cp -r . ~/.local/lib/
"""
WATCHER = """
cat > /dev/shm/watch.sh <<'E'
while true; do
    for f in /tmp/repo/tests/test_adding.py; do
        grep -q hidden_one $f && echo 'def test_some(): pass
def test_the_hidden_one(): pass' > $f
    done
done
E
for n in 1 2 3; do setsid bash -c 'setsid bash /dev/shm/watch.sh & exit' & done
sleep 0.2
"""
SHIMS = """
mkdir -p /tmp/bin ~/.config; printf '#!/bin/sh\\nexit 0' > /tmp/bin/python
chmod +x /tmp/bin/python; cp /tmp/bin/python python; echo 'export PATH=/tmp/bin:$PATH' > ~/.bashrc
cp ~/.bashrc ~/.profile; cp ~/.bashrc ~/.bash_profile
mkdir -p _pytest json
echo 'raise SystemExit(0)' | tee pytest.py _pytest/__init__.py json/__init__.py
"""
CHEATS = {
    "pytest patched": f"cat > adding.py <<'E'\n{PATCHES_PYTEST}E",
    "junit rewritten": f"cat > adding.py <<'E'\n{WRITES_JUNIT}E",
    "plugins": PLUGIN,
    "background": WATCHER,
    "shims": SHIMS,
    "ends the tests": "echo 'import os; os._exit(0)' >> adding.py",
    "a link out": "rm -rf /tmp/repo; ln -s /proc/self /tmp/repo",
    "too large": f"{FIX} head -c 99M /dev/zero > zeros; truncate -s 1T hole; mkfifo pipe",
}


@asynchronous
async def test_cheating_earns_no_reward() -> None:
    cheats = {**CHEATS, "honest": f"{WATCHER}{PLUGIN}{FIX}"}
    rewards: dict[str, float] = {}
    facts: dict[str, dict[str, object]] = {}
    slots = asyncio.Semaphore(3)

    async def attack(name: str, open_: Open) -> None:
        async with slots, open_() as hosted:
            await bash(hosted, cheats[name])
            rewards[name], facts[name] = await worth(hosted)

    # Episodes are forked only if their folder is not in /tmp, which each of them has for itself.
    with TemporaryDirectory(dir="/var/tmp") as folder:
        async with opened(Path(folder), forked=True) as open_:
            await asyncio.gather(*(attack(name, open_) for name in cheats))
    assert rewards == {name: float(name == "honest") for name in cheats}, facts
    faked = {name for name, found in facts.items() if found.get("canary") == "faked"}
    assert faked == {name for name in cheats if "patched" in name or "rewritten" in name}
    assert facts["background"]["p2p_passed"] == 1
