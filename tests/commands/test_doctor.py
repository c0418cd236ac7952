"""`keel doctor`: findings on good and bad machines."""

from __future__ import annotations

import pytest

from keel.commands import doctor
from keel.commands.cli import main
from keel.commands.doctor import verdict
from keel.configs.load import load_config

WELL = {
    "mismatch/logp_abs": 1e-7,
    "routing/fallback_fraction": 0.0,
    "rollout/dropped_completions": 0.0,
}


@pytest.mark.parametrize("name", WELL)
def test_mismatch_of_engine_and_trainer(name: str) -> None:
    assert verdict(WELL, 30.0)[0] == "ok"
    assert verdict({**WELL, name: 1.0}, 30.0)[0] == "WRONG"


def test_step_is_a_valid_quickstart() -> None:
    assert load_config("quickstart", doctor._STEP).run.steps == 1


@pytest.mark.e2e
def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    *looks, _ = doctor.LOOKS  # other tests run steps
    monkeypatch.setattr(doctor, "LOOKS", looks)
    status = main(["doctor"])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    looked = {line.split()[0] for line in output.out.splitlines()}
    assert {look.__name__ for look in looks} <= looked
