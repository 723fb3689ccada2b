"""Stop strings in a text that arrives in parts."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string was found; it ends after `end` characters of the text pushed last."""

    stop: str
    end: int


class StopMatcher:
    """Finds the first stop string to be complete, and holds back exactly what may still become one.

    - Of several stops the one whose last character comes first wins; of those that end together, the longest. So the
      result does not depend on how the text was cut, and a stop that is a prefix of another always wins over it.
    - Held back is the longest suffix that is a proper prefix of a stop (F41), so never more than the longest stop
      less one character.

    An Aho-Corasick automaton: each character costs O(1) amortised, whatever the stops. Where no stop has begun, a
    regular expression skips to the next character that begins one, so ordinary text costs a scan in C. `str.find` for
    each stop was rejected: on text made of prefixes of the stops it looks at everything held back again at each token.
    """

    __slots__ = ("_automaton", "_held", "_match", "_state")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = compile_stops(stops)
        self._state = 0
        self._held = ""  # its length is the depth of the state
        self._match: StopMatch | None = None

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """Take the next text; what is safe to show, and the match if one is now complete.

        Text from the start of a match on is never given. After a match nothing more comes.
        """
        if self._match is not None:
            return "", self._match
        automaton = self._automaton
        nodes, state, begins = automaton.nodes, self._state, automaton.begins
        if state == 0 and begins(text) is None:  # nearly every push; nothing is held then
            return text, None
        position, length = 0, len(text)
        while position < length:
            if state == 0:
                found = begins(text, position)
                if found is None:
                    break
                position = found.start()
            character = text[position]
            position += 1
            while (following := nodes[state].children.get(character)) is None and state:
                state = nodes[state].fallback
            state = following or 0
            if (stop := nodes[state].stop) is not None:
                self._match = StopMatch(stop, position)
                held, self._held = self._held, ""
                return (held + text[:position])[: -len(stop)], self._match
        self._state = state
        whole = self._held + text
        keep = len(whole) - nodes[state].depth
        self._held = whole[keep:]
        return whole[:keep], None

    def flush(self) -> str:
        """The end of the text: what was held back can no longer become a stop."""
        held, self._held, self._state = self._held, "", 0
        return held


@dataclass(slots=True)
class _Node:
    """A prefix of some stop; `fallback` is its longest proper suffix that is one too; `stop`: the longest it ends in."""

    depth: int
    children: dict[str, int]
    fallback: int = 0
    stop: str | None = None


class _Automaton:
    """The compiled stops; read only."""

    __slots__ = ("begins", "nodes")

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        nodes = [_Node(0, {})]
        for stop in stops:
            state = 0
            for character in stop:
                if (child := nodes[state].children.get(character)) is None:
                    child = len(nodes)
                    nodes[state].children[character] = child
                    nodes.append(_Node(nodes[state].depth + 1, {}))
                state = child
            nodes[state].stop = stop
        self.nodes = nodes
        self._link()
        first = "".join(re.escape(character) for character in nodes[0].children)
        self.begins = re.compile(f"[{first}]" if first else r"(?!)").search

    def _link(self) -> None:
        """Breadth first, so that a node's fallback, being shorter, is finished before it."""
        nodes = self.nodes
        queue = deque(nodes[0].children.values())
        while queue:
            state = queue.popleft()
            node = nodes[state]
            if node.stop is None:
                node.stop = nodes[node.fallback].stop
            for character, child in node.children.items():
                queue.append(child)
                fallback = node.fallback
                while character not in nodes[fallback].children and fallback:
                    fallback = nodes[fallback].fallback
                nodes[child].fallback = nodes[fallback].children.get(character, 0)


@lru_cache(maxsize=16)
def compile_stops(stops: tuple[str, ...]) -> _Automaton:
    """The automaton of `stops`, shared by the continuations of a request and by requests that stop alike.

    Few are kept: the largest that a request may ask for (16 × 256 characters) takes a megabyte.
    """
    return _Automaton(stops)
