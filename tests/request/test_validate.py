"""Validation: whatever is sent or built by hand ends as parameters that can be sampled, or as an error with a field."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.errors import InvalidRequest, PagewireError, PromptTooLong, UnsupportedFeature
from pagewire.request.validate import validate
from pagewire.step.step import RowJoin, SampleFlag
from pagewire.worker.sampler import Sampler
from pagewire_transport.params import MAX_LOGIT_BIAS, MAX_N, MAX_TOP_LOGPROBS, SamplingParams

VOCAB = 100
MAX_LEN = 64


def check(*, num_prompt: int = 10, stop_allowed: bool = False, **params) -> SamplingParams:
    return validate(
        SamplingParams(**params),
        vocab_size=VOCAB,
        num_prompt=num_prompt,
        max_model_len=MAX_LEN,
        stop_allowed=stop_allowed,
    )


def refusal(kind=InvalidRequest, **asked) -> str | None:
    with pytest.raises(PagewireError) as caught:
        check(**asked)
    assert type(caught.value) is kind, caught.value
    return caught.value.field


@pytest.mark.parametrize(
    ("num_prompt", "asked", "resolved"),
    [
        (10, None, 54),
        (10, 0, 0),
        (10, 1, 1),
        (10, 54, 54),
        (63, None, 1),
        (63, 1, 1),
        (64, 0, 0),
    ],
)
def test_f43_f44_max_tokens_resolves_to_what_fits(num_prompt, asked, resolved):
    assert check(num_prompt=num_prompt, max_tokens=asked).max_tokens == resolved


@pytest.mark.parametrize(
    ("num_prompt", "asked", "kind", "field"),
    [
        (10, 55, InvalidRequest, "params.max_tokens"),
        (10, 2**31 - 1, InvalidRequest, "params.max_tokens"),
        (10, 2**31, InvalidRequest, "params.max_tokens"),
        (10, -1, InvalidRequest, "params.max_tokens"),
        (63, 2, InvalidRequest, "params.max_tokens"),
        (64, None, PromptTooLong, "prompt_ids"),
        (64, 1, PromptTooLong, "prompt_ids"),
        (65, 0, PromptTooLong, "prompt_ids"),
        (65, None, PromptTooLong, "prompt_ids"),
        (0, 1, InvalidRequest, "prompt_ids"),
    ],
)
def test_f43_f44_what_does_not_fit_is_refused(num_prompt, asked, kind, field):
    assert refusal(kind, num_prompt=num_prompt, max_tokens=asked) == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": (1, VOCAB)}, "params.stop_token_ids[1]"),
        ({"logit_bias": {5: 1.0, VOCAB: 1.0}}, f"params.logit_bias[{VOCAB}]"),
        ({"max_tokens": 3, "min_tokens": 4}, "params.min_tokens"),
        ({"min_tokens": 55}, "params.min_tokens"),
        ({"n": MAX_N + 1}, "params.n"),
        ({"logprobs": MAX_TOP_LOGPROBS + 1}, "params.logprobs"),
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)}, "params.logit_bias"),
        ({"temperature": "hot"}, "params.temperature"),
        ({"temperature": None}, "params.temperature"),
        ({"top_p": 0.0}, "params.top_p"),
        ({"stop_token_ids": 3}, "params.stop_token_ids"),
        ({"logit_bias": {"a": 1.0}}, "params.logit_bias"),
        ({"ignore_eos": 1}, "params.ignore_eos"),
        ({"seed": 2**63}, "params.seed"),
    ],
)
def test_values_that_cannot_be_taken(params, field):
    assert refusal(**params) == field


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_numbers_that_are_none(name, value):
    assert refusal(**{name: value}) == f"params.{name}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_biases_that_are_no_numbers(value):
    assert refusal(logit_bias={1: value}) == "params.logit_bias"


def test_stop_strings_need_a_door_with_text():
    assert refusal(UnsupportedFeature, stop=("x",)) == "params.stop"
    assert check(stop=("x",), stop_allowed=True).stop == ("x",)


def test_what_is_taken_stays_as_it_was():
    asked = {"temperature": 0.5, "top_k": 3, "logit_bias": {99: -100.0}, "seed": 7, "n": 2, "stop_token_ids": (99,)}
    assert check(max_tokens=5, **asked) == SamplingParams(max_tokens=5, **asked)


# ---- F47: junk -------------------------------------------------------------------------------------------------------

numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 1e-320, 5e-324, 1e308, True, 0.5])
)
junk = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
plausible = {
    "max_tokens": st.none() | st.integers(0, 70),
    "min_tokens": st.integers(0, 60),
    "temperature": st.floats(0, 100),
    "top_k": st.integers(0, 2**31 - 1),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB), st.floats(-100, 100), max_size=4),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "n": st.integers(1, MAX_N),
    "logprobs": st.none() | st.integers(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": st.none() | st.integers(0, MAX_TOP_LOGPROBS),
    "stop": st.lists(st.text(max_size=300), max_size=17).map(tuple),
    "stop_token_ids": st.lists(st.integers(0, VOCAB), max_size=4).map(tuple),
    "ignore_eos": st.booleans(),
}
assert set(plausible) == set(SamplingParams.__struct_fields__), "a field is missing here"

sent = st.fixed_dictionaries({}, optional={name: values | junk for name, values in plausible.items()})
good = st.fixed_dictionaries({}, optional=plausible)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def outcome(params: SamplingParams, *, num_prompt: int, stop_allowed: bool) -> SamplingParams | None:
    """Valid parameters, or None where they were refused by field, as they may be."""
    valid = None
    try:
        valid = validate(
            params, vocab_size=VOCAB, num_prompt=num_prompt, max_model_len=MAX_LEN, stop_allowed=stop_allowed
        )
    except PagewireError as error:
        field = error.field
    else:
        field = None
    if field is not None:
        assert field.partition(".")[0] in {"params", "prompt_ids"}
        return None
    assert valid is not None, "refused, and no field named"
    assert valid.max_tokens is not None
    assert valid.min_tokens <= valid.max_tokens <= MAX_LEN - num_prompt
    return valid


@relaxed
@given(sent, st.sampled_from([1, 10, MAX_LEN - 1, MAX_LEN, MAX_LEN + 1]), st.booleans())
def test_f47_what_is_sent_decodes_or_is_refused(fields, num_prompt, stop_allowed):
    try:
        params = msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError:
        return
    outcome(params, num_prompt=num_prompt, stop_allowed=stop_allowed)


@relaxed
@given(sent)
def test_f47_what_is_built_by_hand_is_refused_or_right(fields):
    valid = outcome(SamplingParams(**fields), num_prompt=5, stop_allowed=True)
    if valid is not None:
        encoded = msgspec.msgpack.encode(valid)
        assert msgspec.msgpack.decode(encoded, type=SamplingParams) == valid, "the other doors would take it too"


@relaxed
@given(good, st.integers(0, 2**32))
def test_f47_what_is_taken_can_be_sampled(fields, noise):
    valid = outcome(SamplingParams(**fields), num_prompt=5, stop_allowed=True)
    if valid is None:
        return
    sampler = Sampler(max_rows=1, vocab_size=VOCAB)
    prompt = np.arange(5, dtype=np.int32)
    seed = valid.seed if valid.seed is not None else 0
    sampler.join(RowJoin(0, 0, valid, seed, prompt, prompt[:0], () if valid.ignore_eos else (2,)))
    logits = np.random.default_rng(noise).standard_normal((1, VOCAB)).astype(np.float32) * 10
    for position in range(5, 8):
        output = sampler.sample(torch.from_numpy(logits), np.zeros(1, np.int32), np.array([position]))
        assert 0 <= output.token_ids[0] < VOCAB
        assert not output.flags[0] & SampleFlag.NUMERIC
        if output.logprobs is not None:
            assert np.isfinite(output.logprobs.chosen).all()
            assert np.isfinite(output.logprobs.top_logprobs).all()
