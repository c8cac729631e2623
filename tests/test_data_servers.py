"""Laws of answers from servers: whatever fails on the way, the rows are those of a run in which nothing did."""

import functools
import itertools
import json
import time

import pytest
import worlds
from stub_servers import Stub, answer, serving
from test_data_chat import load

from deepspec.checked import InputError
from deepspec.data.answers import Answering, collect
from deepspec.data.answers_file import answers_file, refuses
from deepspec.data.chat import render_prompt
from deepspec.data.manifest import read_manifest
from deepspec.data.prompts import Prompt
from deepspec.data.protocols import as_text
from deepspec.data.servers import Patience
from deepspec.sampling import Sampling

KINDS = ("vllm", "sglang", "transformers", "completions", "chat")
IDS = ("vllm", "sglang")
QUICK = Patience(tries=8, seconds=20.0, first_rest=0.01)


@functools.cache
def tokenizer():
    return load("small-qwen3")


def stop_id():
    return tokenizer().eos_token_id


def stub(kind="vllm", *args, **more):
    return Stub(kind, tokenizer(), *args, stop_id=stop_id(), **more)


@functools.cache
def prompts(n=10):
    found = []
    for i in range(n):
        record = {"messages": [{"role": "user", "content": f"question {i}"}]}
        found.append(Prompt(f"p{i}", "t", render_prompt(tokenizer(), record["messages"], "off"), record))
    return found


def answering(**changes):
    given = {"target": "T", "tokenizer": tokenizer(), "stop_ids": (stop_id(),), "vocab_size": 300, "thinking": "off"}
    given["max_positions"] = 1000
    return Answering(**{**given, "max_new_tokens": 24, "sampling": Sampling(), **changes})


def run(out, *stubs, ask=None, todo=None, **more):
    given = {"concurrency": 3, "patience": QUICK, **more}
    if all(s.kind == "completions" for s in stubs):
        given.setdefault("protocol", "completions")
    return collect([s.url for s in stubs], ask or answering(), todo or prompts(), out, **given)


def rows(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def drawn(prompt, most=24):
    return answer(tokenizer(), stop_id(), tokenizer().decode(prompt.prompt_ids), most)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_holds_what_the_server_drew(kind, tmp_path):
    """Ids where the server gives them; else the ids of its text, with the stop id, and by how many they differ."""
    with serving(stub(kind)) as (server,):
        manifest = run(tmp_path / "a.jsonl", server)
    found = rows(tmp_path / "a.jsonl")
    assert set(found) == {p.id for p in prompts()} and manifest == read_manifest(tmp_path / "a.jsonl")
    drifted = 0
    for prompt in prompts():
        row, (ids, finish) = found[prompt.id], drawn(prompt)
        assert (row["prompt_ids"], row["finish"], row["task"]) == (prompt.prompt_ids, finish, "t")
        if kind in IDS:
            assert row["answer_ids"] == ids and "drift" not in row
        else:
            text = tokenizer().decode(ids, skip_special_tokens=True).rstrip("\ufffd")
            again = tokenizer()(text)["input_ids"] + [stop_id()] * (finish == "stop")
            assert row["answer_ids"] == again and row["drift"] == len(ids) - len(again)
            drifted += len(ids) != len(again)
    finish = [row["finish"] for row in found.values()]
    assert manifest["finish"] == {name: finish.count(name) for name in sorted(set(finish))} and len(set(finish)) == 2
    assert manifest["truncated"] == finish.count("length") and manifest["servers"] == [kind]
    if kind in IDS:
        assert manifest["drift"] is None
    else:
        assert (
            manifest["drift"]["answers of another length"]
            == drifted
            > 0
            == manifest["drift"]["prompts of another length"]
        )
        assert manifest["drift"]["retokenised"] == 10


@pytest.mark.parametrize(
    ("kind", "failure"),
    [*((kind, 500) for kind in KINDS), *(("transformers", f) for f in (429, "drop", "garbage", {"choices": []}))],
)
def test_every_third_request_failing_changes_nothing(kind, failure, tmp_path):
    fail = lambda n: failure if n % 3 == 0 else None  # noqa: E731
    with serving(stub(kind), stub(kind, fail), stub(kind, fail)) as (good, *bad):
        run(tmp_path / "good.jsonl", good)
        manifest = run(tmp_path / "bad.jsonl", *bad)
    assert rows(tmp_path / "good.jsonl") == rows(tmp_path / "bad.jsonl") and manifest["answers"] == 10
    answered = sorted(text for server in bad for text in server.texts)
    assert answered == sorted(good.texts) and all(server.texts for server in bad)


def test_a_server_that_is_not_there_is_done_without(tmp_path):
    with serving(stub(), stub()) as (first, second):
        first.fail = lambda n: first.socket.close() or "drop"  # it dies at its first request
        assert run(tmp_path / "a.jsonl", first, second)["answers"] == 10
    with pytest.raises(InputError, match=r"127\.0\.0\.1:\d+ does not answer: .*ConnectError"):
        run(tmp_path / "b.jsonl", first, patience=Patience(seconds=0.2, first_rest=0.01))
    assert not (tmp_path / "b.jsonl").exists()


def test_when_no_server_is_left_the_answers_are_kept(tmp_path):
    with serving(stub("vllm", lambda n: 503 if n > 4 else None)) as (server,):
        with pytest.raises(
            InputError, match=r"no server has answered for 0\.1 seconds; the last: .*so says 503; answers"
        ):
            run(tmp_path / "a.jsonl", server, patience=Patience(tries=1000, seconds=0.1, first_rest=0.01))
        assert len(rows(tmp_path / "a.jsonl")) == 4 == read_manifest(tmp_path / "a.jsonl")["answers"]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
@pytest.mark.parametrize("after", [0, 5])
def test_what_no_other_try_would_change_stops_at_once(status, after, tmp_path):
    with serving(stub("vllm", lambda n: status if n > after else None)) as (server,):
        with pytest.raises(InputError, match=rf"HTTP {status}: so says {status} \(asked for prompt 'p\d'\)"):
            run(tmp_path / "a.jsonl", server)
        assert len(server.bodies) <= after + 3
        if after:
            assert len(rows(tmp_path / "a.jsonl")) == after and read_manifest(tmp_path / "a.jsonl")["servers"] == [
                "vllm"
            ]
        else:
            assert not list(tmp_path.iterdir())
        server.fail = lambda n: None
        run(tmp_path / "a.jsonl", server)
    # a request that was under way when the first run stopped may be answered after the server has recovered
    assert rows(tmp_path / "a.jsonl").keys() == {p.id for p in prompts()} and len(set(server.texts)) == 10


def test_a_prompt_that_always_fails_is_given_up_and_the_others_are_answered(tmp_path):
    with serving(stub()) as (server,):
        poison = prompts()[4].prompt_ids
        server.fail = lambda n: 500 if server.bodies[n - 1]["prompt"] == poison else None
        with pytest.raises(
            InputError, match=r"1 of 10 prompts were given up, the last 'p4': .*HTTP 500: so says 500; 9 ans"
        ):
            run(tmp_path / "a.jsonl", server, patience=Patience(tries=3, seconds=60, first_rest=0.01))
        assert [b["prompt"] for b in server.bodies].count(poison) == 3
        assert read_manifest(tmp_path / "a.jsonl")["answers"] == 9
        server.fail = lambda n: None
        assert run(tmp_path / "a.jsonl", server)["answers"] == 10


def test_resume_under_another_limit(tmp_path):
    out = tmp_path / "a.jsonl"
    with serving(stub()) as (server,):
        for todo in (prompts()[3:6], prompts()[:5], prompts()[::-1]):
            run(out, server, todo=todo)
    assert rows(out).keys() == {p.id for p in prompts()} and len(server.texts) == 10


def test_a_server_that_only_fails_is_given_up_and_the_others_go_on(tmp_path):
    """Its prompts, and what its waiting workers were handed meanwhile, are answered by the other."""
    with serving(stub("vllm", lambda n: 503), stub("vllm", delay=0.02)) as (bad, good):
        patience = Patience(tries=1000, seconds=0.05, first_rest=0.01)
        assert run(tmp_path / "a.jsonl", bad, good, patience=patience, concurrency=2)["answers"] == 10
        assert len(good.texts) == 10 and len(bad.bodies) < 30


def test_the_stop_id_that_ends_a_turn_is_the_templates(tmp_path):
    """A target may name several (Gemma: end of text, end of turn); text shows none."""
    with serving(stub("transformers")) as (server,):
        run(tmp_path / "a.jsonl", server, ask=answering(stop_ids=(0, stop_id(), 299)))
    found = rows(tmp_path / "a.jsonl").values()
    assert {row["answer_ids"][-1] for row in found if row["finish"] == "stop"} == {stop_id()}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_requests_in_flight_are_bounded(concurrency, tmp_path):
    with serving(stub("vllm", delay=0.03)) as (server,):
        run(tmp_path / "a.jsonl", server, concurrency=concurrency)
    assert server.most == concurrency


def test_prompts_that_no_server_has_room_for_are_counted(tmp_path):
    long = Prompt("long", "t", [5] * 100, {})
    with serving(stub(room=123), stub()) as servers:
        manifest = run(tmp_path / "a.jsonl", *servers, todo=[*prompts(), long])
        assert manifest["dropped"] == {"longer than a server's context": 1} and manifest["answers"] == 10
    with serving(stub(room=124)) as (server,):
        assert run(tmp_path / "b.jsonl", server, todo=[*prompts(), long])["answers"] == 11


def test_what_is_asked_for(tmp_path):
    """Each kind is told the whole sampling; what it cannot be told is refused, not ignored."""
    sampled = answering(sampling=Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1), seed=3)
    told = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1}
    bodies = {}
    for kind in KINDS[:3]:
        with serving(stub(kind)) as (server,):
            run(tmp_path / kind, server, ask=sampled, todo=prompts()[:2])
        bodies[kind] = {
            tuple(x) if isinstance(x := b.get("prompt") or b["input_ids"], list) else x: b for b in server.bodies
        }
        assert len(bodies[kind]) == 2
    first = prompts()[0]
    vllm, sglang = (bodies[kind][tuple(first.prompt_ids)] for kind in IDS)
    assert told.items() <= vllm.items() and vllm["return_token_ids"] and vllm["stop_token_ids"] == [stop_id()]
    assert vllm["model"] == "m" and vllm["seed"] != bodies["vllm"][tuple(prompts()[1].prompt_ids)]["seed"]
    assert told.items() <= sglang["sampling_params"].items()
    generation = json.loads(bodies["transformers"][tokenizer().decode(first.prompt_ids)]["generation_config"])
    assert told.items() <= generation.items() and generation["do_sample"] and generation["eos_token_id"] == [stop_id()]
    for kind in KINDS[3:]:
        with (
            serving(stub(kind)) as (server,),
            pytest.raises(InputError, match=rf"{kind} server cannot .* top_k=20, min_p"),
        ):
            run(tmp_path / kind, server, ask=sampled)
    with serving(stub("chat")) as (server,):
        run(tmp_path / "chat", server, todo=prompts()[:1], key="secret")
    assert server.bodies[0]["messages"] == first.record["messages"] and server.keys == {"Bearer secret"}
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_models(tmp_path):
    with serving(stub(models=("m", "n"))) as (server,):
        with pytest.raises(InputError, match="has the models m, n; name one with --model"):
            run(tmp_path / "a", server)
        with pytest.raises(InputError, match="has no model 'x'; it has m, n"):
            run(tmp_path / "a", server, model="x")
        run(tmp_path / "a", server, model="n")
    assert {body["model"] for body in server.bodies} == {"n"}


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://x", "http://[", "nonsense"])
def test_a_wrong_address_is_one_clear_line(url, tmp_path):
    with pytest.raises(InputError, match=r"^server "):
        collect([url], answering(), prompts(), tmp_path / "a", patience=QUICK)


def test_parts_of_a_chat_answer_are_put_together_by_the_template(tmp_path):
    said = {"content": "Two", "reasoning_content": "hm"}
    reply = {"choices": [{"finish_reason": "stop", "message": said}], "usage": {}}
    with serving(stub("chat", lambda n: reply)) as (server,):
        run(tmp_path / "a", server, ask=answering(thinking="on"), todo=prompts()[:1])
        row = rows(tmp_path / "a")["p0"]
        assert tokenizer().decode(row["answer_ids"]) == "<think>\nhm\n</think>\n\nTwo<e>" and row["drift"] is None
        reply["choices"][0]["finish_reason"] = "length"
        run(tmp_path / "b", server, ask=answering(thinking="on"), todo=prompts()[:1])
        assert rows(tmp_path / "b")["p0"]["answer_ids"] == row["answer_ids"][:-1]
        reply["choices"][0] |= {"finish_reason": "stop", "message": {"content": None, "refusal": "No."}}
        assert run(tmp_path / "c", server, todo=prompts()[:1])["refusals"] == 1
        assert tokenizer().decode(rows(tmp_path / "c")["p0"]["answer_ids"]) == "No.<e>"
        reply["choices"][0]["message"] = {"content": ""}
        assert run(tmp_path / "d", server, todo=prompts()[:1])["empty"] == 1
        with pytest.raises(InputError, match="prompt 'ids' is token ids"):
            run(tmp_path / "e", server, todo=[Prompt("ids", "t", [1], {"prompt_ids": [1]})])


def test_one_process_at_a_time(tmp_path):
    out = tmp_path / "a.jsonl"
    with serving(stub()) as (server,), answers_file(out, answering().settings()) as file:
        for _ in range(2):
            with pytest.raises(InputError, match="another process is adding to it"):
                run(out, server)
        file.add({"id": "p0", "answer_ids": [5, 6], "finish": "stop"})
    assert out.read_bytes().count(b"\n") == 1 and read_manifest(out)["answers"] == 1


def test_a_bos_that_the_server_adds_is_left_out():
    class Adds:
        bos_token = "<s>"

        def decode(self, ids, **_):
            return "".join(map(chr, ids))

        def __call__(self, text):
            return {"input_ids": [ord(c) for c in "<s>" + text]}

    class AddsNone(Adds):
        def __call__(self, text):
            return {"input_ids": [ord(c) for c in text]}

    ids = [ord(c) for c in "<s>hello"]
    assert as_text(Adds(), ids) == "hello" and as_text(AddsNone(), ids) == "<s>hello"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("<think>\nhm\n</think>\n\nI cannot do this", True),
        ("As an AI language model, I", True),
        ("Sorry!", True),
        ("I can do this.", False),
        ("The sorry state", False),
        ("I am able", False),
        ("", False),
    ],
)
def test_refusals(text, expected):
    assert refuses(text) is expected


def child(url, out) -> None:
    collect([url], answering(), prompts(), out, concurrency=3)


def test_a_killed_process_loses_no_answer_and_repeats_none(tmp_path):
    """SIGKILL after four of ten; then the rest."""
    out = tmp_path / "a.jsonl"
    with serving(stub("transformers", delay=0.05), stub("transformers")) as (server, whole):
        server.fail = lambda n: time.sleep(60) if n > 5 else None
        process = worlds.process(child, server.url, out)
        for _ in itertools.takewhile(lambda _: not out.exists() or out.read_bytes().count(b"\n") < 5, range(1200)):
            assert process.is_alive()
            time.sleep(0.05)
        process.kill()
        process.join()
        assert len(rows(out)) == 5
        server.fail = lambda n: None
        manifest = run(out, server)
        run(tmp_path / "whole.jsonl", whole)
    assert rows(out) == rows(tmp_path / "whole.jsonl") and manifest["answers"] == 10
    assert set(server.texts) == set(whole.texts)
