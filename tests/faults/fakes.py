"""Fake workers of the size that these tests like, and what they must say."""

from pagewire.worker.fake import FakeWorker, continuation, fake_shape, hash_tokens
from pagewire_transport.params import SamplingParams

VOCAB = 50
EOS = 7


def fake(*, num_blocks=65, max_rows=8, max_model_len=512, latency=0):
    """A worker that checks every read of KV and every use of a block."""
    shape = fake_shape(
        num_blocks=num_blocks, max_rows=max_rows, max_model_len=max_model_len, vocab_size=VOCAB, eos_ids=(EOS,)
    )
    return FakeWorker(shape, latency=latency)


def expected(prompt, seed, max_tokens, *, ignore_eos=False):
    """The output of a sequence that is alone in the world."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return continuation(hash_tokens(VOCAB), prompt, params, seed, vocab_size=VOCAB, eos_ids=(EOS,))
