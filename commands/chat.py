"""`keel chat`: chat with a trained model in the terminal. This module imports no heavy library."""

import os
import readline  # noqa: F401  gives `input` its line editing and history
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
from openai import OpenAI

from keel.commands.serve import run_server, server_options
from keel.configs.schema import ConfigError

_REPLY_S = 300.0
"""Timeout in seconds for the next token of a response."""
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""Control characters that the terminal would interpret. They are removed before printing."""
_HELP = "/reset: start a new conversation; Ctrl-C: cut an answer short; Ctrl-D: exit"


class _ChatSession:
    """A conversation with a single model behind an OpenAI-compatible endpoint."""

    def __init__(self, client: OpenAI, model: str) -> None:
        self._client, self._model = client, model
        self.messages: list[Any] = []

    def ask(self, text: str) -> None:
        """Stream the answer to the terminal, and append both the question and the answer to the
        conversation. Ctrl-C stops the answer but keeps what has been received so far. If the
        endpoint fails, the question is dropped and openai.OpenAIError is raised."""
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
def _open_chat(folder: Path | None, url: str, *, gpu: bool) -> Iterator[_ChatSession]:
    """Open a chat with the model at `url`. If there is no URL, serve the model in `folder` until
    the context exits."""
    key, http_client = os.environ.get("VLLM_API_KEY", "none"), None
    with ExitStack() as stack:
        if folder is not None:
            options, key = server_options(folder), secrets.token_hex(16)
            url = stack.enter_context(run_server(options, gpu=gpu, key=key)).url
            http_client = openai.DefaultHttpxClient(trust_env=False)  # past any proxy
        client = stack.enter_context(
            OpenAI(
                base_url=url,
                api_key=key,
                timeout=_REPLY_S,
                max_retries=0,
                http_client=http_client,
            )
        )
        try:
            name = client.models.list().data[0].id
        except (openai.OpenAIError, IndexError) as error:
            if folder is not None:
                raise RuntimeError(f"the server of {folder} does not answer: {error}") from error
            why = "give the address of a server, which ends in /v1"
            raise ConfigError(f"--url {url}: {error}; {why}") from error
        yield _ChatSession(client, name)


def chat(folder: Path | None, *, url: str, prompt: str | None, gpu: bool) -> None:
    """Answer `prompt` if given, or else every line the user types until Ctrl-D. Without a `url`,
    the model in `folder` is served for the duration of the chat.

    Raises ConfigError if the model can't be served or reached, and RuntimeError if the server fails
    or `prompt` can't be answered.
    """
    with _open_chat(folder, url, gpu=gpu) as conversation:
        if prompt is not None:
            try:
                conversation.ask(prompt)
            except openai.OpenAIError as error:
                raise RuntimeError(f"no answer: {error}") from error
            return
        print(_HELP)
        while True:
            try:
                line = input("> ").strip()
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
