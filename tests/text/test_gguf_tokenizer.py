"""Tokenizers rebuilt from GGUF metadata: equal to `transformers` where it is right, and clear errors (F46)."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.text.small_models import sentencepiece_vocabulary, write_gguf, write_sentencepiece_gguf

from pagewire.errors import ModelError
from pagewire.text.gguf_tokenizer import PRE_TOKENIZERS, merges_by_score
from pagewire.text.tokenizer import load_text_model

NASTY = st.one_of(
    st.text(max_size=30),
    st.text(" \n\r\t'aABsStT019.,!é日", max_size=30),
    st.lists(st.sampled_from([" the", "<s>", "</s>", "\n\n", "  ", "I'LL", "it's", "1234567", "日本", "▁"])).map(
        "".join
    ),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory, reference):
    """By pre-tokenizer: ours and that of `transformers`, made when asked for."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(name):
        if name not in made:
            path = folder / f"{name}.gguf"
            if name == "llama":
                write_sentencepiece_gguf(path)
            else:
                write_gguf(path, tokenizer__ggml__pre=name)
            made[name] = load_text_model(path), reference(folder, gguf_file=path.name)
        return made[name]

    return get


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "llama"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(text=NASTY)
def test_ids_equal_those_of_transformers(models, name, text):
    ours, theirs = models(name)
    if PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["default"]).nfc:
        from unicodedata import normalize

        text = normalize("NFC", text)  # the model's own tokenizer.json normalises, its GGUF in transformers does not
    ids = ours.encode(text, add_special=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    spaced = name == "llama" and text and not text.startswith("▁")
    expected = theirs.decode(theirs.encode(text, add_special_tokens=False))
    assert ours.decode(ids, skip_special=False) == expected
    if not spaced and "▁" not in text:
        assert expected == text


def test_words_of_llama3_need_no_merges(tmp_path):
    """tiktoken's vocabularies have tokens that no merges lead to."""
    from tests.text.small_models import byte_level_vocabulary

    tokens, merges = byte_level_vocabulary()
    path = tmp_path / "m.gguf"
    write_gguf(
        path,
        tokenizer__ggml__pre="llama-bpe",
        tokenizer__ggml__tokens=[*tokens, "zqzq"],
        tokenizer__ggml__token_type=None,
        tokenizer__ggml__merges=merges,
    )
    model = load_text_model(path)
    assert model.encode("zqzq", add_special=False) == [len(tokens)]
    assert model.encode("zqzq") == [0, len(tokens)]  # and a BOS, though the file does not say so


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=20, unique=True), st.data())
def test_merges_by_score_as_transformers_orders_them(tokens, data):
    from transformers.tokenization_utils_base import generate_merges

    scores = data.draw(st.lists(st.sampled_from([0.0, -1.0, -2.0]), min_size=len(tokens), max_size=len(tokens)))
    theirs = generate_merges({t: i for i, t in enumerate(tokens)}, dict(zip(tokens, scores, strict=True)))
    assert merges_by_score(tokens, scores) == theirs


def test_sentencepiece_falls_back_to_bytes(models):
    model, _ = models("llama")
    tokens, _ = sentencepiece_vocabulary()
    ids = model.encode("ab\U0001f600", add_special=False)
    assert [tokens[i] for i in ids[-4:]] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert model.decode(ids) == "ab\U0001f600"


@pytest.mark.parametrize(
    ("write", "flags", "empty", "text"),
    [
        (write_gguf, {}, [], ""),
        (write_gguf, {"tokenizer__ggml__add_bos_token": True}, [0], "<s>"),
        (write_gguf, {"tokenizer__ggml__add_eos_token": True}, [1], "</s>"),
        (write_gguf, {"tokenizer__ggml__pre": "llama-bpe"}, [0], "<s>"),
        (write_gguf, {"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, [], ""),
        (write_gguf, {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": None}, [], ""),
        (write_gguf, {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 2**32 - 1}, [], ""),
        (write_sentencepiece_gguf, {}, [1], "<s>"),
        (write_sentencepiece_gguf, {"tokenizer__ggml__add_bos_token": False}, [], ""),
    ],
)
def test_what_goes_around_a_prompt(write, flags, empty, text, tmp_path):
    model = load_text_model(write(tmp_path / "m.gguf", **flags))
    assert model.encode("") == empty
    assert model.decode(model.encode(""), skip_special=False) == text
    assert model.encode("", add_special=False) == []
    assert model.encode("the end")[: len(model.prefix_ids)] == list(model.prefix_ids)
    assert model.add_bos == (model.bos_id in empty)


@pytest.mark.parametrize("write", [write_gguf, write_sentencepiece_gguf])
def test_never_two_bos(write, tmp_path):
    model = load_text_model(write(tmp_path / "m.gguf", tokenizer__ggml__add_bos_token=True))
    for text in ("<s>", "<s>the end", "the end"):
        ids = model.encode(text)
        assert ids[0] == model.bos_id
        assert ids.count(model.bos_id) == 1


def test_ids_that_end_a_turn(tmp_path):
    ends = {"tokenizer__ggml__eot_token_id": 2, "tokenizer__ggml__eom_token_id": 0}
    assert load_text_model(write_gguf(tmp_path / "m.gguf", **ends)).eos_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("text", "kind", "ends"),
    [("<end_of_turn>", 3, True), ("<end_of_turn>", 4, True), ("<|im_end|>", 1, False), ("<other>", 3, False)],
)
def test_a_turn_ends_also_where_the_file_names_one_end_only(tmp_path, text, kind, ends):
    from tests.text.small_models import byte_level_vocabulary

    tokens, _ = byte_level_vocabulary()
    path = write_gguf(
        tmp_path / "m.gguf",
        tokenizer__ggml__tokens=[*tokens, text],
        tokenizer__ggml__token_type=[3, 3, 3, *[1] * (len(tokens) - 3), kind],
    )
    assert load_text_model(path).eos_ids == ((1, len(tokens)) if ends else (1,))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A vocabulary as Gemma's: no space in front, runs of spaces and line ends as tokens; from GGUF, and as the
    tokenizer.json of such models has it, in `tokenizers` itself."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    tokens, scores = sentencepiece_vocabulary()
    runs = ["▁▁", "▁▁▁", "\n", "\n\n"]
    size = len(tokens)
    tokens, scores = [*tokens, *runs, "<start_of_turn>"], [*scores, *[0.0] * 5]
    path = write_sentencepiece_gguf(
        tmp_path_factory.mktemp("gemma") / "m.gguf",
        tokenizer__ggml__tokens=[token.replace("▁", " ") if token in runs else token for token in tokens],
        tokenizer__ggml__scores=scores,
        tokenizer__ggml__token_type=[2, 3, 3, *[6] * 256, *[1] * (size - 259), *[4] * 5],
        tokenizer__ggml__add_space_prefix=False,
    )
    model = BPE(
        {token: i for i, token in enumerate(tokens)},
        merges_by_score(tokens[:size], scores[:size]),
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )
    theirs = Tokenizer(model)
    theirs.normalizer = normalizers.Replace(" ", "▁")
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    theirs.add_special_tokens(["<unk>", "<s>", "</s>"])
    return load_text_model(path), theirs


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20) | st.text(" the\néq日", max_size=20))
def test_a_vocabulary_as_gemmas_keeps_every_space(gemma, text):
    ours, theirs = gemma
    text = re.sub(" +", " ", re.sub("[▁\n]", "", text))  # the runs: see below
    ids = ours.encode(text, add_special=False)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special=False) == text


def test_runs_of_spaces_and_lines_are_one_token(gemma):
    ours, _ = gemma
    size = ours.vocab_size
    for text, token in (("a\n\nb", size - 2), ("<start_of_turn>", size - 1), ("a\nb", size - 3)):
        ids = ours.encode(text, add_special=False)
        assert token in ids
        assert ours.decode(ids, skip_special=False) == text
    assert ours.encode("the  end").count(size - 5) == 1


def test_user_defined_tokens_are_whole_but_shown(tmp_path):
    from tests.text.small_models import byte_level_vocabulary

    tokens, _ = byte_level_vocabulary()
    path = write_gguf(
        tmp_path / "m.gguf",
        tokenizer__ggml__tokens=[*tokens, "<think>", "[two words]"],
        tokenizer__ggml__token_type=[3, 3, 3, *[1] * (len(tokens) - 3), 4, 4],
    )
    model = load_text_model(path)
    ids = model.encode("a<think>b[two words]c")
    assert ids[1:4:2] == [len(tokens), len(tokens) + 1]
    assert model.decode(ids) == "a<think>b[two words]c"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"tokenizer__ggml__model": None}, "has no tokenizer.ggml.model"),
        ({"tokenizer__ggml__model": "bert"}, "'bert'; supported are gpt2 and llama"),
        ({"tokenizer__ggml__model": 7}, "must be of type str"),
        ({"tokenizer__ggml__pre": "chameleon"}, "'chameleon'; supported are default, gpt-2"),
        ({"tokenizer__ggml__tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "must be strings"),
        ({"tokenizer__ggml__tokens": ["a"]}, "cannot be rebuilt"),
        ({"tokenizer__ggml__merges": None}, "has no tokenizer.ggml.merges"),
        ({"tokenizer__ggml__merges": ["a b c"]}, "pairs"),
        ({"tokenizer__ggml__merges": ["a nosuchtoken"]}, "cannot be rebuilt"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "one a token"),
        ({"tokenizer__ggml__token_type": ["x"] * 500}, "numbers"),
        ({"tokenizer__ggml__bos_token_id": 10**6}, r"but there are \d+ tokens"),
        ({"tokenizer__ggml__eos_token_id": "x"}, "must be of type int"),
        ({"tokenizer__ggml__add_bos_token": 1}, "must be of type bool"),
        ({"tokenizer__chat_template": 5}, "must be of type str"),
    ],
)
def test_wrong_metadata(overrides, says, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", **overrides)
    with pytest.raises(ModelError, match=says) as caught:
        load_text_model(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


@settings(max_examples=150, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_end_in_a_tokenizer_or_a_named_error(tmp_path_factory, flips):
    path = tmp_path_factory.getbasetemp() / "flipped_tokenizer.gguf"
    original = tmp_path_factory.getbasetemp() / "whole_tokenizer.gguf"
    if not original.exists():
        write_gguf(original)
    data = bytearray(original.read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    path.write_bytes(data)
    try:
        model = load_text_model(path)
    except ModelError as error:
        assert "\n" not in error.message  # noqa: PT017
        return
    model.decode(model.encode("the end <s> of it"))


def test_no_metadata_and_no_file(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        load_text_model(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes([3]) + bytes(19))
    with pytest.raises(ModelError, match=r"has no tokenizer\.ggml\.model"):
        load_text_model(tmp_path / "m.gguf")


def test_no_chat_template(tmp_path):
    model = load_text_model(write_gguf(tmp_path / "m.gguf"))
    assert model.chat_renderer is None
    assert model.chat_template is None
    with pytest.raises(Exception, match="no chat template") as caught:
        model.render_chat([{"role": "user", "content": "x"}])
    assert (caught.value.code, caught.value.field) == ("unsupported", "messages")
