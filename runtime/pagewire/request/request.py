"""A request as the engine knows it: token ids, parameters that passed every check, and who asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pagewire_transport.params import SamplingParams

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Inside one namespace prefix blocks are shared; across two, never (F33).

    All fields take part: two tenants, two adapters, two revisions of a model or two KV formats never meet.
    """

    tenant: str = ""
    adapter: str = ""
    model: str = ""
    kv_format: str = ""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wants of time, in milliseconds from the request's arrival. None: what the server promises; 0: nothing.

    Attributes:
        ttft_ms: until the first token.
        itl_ms: between two tokens.
        deadline_ms: until the end; beyond it the request ends with an error.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    deadline_ms: float | None = None

    @property
    def is_any(self) -> bool:
        """Something is asked for."""
        return bool(self.ttft_ms or self.itl_ms or self.deadline_ms)


NO_WISHES: Final = Wishes()


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, after admission checks.

    Attributes:
        request_id: unique in this engine.
        prompt_ids: int32 [P], P ≥ 1.
        params: `max_tokens` and `seed` are resolved (not None).
        arrival_ns: by the engine's clock.
        output_ids: of each of `n` sequences, what another engine generated before; () for a request that is new.
        client: who asks, for fair shares: requests of one client share what is one client's.
    """

    request_id: str
    prompt_ids: TokenArray
    params: SamplingParams
    arrival_ns: int
    priority: int = 0
    namespace: Namespace = field(default_factory=Namespace)
    output_ids: tuple[TokenArray, ...] = ()
    wishes: Wishes = NO_WISHES
    client: str = ""

    @property
    def max_tokens(self) -> int:
        """Resolved `max_tokens`."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    @property
    def seed(self) -> int:
        """Resolved seed."""
        assert self.params.seed is not None
        return self.params.seed
