"""Every setting has a flag, and flags say the same as a file."""

from __future__ import annotations

import argparse
import json
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.cli.flags import add_config_flags, add_struct_flags, config_from, flag_name, values_of
from pagewire.config import Config, from_mapping
from pagewire.errors import ConfigError
from pagewire.sizes import parse_size, size_text
from pagewire_transport.params import SamplingParams

SECTIONS = get_type_hints(Config)
FIELDS = [(section, field.name) for section, kind in SECTIONS.items() for field in msgspec.structs.fields(kind)]


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_flags(parser)
    return parser.parse_args(arguments)


def _values(hint):
    """Valid values of a field, by its type and limits."""
    metas = []
    while get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        metas += [extra for extra in extras if isinstance(extra, msgspec.Meta)]
    low = next((meta.ge for meta in metas if meta.ge is not None), 0)
    high = next((meta.le for meta in metas if meta.le is not None), 2**31 - 1)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(low, high)
    if hint is float:
        above = next((meta.gt for meta in metas if meta.gt is not None), None)
        return st.floats(low, high, exclude_min=above is not None)
    assert hint is str
    # argparse takes a value that is exactly `--` for the end of the flags.
    return st.text("abc ä/.:-=_'", min_size=1).filter(lambda text: text != "--")


@st.composite
def _settings(draw):
    values = {}
    for section, kind in SECTIONS.items():
        hints = get_type_hints(kind, include_extras=True)
        names = draw(st.sets(st.sampled_from(sorted(hints))))
        if names:
            values[section] = {name: draw(_values(hints[name])) for name in sorted(names)}
    if "kv_scales" in values.get("cache", {}):
        values["cache"]["kv_dtype"] = "fp8"
    return values


def _flags(values) -> list[str]:
    out = []
    for section in values.values():
        for name, value in section.items():
            if isinstance(value, bool):
                out.append(flag_name(name) if value else "--no-" + name.replace("_", "-"))
            else:
                out.append(f"{flag_name(name)}={value}")
    return out


def _toml(values) -> str:
    lines = []
    for section, fields in values.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join(lines)


@settings(max_examples=60, deadline=None)
@given(values=_settings())
def test_flags_and_file_say_the_same(values, tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "c.toml"
    file.write_text(_toml(values), "utf-8")
    wanted = from_mapping(values)
    assert config_from(_parse(*_flags(values))) == wanted
    assert config_from(_parse("--config", str(file))) == wanted


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_every_field_has_a_flag_with_a_help_text(section, name):
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    (action,) = (action for action in parser._actions if action.dest == f"{section}.{name}")
    assert flag_name(name) in action.option_strings
    assert action.help


def test_a_flag_overrides_the_file_and_leaves_the_rest(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[scheduler]\nmax_rows = 3\nmax_waiting = 9\n[cache]\nprefix_cache = false\n")
    config = config_from(_parse("--config", str(file), "--max-rows", "5"))
    assert (config.scheduler.max_rows, config.scheduler.max_waiting, config.cache.prefix_cache) == (5, 9, False)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[scheduler]\nmax_rowz = 3", "scheduler.max_rowz: unknown key; did you mean 'max_rows'?"),
        ("[schedular]\nmax_rows = 3", "schedular: unknown key; did you mean 'scheduler'?"),
        ("[scheduler]\nquux = 3", "scheduler.quux: unknown key"),
        ("[scheduler]\nmax_rows = 0", "scheduler.max_rows: Expected `int` >= 1"),
        ("[scheduler]\nmax_rows = 'many'", "scheduler.max_rows: Expected `int`, got `str`"),
        ("scheduler = 3", "scheduler: Expected `object`, got `int`"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path, text, wanted):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config_from(_parse("--config", str(file), "--max-waiting", "9"))
    assert str(caught.value) == f"{file}: {wanted}"


def test_what_is_no_toml_or_no_file_is_named_first(tmp_path):
    file = tmp_path / "c.toml"
    for text in ("max_rows = ", "max_rows = " + "[" * 9999, "max_rows = " + "9" * 9999):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"^{file} is no TOML"):
            config_from(_parse("--config", str(file)))
    with pytest.raises(ConfigError, match=r"^/no/such\.toml cannot be read"):
        config_from(_parse("--config", "/no/such.toml"))


def test_a_flag_out_of_range_is_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        config_from(_parse("--heartbeat-ms", "1"))
    assert caught.value.field == "server.heartbeat_ms"


def test_scales_of_kv_that_is_not_fp8_are_refused_once_file_and_flags_are_one(tmp_path):
    with pytest.raises(ConfigError, match="give --kv-dtype fp8") as caught:
        config_from(_parse("--kv-scales", "/nowhere"))
    assert caught.value.field == "cache.kv_scales"
    file = tmp_path / "c.toml"
    file.write_text('[cache]\nkv_scales = "/nowhere"\n')
    assert config_from(_parse("--config", str(file), "--kv-dtype", "fp8")).cache.kv_scales == "/nowhere"


@pytest.mark.parametrize(
    ("section", "name"), [(s, n) for s, n in FIELDS if type(getattr(getattr(Config(), s), n)) is int]
)
def test_no_number_is_too_large_for_what_is_made_of_it(section, name):
    """A clock, an option of ZeroMQ, a field of a message: what they cannot hold is refused, not found out later."""
    for value in (2**63, 10**400):
        with pytest.raises(ConfigError) as caught:
            from_mapping({section: {name: value}})
        assert caught.value.field == f"{section}.{name}"


def test_sampling_flags_collect_lists_and_pairs():
    parser = argparse.ArgumentParser()
    add_struct_flags(parser.add_argument_group("s"), SamplingParams, prefix="params")
    given = parser.parse_args(
        ["--stop=a", "--stop=b", "--logit-bias=3=1.5", "--logit-bias=4=-2", "--ignore-eos", "--n=2"]
    )
    params = msgspec.convert(values_of(given, "params"), SamplingParams)
    assert params == SamplingParams(stop=("a", "b"), logit_bias={3: 1.5, 4: -2.0}, ignore_eos=True, n=2)
    assert values_of(parser.parse_args([]), "params") == {}


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2GiB", 2**31), ("2 gib", 2**31), ("2G", 2 * 10**9), ("1.5KiB", 1536), ("512MB", 512 * 10**6)],
)
def test_sizes_have_units(tmp_path, text, size):
    assert config_from(_parse("--kv-bytes", text)).cache.kv_bytes == size
    file = tmp_path / "c.toml"
    file.write_text(f'[cache]\nkv_bytes = "{text}"\n')
    assert config_from(_parse("--config", str(file))).cache.kv_bytes == size
    assert parse_size(size_text(size)) == size


@pytest.mark.parametrize("text", ["", "GiB", "2 gigs", "-1GiB", "1e9", "2GiBs", "٣GiB"])
def test_what_is_no_size_is_named(tmp_path, text):
    file = tmp_path / "c.toml"
    file.write_text(f'[cache]\nkv_bytes = "{text}"\n')
    with pytest.raises(ConfigError, match=r"cache\.kv_bytes: .* is no size: .* 2GiB or 512MB"):
        config_from(_parse("--config", str(file)))
    with pytest.raises(argparse.ArgumentError, match="is no size"):
        _parse(f"--kv-bytes={text}")


def test_the_name_has_the_flag_that_people_know():
    assert config_from(_parse("--served-model-name", "m")).model.name == "m"
    assert config_from(_parse("--name", "m")).model.name == "m"
