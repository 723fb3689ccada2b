"""Tokenizers from folders in Hugging Face layout, compared with `transformers`; clear errors for broken ones."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from tests.text.small_models import write_folder
from tokenizers import Tokenizer

from pagewire.errors import ModelError
from pagewire.text.tokenizer import load_text_model

TEXTS = ["", " ", "the end", "  two spaces", "a<s>b</s>", "naïve café 日本語 12345", "<s>the end", "\n\n x"]


@pytest.mark.parametrize("sentencepiece", [False, True])
@pytest.mark.parametrize(
    ("template_bos", "config"),
    [
        (None, {}),
        ("<s>", {}),
        ("<s>", {"add_bos_token": False}),
        (None, {"add_bos_token": True}),
        (None, {"add_bos_token": True, "add_eos_token": True}),
        ("<s>", {"add_eos_token": False}),
    ],
)
def test_ids_equal_those_of_transformers(tmp_path, reference, sentencepiece, template_bos, config):
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, **config}
    folder = write_folder(
        tmp_path / "m", sentencepiece=sentencepiece, template_bos=template_bos, tokenizer_config=config
    )
    ours, theirs = load_text_model(folder), reference(folder)
    for text in TEXTS:
        expected = theirs.encode(text)
        if ours.add_bos and text.startswith("<s>"):
            expected = expected[1:]  # never two BOS
        assert ours.encode(text) == expected
        ids = ours.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.vocab_size) == (theirs.bos_token_id, len(theirs))


@pytest.mark.model
def test_the_demo_model_saved_as_a_folder(tmp_path, demo, demo_reference):
    demo_reference.save_pretrained(tmp_path)
    saved = load_text_model(tmp_path)
    assert saved.byte_table == demo.byte_table
    assert saved.chat_template == demo.chat_template
    assert (saved.bos_id, saved.eos_ids, saved.prefix_ids) == (demo.bos_id, demo.eos_ids, demo.prefix_ids)
    assert saved.encode("Hello  world 123 <|im_end|>") == demo.encode("Hello  world 123 <|im_end|>")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (1,)),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, (1,)),
        ({"generation_config": {"eos_token_id": 2}}, (2,)),
        ({"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 99}}, (0, 2)),
        ({"generation_config": {"eos_token_id": [2]}, "tokenizer_config": {"eos_token": "</s>"}}, (1, 2)),
        ({"config": {"eos_token_id": [2]}}, (2,)),
        ({"config": {"eos_token_id": None}}, ()),
    ],
)
def test_ids_that_end_a_turn(tmp_path, files, expected):
    assert load_text_model(write_folder(tmp_path / "m", **files)).eos_ids == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config": {"chat_template": "A"}, "chat_template__jinja": "B\n"}, "B\n"),
        ({"chat_template": {"chat_template": "J"}}, "J"),
        ({"chat_template": {"chat_template": "J"}, "tokenizer_config": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config": {"chat_template": [{"name": "rag", "template": "R"}]}}, "R"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
        ),
    ],
)
def test_where_the_chat_template_stands(tmp_path, files, expected):
    assert load_text_model(write_folder(tmp_path / "m", **files)).chat_template == expected


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    folder = write_folder(tmp_path / "m")
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    path.write_text(json.dumps(spec))
    ids = load_text_model(folder).encode("the end of the story and then the end")
    assert 4 < len(ids) < 50


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer__json": "{"}, r"tokenizer\.json is no readable tokenizer"),
        ({"tokenizer__json": "{}"}, r"tokenizer\.json is no readable tokenizer"),
        ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json is no JSON"),
        ({"tokenizer_config__json": "[" * 100_000}, r"tokenizer_config\.json is no JSON"),
        ({"tokenizer_config": []}, r"tokenizer_config\.json is no JSON object"),
        ({"generation_config": {"eos_token_id": "</s>"}}, "must be token ids"),
        ({"generation_config": {"eos_token_id": [True]}}, "must be token ids"),
        ({"tokenizer_config": {"chat_template": [{"name": "a"}]}}, "named templates"),
        ({"tokenizer_config": {"chat_template": [{"name": n, "template": n} for n in "ab"]}}, "default"),
        ({"tokenizer_config": {"chat_template": 7}}, "must be a string"),
    ],
)
def test_broken_folders(tmp_path, files, says):
    folder = write_folder(tmp_path / "m", **files)
    with pytest.raises(ModelError, match=says) as caught:
        load_text_model(folder)
    assert str(folder) in caught.value.message


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_text_model(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_tokenizer_of_another_format_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=f"has no tokenizer.json, only {name}, which is not read.*save_pretrained"):
        load_text_model(tmp_path)


def test_what_the_package_panics_at_is_an_error_like_others(tmp_path):
    """A panic of Rust is no `Exception`: at the start it is told in one line, later it ends its request (F7)."""
    folder = write_folder(tmp_path / "m", template_bos="<s>")
    whole = load_text_model(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["post_processor"]["single"][0]["SpecialToken"]["id"] = "nowhere"
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelError) as caught:
        load_text_model(folder)
    assert "\n" not in str(caught.value)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    panicking = SimpleNamespace(encode_batch_fast=lambda texts, **_: tokenizer.encode_batch(texts))
    with pytest.raises(RuntimeError):
        dataclasses.replace(whole, tokenizer=panicking).encode("a")


def test_an_id_beyond_any_vocabulary_is_refused_and_no_table_made_for_it(tmp_path):
    folder = write_folder(tmp_path / "m")
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["<s>"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelError, match="2147483648"):
        load_text_model(folder)
