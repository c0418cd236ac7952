"""The unattended run of all figures, with jobs that are quick."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import run_all as figures
from benchmarks.run_all import JOBS, Figures, Job
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "POLL_S", 0.02)
    monkeypatch.setattr(figures, "GRACE_S", 0.5)


def run(
    out: Path,
    *jobs: Job,
    gpus: str = "0",
    seconds: float = 2 * PATIENCE_S,
    commit: str = "abc",
) -> dict[str, str]:
    runner = Figures(out, gpus.split(","), end=time.monotonic() + seconds, commit=commit)
    runner.run(list(jobs))
    noted = json.loads((out / "figures.json").read_text())
    return {name: entry["status"] for name, entry in noted.items()}


def job(name: str, code: str, *, gpus: int = 1, seconds: float = PATIENCE_S) -> Job:
    return Job(
        name=name,
        module="timeit",
        arguments=shlex.join(["-n1", "-r1", code]),
        gpus=gpus,
        seconds=seconds,
    )


@pytest.mark.e2e
def test_jobs_are_noted_whatever_becomes_of_them(tmp_path: Path) -> None:
    good, bad = job("good", "print('seen')"), job("bad", "1/0")
    endless = job("endless", "__import__('time').sleep(1000)", seconds=0.3)
    large = job("large", "print()", gpus=2)
    assert run(tmp_path, good, bad, endless, large) == {
        "good": "done",
        "bad": "failed",
        "endless": "late",
    }
    assert "seen" in (tmp_path / "good.log").read_text()
    assert "ZeroDivisionError" in (tmp_path / "bad.log").read_text()
    noted = json.loads((tmp_path / "figures.json").read_text())["good"]
    assert noted["commit"] == "abc" and noted["command"].startswith("python -m timeit")


@pytest.mark.e2e
def test_a_job_waits_for_the_one_whose_results_it_uses(tmp_path: Path) -> None:
    first = job("first", f"__import__('time').sleep(0.3),open('{tmp_path}/x','w').close()")
    second = replace(job("second", f"open('{tmp_path}/x')"), after="first")
    lost = replace(job("lost", "print()"), after="bad")
    assert run(tmp_path, first, second, job("bad", "1/0"), lost, gpus="0,1,2,3") == {
        "first": "done",
        "second": "done",
        "bad": "failed",
    }


@pytest.mark.e2e
def test_a_second_run_goes_on_with_the_first(tmp_path: Path) -> None:
    once = job("once", f"open('{tmp_path}/count','a').write('x')")
    run(tmp_path, once)
    run(tmp_path, once, job("more", "print()"))
    assert (tmp_path / "count").read_text() == "x"
    assert run(tmp_path, once) == {"once": "done", "more": "done"}


@pytest.mark.e2e
def test_what_another_commit_did_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = job("once", f"open('{tmp_path}/once/mine','x').write('x')")
    other = job("other", "print()")
    run(tmp_path, once, other)
    capsys.readouterr()
    for at in ("def", "abc", "def"):
        assert run(tmp_path, once, commit=at) == {"once": "done", "other": "done"}
        noted = json.loads((tmp_path / "figures.json").read_text())
        assert (noted["once"]["commit"], noted["other"]["commit"]) == (at, "abc")
    kept = sorted(path.name for path in (tmp_path / "earlier").iterdir())
    assert kept == ["once-abc-1", "once-abc-2", "once-def-1"]
    there = sorted(path.name for path in (tmp_path / "earlier/once-abc-1").iterdir())
    assert there == ["figures.json", "once", "once.log"]
    said = capsys.readouterr().out
    assert f"once: was done at abc, kept in {tmp_path}/earlier/once-abc-1; again at def\n" in said
    assert "other: done at abc, not def\n" in said


@pytest.mark.e2e
def test_results_of_another_commit_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = replace(job("after", "print()"), after="first")
    run(tmp_path, job("first", "print()"))
    assert run(tmp_path, after, commit="def") == {"first": "done"}
    assert "after: left out, without first of def\n" in capsys.readouterr().out


@pytest.mark.e2e
def test_each_job_has_gpus_of_its_own(tmp_path: Path) -> None:
    show = "print(__import__('os').environ['CUDA_VISIBLE_DEVICES'],__import__('time').sleep(0.3))"
    run(tmp_path, job("a", show), job("b", show), job("c", show, gpus=3), gpus="4,5,7")
    seen = [(tmp_path / f"{name}.log").read_text().splitlines()[0] for name in "abc"]
    assert seen == ["4 None", "5 None", "4,5,7 None"]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_what_the_jobs_name_is_there(job: Job, tmp_path: Path) -> None:
    assert find_spec(job.module) is not None
    for word in job.command(tmp_path)[3:]:
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word
