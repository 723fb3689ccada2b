"""A request as the engine knows it: token ids, parameters that passed every check, and who asked."""

from __future__ import annotations

from dataclasses import dataclass, field

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
class Request:
    """What was asked, after admission checks.

    Attributes:
        request_id: unique in this engine.
        prompt_ids: int32 [P], P ≥ 1.
        params: `max_tokens` and `seed` are resolved (not None).
        arrival_ns: by the engine's clock.
        output_ids: of each of `n` sequences, what another engine generated before; () for a request that is new.
    """

    request_id: str
    prompt_ids: TokenArray
    params: SamplingParams
    arrival_ns: int
    priority: int = 0
    namespace: Namespace = field(default_factory=Namespace)
    output_ids: tuple[TokenArray, ...] = ()

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
