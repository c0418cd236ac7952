"""What a request is refused with, in OpenAI's error format."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class Refused(Exception):
    """A request that gets an error instead of a turn."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """status: of HTTP. param: the field that is wrong."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

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


def wrong(param: str, message: str) -> Refused:
    """A field that cannot be taken as it is."""
    return Refused(400, f"{param}: {message}", param=param, code="invalid_value")
