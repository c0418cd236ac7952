"""`keel chat`: a conversation with a trained model in the terminal."""

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

REPLY_S = 300.0
"""Longest wait for the next token of an answer."""
CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""Control characters that are not printed: a terminal obeys them."""
HELP = "/reset begins a new conversation, Ctrl-C cuts an answer short, Ctrl-D ends"


class ChatSession:
    """Messages to and from one model behind an OpenAI-compatible endpoint."""

    def __init__(self, client: OpenAI, model: str) -> None:
        self._client, self._model = client, model
        self.messages: list[Any] = []

    def ask(self, text: str) -> None:
        """Print the answer as it arrives, and keep both turns.

        Ctrl-C cuts the answer short, and its beginning is kept. Raises openai.OpenAIError and
        forgets the question if the endpoint fails.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for chunk in self._client.chat.completions.create(
                model=self._model, messages=messages, stream=True
            ):
                for choice in chunk.choices:
                    part = choice.delta.content or ""
                    answer += part
                    print(part.translate(CONTROLS), end="", flush=True)
        except KeyboardInterrupt:
            print(" …", end="")
        finally:
            print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]


@contextmanager
def connected(folder: Path | None, url: str, *, gpu: bool) -> Iterator[ChatSession]:
    """A conversation with the model behind `url`, or of `folder`, which is served meanwhile."""
    if url:
        key = os.environ.get("VLLM_API_KEY", "none")
        with OpenAI(base_url=url, api_key=key, timeout=REPLY_S, max_retries=0) as client:
            yield ChatSession(client, _first_model(client, url))
        return
    assert folder is not None
    model, key = find_model(folder), secrets.token_hex(16)
    with (
        serving(model, {}, gpu=gpu, key=key) as server,
        OpenAI(
            base_url=server.url,
            api_key=key,
            timeout=REPLY_S,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # past any proxy
        ) as client,
    ):
        yield ChatSession(client, model.name)


def _first_model(client: OpenAI, url: str) -> str:
    try:
        models = client.models.list(timeout=REPLY_S).data
    except openai.OpenAIError as error:
        raise ConfigError(f"--url {url}: {error}; give the address that ends in /v1") from error
    if not models:
        raise ConfigError(f"--url {url}: serves no model")
    return models[0].id


def chat(
    folder: Path | None,
    *,
    url: str,
    prompt: str | None,
    gpu: bool,
    read: Callable[[str], str] = input,
) -> None:
    """Answer `prompt`, or each line of the user until Ctrl-D.

    folder: served meanwhile if there is no `url`. read: returns a line, or raises EOFError.
    Raises ConfigError, and RuntimeError if the server, or the answer to `prompt`, fails.
    """
    with connected(folder, url, gpu=gpu) as conversation:
        if prompt is not None:
            try:
                conversation.ask(prompt)
            except openai.OpenAIError as error:
                raise RuntimeError(f"no answer: {error}") from error
            return
        print(HELP)
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
                    print(f"no answer: {error}".translate(CONTROLS))
