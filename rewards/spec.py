"""The base class of reward specs that are parsed with pydantic."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class RewardSpec(BaseModel):
    """The reward spec of a prompt, with the fields that all kinds share."""

    model_config = STRICT
    kind: str = ""
    environment: Any = None
    columns: Any = None

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Parse a reward spec. Raises ValueError naming the invalid field."""
        try:
            return cls.model_validate(dict(spec))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
            wrong = first["msg"].removeprefix("Value error, ")
            if first["type"] == "model_type":
                wrong = "must be an object"
            whole = isinstance(first["input"], Mapping)  # the message names the field
            value = "" if whole else f", is {repr(first['input'])[:100]}"
            raise ValueError(
                f"{spec.get('kind')}{where and f' {where[1:]}'}: {wrong}{value}"
            ) from error
