"""Small tokenizers, trained in a moment, written as GGUF files and as folders."""

import json

import gguf
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

TEXT = [
    "the quick brown fox jumps over the lazy dog and then the end of the story, naïve café",
    "def main():\n    print('hello')\n\n    return 12345 + 678\n",
    "日本語 中文 한국어 العربية I'm you're it's THE THEN HELLO 100 200 3000",
] * 4
SPECIALS = ["<s>", "</s>", "<|turn|>"]


def byte_level_vocabulary(size=500):
    """(tokens in order of id, merges)."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIALS
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def sentencepiece_vocabulary(size=300):
    """(tokens, scores): BPE over ▁-text, as SentencePiece writes it: earlier merges score better."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=True)
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>"]))
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    learned = sorted(vocabulary, key=vocabulary.get)[1:]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learned]
    return tokens, [0.0] * 259 + [-float(i) for i in range(len(learned))]


def write_gguf(path, **overrides):
    """A GGUF file with tokenizer metadata only; an override of None leaves the key out."""
    tokens, merges = byte_level_vocabulary()
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    return _write(path, values)


def write_sentencepiece_gguf(path, **overrides):
    tokens, scores = sentencepiece_vocabulary()
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    return _write(path, values)


def _write(path, values):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder, *, sentencepiece=False, template_bos=None, **files):
    """A model folder; `files` are contents of `<name>.json` (objects) or of files with a dot in `__` (text)."""
    if sentencepiece:
        tokens, scores = sentencepiece_vocabulary()
        from pagewire.text.gguf_tokenizer import merges_by_score

        model = BPE(
            {token: i for i, token in enumerate(tokens)},
            merges_by_score(tokens, scores),
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    else:
        tokens, merges = byte_level_vocabulary()
        model = BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges])
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(SPECIALS)
    if template_bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single=f"{template_bos} $A", special_tokens=[(template_bos, tokenizer.token_to_id(template_bos))]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if "__" in name:
            (folder / name.replace("__", ".")).write_text(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
