"""`pagewire chat`: one question to a running server, or a conversation; the model's chat template is the server's."""

from __future__ import annotations

import argparse
import asyncio
import sys

from pagewire.cli.answer import keys_of, params_of, prompt_of, show, speed, url_of
from pagewire.cli.conversation import Conversation, converse
from pagewire.errors import InvalidRequest
from pagewire_client import connect


def run(namespace: argparse.Namespace) -> int:
    """Stream the answer, or the answers, to standard output."""
    if namespace.prompt is None and (namespace.interactive or sys.stdin.isatty()):
        conversation = Conversation(namespace.system)
        connection = connect(url_of(namespace), name="pagewire chat", **keys_of(namespace))
        return converse(connection, conversation, params_of(namespace), shows_speed=namespace.stats)
    conversation = Conversation(namespace.system)
    question = prompt_of(namespace)
    if not question.strip():  # a template makes a prompt of it all the same, and the model an answer to nothing
        raise InvalidRequest("must not be empty", field="prompt")
    conversation.ask(question)
    asyncio.run(_chat(namespace, conversation, url_of(namespace)))
    return 0


async def _chat(namespace: argparse.Namespace, conversation: Conversation, url: str) -> None:
    async with connect(url, name="pagewire chat", **keys_of(namespace)) as client:
        result = await show(client.chat(conversation.messages, **params_of(namespace)), sys.stdout)
    if namespace.stats:
        print(speed(result), file=sys.stderr)
