"""`pagewire chat`: one question to a running server, or a conversation; the model's chat template is the server's."""

from __future__ import annotations

import argparse
import asyncio
import sys

from pagewire.cli.answer import connected, params_of, prompt_of, show, speed
from pagewire.cli.conversation import Conversation, converse
from pagewire.errors import InvalidRequest


def run(namespace: argparse.Namespace) -> int:
    """Stream the answer, or the answers, to standard output."""
    if namespace.prompt is None and (namespace.interactive or sys.stdin.isatty()):
        conversation = Conversation(namespace.system)
        return converse(connected(namespace), conversation, params_of(namespace), shows_speed=namespace.stats)
    conversation = Conversation(namespace.system)
    question = prompt_of(namespace)
    if not question.strip():  # a template makes a prompt of it all the same, and the model an answer to nothing
        raise InvalidRequest("must not be empty", field="prompt")
    conversation.ask(question)
    asyncio.run(_chat(namespace, conversation))
    return 0


async def _chat(namespace: argparse.Namespace, conversation: Conversation) -> None:
    async with connected(namespace) as client:
        result = await show(client.chat(conversation.messages, **params_of(namespace)), sys.stdout)
    if namespace.stats:
        print(speed(result), file=sys.stderr)
