"""`keel doctor`: findings on good and bad machines."""

from __future__ import annotations

import pytest

from keel.commands import doctor
from keel.commands.cli import main
from keel.commands.doctor import verdict

WELL = {
    "mismatch/logp_abs": 1e-7,
    "routing/fallback_fraction": 0.0,
    "rollout/dropped_completions": 0.0,
}


@pytest.mark.parametrize("name", WELL)
def test_mismatch_of_engine_and_trainer(name: str) -> None:
    assert verdict(WELL, 30.0)[0] == "ok"
    assert verdict({**WELL, name: 1.0}, 30.0)[0] == "WRONG"


@pytest.mark.e2e
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    looked = {line.split()[0] for line in output.out.splitlines()}
    assert {look.__name__ for look in doctor.LOOKS} <= looked
    assert "engine and trainer agree to" in output.out
