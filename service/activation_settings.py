"""Settings of activations: how long they may take, and when one is taken back."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ActivationSettings(BaseModel):
    """A version that isn't ready in every process within `timeout_s` is not activated.

    One that was activated is rolled back, once, where within `watch_s` the ANN recall of at least
    `recall_checks` checked queries is more than `recall_drop` below what it was before; 0 checks:
    never.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    watch_s: float = Field(default=1_800.0, gt=0, le=86_400)
    recall_checks: int = Field(default=100, ge=0, le=100_000)
    recall_drop: float = Field(default=0.03, gt=0, le=1)
