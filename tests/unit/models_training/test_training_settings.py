"""Settings of a fit, written and read back."""

from __future__ import annotations

from hivlp.models.training.settings import FitSettings


def test_settings_are_read_as_they_were_written() -> None:
    assert FitSettings.from_dict(FitSettings().as_dict()) == FitSettings()


def test_a_fit_of_before_scores_were_aimed_at_is_said_to_have_aimed_at_the_prefix() -> None:
    written = FitSettings().as_dict()
    del written["distil"]["aim_ridge"]
    assert FitSettings.from_dict(written).distil.aim_ridge == 0.0
