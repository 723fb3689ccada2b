"""The synchronous face."""

import threading

import pytest
from echo import EchoEngine

from pagewire.errors import ConfigError, EngineFailed, InvalidRequest, ModelError
from pagewire.local import llm as llm_module
from pagewire.local.llm import LLM


@pytest.fixture
def make_llm(monkeypatch):
    """An LLM around the model that repeats its prompt."""
    monkeypatch.setattr(llm_module, "Engine", lambda model, *, config, **options: EchoEngine(**options))
    made = []

    def make(**options):
        llm = LLM(**options)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()
        assert not llm._thread.is_alive()


def test_results_come_in_the_order_of_the_prompts(make_llm):
    llm = make_llm()
    prompts = [f"{'x' * (i * 7 % 50)}{i}" for i in range(200)]
    assert [r.text for r in llm.generate(prompts, max_tokens=60)] == prompts


def test_what_counts_as_one_prompt(make_llm):
    llm = make_llm()
    assert [r.text for r in llm.generate("one")] == ["one"]
    assert [r.text for r in llm.generate([72, 105])] == ["Hi"]
    assert [r.text for r in llm.generate([[72, 105], "two"])] == ["Hi", "two"]
    assert [r.text for r in llm.generate(str(i) for i in range(3))] == ["0", "1", "2"]
    assert llm.generate([]) == []


def test_chat(make_llm):
    llm = make_llm()
    turn = {"role": "user", "content": "Hi"}
    assert [r.text for r in llm.chat([turn])] == ["user:Hi"]
    assert [r.text for r in llm.chat([[turn], [turn, turn]])] == ["user:Hi", "user:Hi|user:Hi"]


def test_many_more_prompts_than_the_queue_takes(make_llm):
    llm = make_llm(max_waiting=4)
    results = llm.generate([f"p{i}" for i in range(300)], n=2)
    assert [[c.text for c in r.choices] for r in results] == [[f"p{i}"] * 2 for i in range(300)]


def test_the_first_error_ends_the_call_and_the_engine_goes_on(make_llm):
    llm = make_llm()
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["fine"] * 5 + [""] + ["fine"] * 50)
    assert caught.value.field == "prompts[5]"
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["a"], temprature=3)
    assert caught.value.field == "temprature"
    assert [r.text for r in llm.generate(["again"])] == ["again"]
    assert llm.stats()["sequences_running"] == 0


def test_a_bad_item_of_a_batch_is_named_by_its_index(make_llm):
    llm = make_llm()
    turn = {"role": "user", "content": "Hi"}
    for call, field in [
        (lambda: llm.generate(["a", None]), "prompts[1]"),
        (lambda: llm.generate(["a", [5, 256]]), "prompts[1][1]"),
        (lambda: llm.generate(5), "prompts"),
        (lambda: llm.chat("hi"), "conversations"),
        (lambda: llm.chat([[turn], [turn, {"role": "user"}]]), "conversations[1][1].content"),
        (lambda: llm.generate(["a"], prompt_logprobs=99), "prompt_logprobs"),
        (lambda: llm.generate(["a"], temperature=float("nan")), "temperature"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.field == field


def test_several_threads_at_once(make_llm):
    llm = make_llm()
    got = {}

    def work(name):
        got[name] = [r.text for r in llm.generate([f"{name}{i}" for i in range(30)])]

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {name: [f"{name}{i}" for i in range(30)] for name in "abc"}


def test_closed(make_llm):
    with make_llm() as llm:
        pass
    llm.close()
    with pytest.raises(EngineFailed, match="closed"):
        llm.generate(["x"])
    with pytest.raises(EngineFailed, match="closed"):
        llm.stats()


def test_a_model_that_cannot_be_loaded_leaves_no_thread(tmp_path):
    before = threading.active_count()
    with pytest.raises(ModelError):
        LLM(tmp_path / "missing.gguf")
    assert threading.active_count() == before
    with pytest.raises(ConfigError):
        LLM("x", quux=1)
