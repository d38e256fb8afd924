"""What every section of the configuration is."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen section that knows no key beyond its own and converts no type behind the user's back."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
