"""What a request is refused with, in OpenAI's error format."""

from __future__ import annotations

from typing import Any

from keel.agents.budget import Budget
from keel.rl.types import FinishReason

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """A request that gets an error instead of a turn."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        limit: FinishReason | None = None,
    ) -> None:
        """status: of HTTP. param: the field that is wrong. limit: of the budget, that it met."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.limit: FinishReason | None = limit

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def wrong(param: str, message: str) -> ApiError:
    """A field that cannot be taken as it is."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def spent(budget: Budget, limit: FinishReason, context: int = 0) -> ApiError:
    """What a client gets once a limit is met. It never asks again: with 429 and 5xx its own
    libraries would. `context`: tokens of what it has sent."""
    if limit == "window":  # in OpenAI's words, by which programs know that they may shorten it
        return ApiError(
            400,
            f"This model's maximum context length is {budget.window} tokens. However, your "
            f"messages resulted in {context} tokens; one at least must be left to sample",
            param="messages",
            code="context_length_exceeded",
            limit=limit,
        )
    what, code = {
        "turns": (f"{budget.turns} turns", "turns_spent"),
        "deadline": (f"{budget.deadline_s:g} s", "time_spent"),
    }.get(limit, (f"{budget.tokens} sampled tokens", "tokens_spent"))
    return ApiError(403, f"the trajectory's budget of {what} is spent", code=code, limit=limit)
