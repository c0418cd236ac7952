"""Errors of the endpoint, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from keel.agents.budget import Budget
from keel.rl.types import FinishReason

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """An error that answers a request in place of a turn."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        limit: FinishReason | None = None,
    ) -> None:
        """status: HTTP status. param: the wrong field. limit: the budget's limit that was met."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.limit: FinishReason | None = limit

    @property
    def of_the_endpoint(self) -> bool:
        """Whether the endpoint or an engine failed, or was too busy, and not the program."""
        return self.status >= 500 or self.status in (408, 429)

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
    """Return the error for a wrong field."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def spent(budget: Budget, limit: FinishReason, context: int = 0) -> ApiError:
    """Return the error for a spent budget. Its status is one that clients do not retry, unlike 429
    and 5xx. context: tokens of the request's messages."""
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
        "deadline": (f"{budget.timeout_s:g} s", "time_spent"),
    }.get(limit, (f"{budget.tokens} sampled tokens", "tokens_spent"))
    return ApiError(403, f"the trajectory's budget of {what} is spent", code=code, limit=limit)
