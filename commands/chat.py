"""`keel chat`: talk to a trained model in the terminal."""

from __future__ import annotations

import os
import readline  # noqa: F401  gives `input` its line editing and history
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from openai import OpenAI

from keel.commands.serve import find_model, serving
from keel.configs.schema import ConfigError

_REPLY_S = 300.0
"""Maximum number of seconds to wait for the next token of an answer."""
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""Control characters to remove before printing, because the terminal would interpret them."""
_HELP = "/reset begins a new conversation, Ctrl-C cuts an answer short, Ctrl-D ends"


class ChatSession:
    """A conversation with one model behind an OpenAI-compatible endpoint."""

    def __init__(self, client: OpenAI, model: str) -> None:
        self._client, self._model = client, model
        self.messages: list[Any] = []

    def ask(self, text: str) -> None:
        """Print the answer as it arrives, and add the question and the answer to the conversation.
        Ctrl-C stops the answer and keeps the part that has arrived. If the endpoint fails, the
        question is dropped and openai.OpenAIError is raised."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for chunk in self._client.chat.completions.create(
                model=self._model, messages=messages, stream=True
            ):
                for choice in chunk.choices:
                    part = choice.delta.content or ""
                    answer += part
                    print(part.translate(_CONTROLS), end="", flush=True)
        except KeyboardInterrupt:
            print(" …", end="")
        finally:
            print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]


@contextmanager
def connected(folder: Path | None, url: str, *, gpu: bool) -> Iterator[ChatSession]:
    """Yield a conversation with the model at `url`. Without a URL, the model in `folder` is served
    until the context ends."""
    if url:
        key = os.environ.get("VLLM_API_KEY", "none")
        with OpenAI(base_url=url, api_key=key, timeout=_REPLY_S, max_retries=0) as client:
            try:
                name = client.models.list(timeout=_REPLY_S).data[0].id
            except (openai.OpenAIError, IndexError) as error:
                why = "give the address of a server, which ends in /v1"
                raise ConfigError(f"--url {url}: {error}; {why}") from error
            yield ChatSession(client, name)
        return
    assert folder is not None
    model, key = find_model(folder), secrets.token_hex(16)
    with (
        serving(model, {}, gpu=gpu, key=key) as server,
        OpenAI(
            base_url=server.url,
            api_key=key,
            timeout=_REPLY_S,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # past any proxy
        ) as client,
    ):
        yield ChatSession(client, model.name)


def chat(
    folder: Path | None,
    *,
    url: str,
    prompt: str | None,
    gpu: bool,
    read: Callable[[str], str] = input,
) -> None:
    """Answer `prompt` if it is given. Otherwise answer each line that the user types until Ctrl-D.
    If there is no `url`, `folder` is served for the duration of the chat. `read` returns the next
    line or raises EOFError. Raises ConfigError, or RuntimeError if the server or the answer to
    `prompt` fails."""
    with connected(folder, url, gpu=gpu) as conversation:
        if prompt is not None:
            try:
                conversation.ask(prompt)
            except openai.OpenAIError as error:
                raise RuntimeError(f"no answer: {error}") from error
            return
        print(_HELP)
        while True:
            try:
                line = read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line == "/reset":
                conversation.messages = []
                print("(a new conversation)")
            elif line:
                try:
                    conversation.ask(line)
                except openai.OpenAIError as error:
                    print(f"no answer: {error}".translate(_CONTROLS))
