"""Admission: limits that depend on the model (F42–F44), resolved defaults."""

import numpy as np
import pytest

from pagewire.clock import ManualClock
from pagewire.engine.admission import Admission
from pagewire.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from pagewire.request.request import Namespace
from pagewire_transport.params import SamplingParams

MAX_LEN = 64
VOCAB = 100


@pytest.fixture
def admission():
    return Admission(vocab_size=VOCAB, max_len=MAX_LEN, clock=ManualClock(), seed=3)


def refused(admission, prompt, kind=InvalidRequest, **params):
    with pytest.raises(InvalidRequest) as caught:
        admission.admit(prompt, SamplingParams(**params))
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
def test_f44_max_tokens_resolves_to_what_fits(admission, num_prompt, asked, resolved):
    request = admission.admit([1] * num_prompt, SamplingParams(max_tokens=asked))
    assert request.max_tokens == resolved


@pytest.mark.parametrize(
    ("num_prompt", "asked", "kind", "field"),
    [
        (10, 55, InvalidRequest, "params.max_tokens"),
        (10, 2**31 - 1, InvalidRequest, "params.max_tokens"),
        (63, 2, InvalidRequest, "params.max_tokens"),
        (64, None, PromptTooLong, "prompt_ids"),
        (64, 1, PromptTooLong, "prompt_ids"),
        (65, 0, PromptTooLong, "prompt_ids"),
        (65, None, PromptTooLong, "prompt_ids"),
    ],
)
def test_f43_f44_what_does_not_fit_is_refused_by_field(admission, num_prompt, asked, kind, field):
    assert refused(admission, [1] * num_prompt, kind, max_tokens=asked) == field


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt_ids"),
        ([[1, 2], [3, 4]], "prompt_ids"),
        (["a"], "prompt_ids"),
        ([1, None], "prompt_ids"),
        ([2**70], "prompt_ids"),
        ([1, -1], "prompt_ids[1]"),
        ([1, 2, VOCAB], "prompt_ids[2]"),
        (np.array([2**32 - 1], np.uint32), "prompt_ids[0]"),
    ],
)
def test_f42_a_prompt_that_is_none_is_refused_by_field(admission, prompt, field):
    assert refused(admission, prompt, max_tokens=1) == field


def test_fractions_are_no_token_ids(admission):
    assert refused(admission, [1.5, 2.0], max_tokens=1) == "prompt_ids"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": (1, VOCAB)}, "params.stop_token_ids[1]"),
        ({"logit_bias": {5: 1.0, VOCAB: 1.0}}, f"params.logit_bias[{VOCAB}]"),
        ({"max_tokens": 3, "min_tokens": 4}, "params.min_tokens"),
        ({"min_tokens": 63}, "params.min_tokens"),
    ],
)
def test_values_that_this_model_cannot_take(admission, params, field):
    assert refused(admission, [1, 2], **params) == field


def test_stop_strings_are_refused_where_there_is_no_text(admission):
    assert refused(admission, [1], UnsupportedFeature, stop=("x",)) == "params.stop"


def test_a_missing_seed_is_drawn_and_a_given_one_stays(admission):
    drawn = {admission.admit([1], SamplingParams()).seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert admission.admit([1], SamplingParams(seed=0)).seed == 0
    again = Admission(vocab_size=VOCAB, max_len=MAX_LEN, clock=ManualClock(), seed=3)
    assert {again.admit([1], SamplingParams()).seed for _ in range(20)} == drawn


def test_what_a_request_holds(admission):
    clock = admission._clock
    prompt = np.array([1, 2, 3], np.uint32)
    namespace = Namespace(tenant="a")
    first = admission.admit(prompt, SamplingParams(), priority=4, namespace=namespace)
    second = admission.admit(prompt, SamplingParams(), arrival_ns=5)
    assert first.prompt_ids.dtype == np.int32
    assert first.prompt_ids.tolist() == [1, 2, 3]
    assert (first.priority, first.namespace, first.arrival_ns) == (4, namespace, clock.now_ns())
    assert second.arrival_ns == 5
    assert first.request_id != second.request_id
    prompt[0] = 9
    assert first.prompt_ids[0] == 1, "a copy: the caller may reuse its buffer"
