"""The whole command on a fake target: files, order of the runs, the losslessness check, and mistakes of the user."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

import deepspec.modeling.loading as loading
from deepspec import cli
from deepspec.checked import InputError
from deepspec.data.prompts import Prompt
from deepspec.eval import __main__ as command
from deepspec.eval import evaluator, plots
from deepspec.eval import run as running
from deepspec.eval.drafters import named
from deepspec.eval.output import output
from deepspec.eval.records import Records
from deepspec.eval.results import collect
from deepspec.eval.settings import EvalConfig
from deepspec.eval.share import Share
from deepspec.eval.tasks import Task
from deepspec.modeling.dflash import DFlashConfig

SLOTS = 3


@dataclass
class Generation:
    tokens: list[int]
    rounds: list[tuple[int, int]] = field(default_factory=list)


class FakeDrafter(torch.nn.Module):
    """Accepts `accepts` of three drafts each round; with `lies` it changes the last token of prompts of odd length."""

    num_slots = SLOTS
    config = DFlashConfig(block_size=SLOTS, target_layer_ids=(0,), mask_token_id=1)

    def __init__(self, name, accepts, lies=False):
        super().__init__()
        self.name, self.accepts, self.lies = name, accepts, lies
        self.vocab = torch.nn.Linear(4, 4)
        self.own = torch.nn.Linear(3, 2, bias=False)
        self.compiled = 0

    def compile(self):
        self.compiled += 1


class FakeTarget:
    name, revision, device, stop_ids = "fake", "r1", torch.device("cpu"), (0,)
    vocab, spec = SimpleNamespace(size=100), SimpleNamespace(max_positions=200)

    def __init__(self, dtype):
        self.dtype, self.tokenizer, self.compiled = dtype, None, 0

    def compile(self):
        self.compiled += 1

    def open(self, rows, max_length):
        scores = torch.zeros(1, 1, 100)
        scores[..., 5] = 0.25
        return SimpleNamespace(score=lambda tokens, last: SimpleNamespace(logits=scores))


class World:
    """Stands in for loading and decoding, and notes what was asked of it."""

    def __init__(self, *drafters):
        self.drafters, self.loads, self.calls = {d.name: d for d in drafters}, [], []

    def load_models(self, target, revision, drafters, device, dtype):
        self.loads.append((target, revision, dtype))
        kind = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
        return evaluator.Models(FakeTarget(kind), {name: self.drafters[name] for name in drafters})

    def stream(self, target, drafter, prompts, *, sampling, seeds, max_new_tokens, clock, **rest):
        name = "baseline" if drafter is None else drafter.name
        timed = clock is not None
        self.calls.append({"name": name, "prompts": prompts, "seeds": seeds, "timed": timed, "dtype": target.dtype})
        self.calls[-1]["compiled"] = target.compiled
        self.calls[-1] |= {"sampling": sampling, "max_new_tokens": max_new_tokens, **rest}
        for i, prompt in reversed(list(enumerate(prompts))):  # requests finish in any order
            shift = seeds[i] if sampling.temperature else 0
            tokens = [(sum(prompt) + shift + k) % 90 + 1 for k in range(max_new_tokens)]
            if drafter is not None and drafter.lies and len(prompt) % 2:
                tokens[-1] = 99
            rounds = [(0, 0)] * (max_new_tokens - 1)
            if drafter is not None:
                rounds = [(SLOTS, drafter.accepts)] * ((max_new_tokens - 1) // (drafter.accepts + 1))
            if timed:
                for part in ["prefill", *["draft", "verify", "draft"] * len(rounds)]:
                    with clock.part(part):
                        pass
            yield i, Generation(tokens, rounds)


@pytest.fixture
def drawn():
    """Asked for by the test whose run draws its pictures, which are most of such a small run's time."""
    return {"tau.png", "acceptance.png", "time.png"} if plots.available() else set()


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plots, "available", lambda: False)


@pytest.fixture
def world(monkeypatch):
    made = World(FakeDrafter("dflash", 1), FakeDrafter("dspark", 2), FakeDrafter("liar", 2, lies=True))
    monkeypatch.setattr(evaluator, "load_models", made.load_models)
    monkeypatch.setattr(evaluator, "stream", made.stream)
    for module in (loading, running):
        monkeypatch.setattr(module, "load_tokenizer", lambda name, revision: None)
    return made


@pytest.fixture
def place(tmp_path):
    """A directory with a task of 20 prompts and three drafters trained for the same target."""
    with (tmp_path / "task.jsonl").open("w") as file:
        for i in range(20):
            file.write(json.dumps({"id": f"p{i}", "prompt_ids": [i + 2] * (i % 4 + 1)}) + "\n")
    for name in ("dflash", "dspark", "liar"):
        (tmp_path / name / "drafter").mkdir(parents=True)
        section = {"target": {"name": "some/target", "revision": "r1"}}
        (tmp_path / name / "drafter" / "config.json").write_text(json.dumps({"deepspec": section}))
    return tmp_path


def arguments(place, *more, drafters=("dflash", "dspark")):
    paths = [str(place / d / "drafter") for d in drafters]
    return [
        *("--drafter", *paths, "--tasks", str(place / "task.jsonl"), "--out", str(place / "out")),
        *("--max-new-tokens", "13", *more),
    ]


def rows_of(place):
    text = (place / "out" / "results.json").read_text()
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_files_and_figures(world, place, capsys, drawn):
    command.run(arguments(place, "--temperature", "0", "1"))
    rows = rows_of(place)
    assert [(r["drafter"], r["temperature"]) for r in rows] == [
        *[("dflash", 0), ("dspark", 0), ("dflash", 1), ("dspark", 1)],
    ]
    for r, tau in zip(rows, (2, 3, 2, 3)):
        assert (r["task"], r["samples"], r["tau"], r["tau_interval"]) == ("task", 20, tau, [tau, tau])
        assert r["verified_per_round"] == 3 and r["rounds"] == 20 * 12 / tau
        assert r["accept_rates_conditional"] == ([1, 0, None] if tau == 2 else [1, 1, 0])
        assert r["accept_rates_prefix"] == ([1, 0, 0] if tau == 2 else [1, 1, 0])
        assert r["wasted_per_round"] == 3 - r["accepted_per_round"] == 4 - tau
        assert r["greedy_equal"] == {"equal": 20, "total": 20, "dtype": "float32", "differ": []}
        assert r["speedup"] == pytest.approx(r["tokens_per_second"] / r["baseline_tokens_per_second"])
        assert r["tokens_per_second"] == pytest.approx(20 * 13 / r["wall_seconds"])
        parts = r["draft_seconds"] + r["verify_seconds"] + r["prefill_seconds"]
        assert 0 < parts < r["wall_seconds"]
        per_round = r["draft_seconds_per_round"] + r["verify_seconds_per_round"]
        assert per_round == pytest.approx((r["draft_seconds"] + r["verify_seconds"]) / r["rounds"])
        assert r["decomposition"] == pytest.approx(tau * r["target_seconds_per_round"] / per_round)
        assert r["efficiency"] == pytest.approx(r["speedup"] / tau)
        assert r["timed_greedy_equal"] == (
            None if r["temperature"] else {"equal": 20, "total": 20, "dtype": "bfloat16"}
        )
    assert rows[1]["tau_differences"] == {"dflash": {"difference": 1, "interval": [1, 1]}}
    settings = rows[0]["settings"]
    assert settings["target"] == {"name": "fake", "revision": "r1"} and settings["dtype"] == "bfloat16"
    assert settings["drafters"]["dspark"]["parameters"] == 6 and settings["drafters"]["dspark"]["slots"] == SLOTS
    assert settings["versions"]["torch"] == torch.__version__ and settings["threads"] == torch.get_num_threads()
    assert settings["command"].startswith("python -m deepspec.eval --drafter ")

    texts = [json.loads(line) for line in (place / "out" / "generations.jsonl").read_text().splitlines()]
    assert len(texts) == 2 * 3 * 20
    assert {len(t["tokens"]) for t in texts} == {13}
    assert [t["id"] for t in texts[:20]] == [f"p{i}" for i in range(20)]
    page = (place / "out" / "results.md").read_text()
    out = capsys.readouterr().out
    for text in (page, out):
        assert "greedy float32 output equal to the baseline's: dflash 20/20, dspark 20/20" in text
        assert "dspark is above dflash beyond the 95 % interval" in text
    names = {"results.json", "results.csv", "results.md", "results.html", "generations.jsonl", "progress"}
    assert {p.name for p in (place / "out").iterdir()} == names | drawn


def test_rows_are_of_their_own_task_contender_and_temperature(tmp_path):
    """Formed from records alone, also those that another process wrote: only tasks of which nothing is missing, every
    prompt's own text, the check of all units, counts of turns."""
    prompts = [Prompt(f"p{i}", "t", [i], {"turns": ["a", "b"]} if i == 1 else {}) for i in range(34)]
    tasks = [Task(name, tmp_path / name, prompts, {"odd": 3}) for name in ("whole", "part")]
    config = EvalConfig(temperatures=(0.0, 1.0), schedule=("verify_all", "lagged"), draft=("sample", "greedy"))
    records = Records(tmp_path / "r")
    records.begin({}, False)
    work = evaluator.Work(tasks, config, config.contenders(["d"]), records, Share())
    other = Records(tmp_path / "r", 1)
    done = [("check", "whole", n) for n in (0, 1)] + [r[-1] for t in (0.0, 1.0) for r in work.runs(tasks[0], t)]
    for key in [*done, work.runs(tasks[1], 0.0)[0][-1]]:
        if key[0] == "check":
            say = {c.name: [{"id": "p", "equal": True}] * (32, 2)[key[2]] for c in work.contenders[1:]}
            other.add(key, {"samples": say})
            continue
        turns = [{"prompt": 1, "tokens": [key[5], 7], "rounds": [[3, 1]]}] * (2 if key[5] == 1 else 1)
        parts = {"verify": 0.5}
        other.add(key, {"samples": [turns], "tokens": 2, "seconds": 1.0, "parts": parts, "counts": {"verify": 1}})
    settings = {"target": {"name": "x"}, "drafters": {"a": {"slots": 1}, "d": {"slots": 3}}, "dtype": "bfloat16"}
    rows, texts = collect(work, settings, lambda ids: f"text of {ids}")
    names = [f"d {s} {d}" for s in config.schedule for d in config.draft]
    assert [(r["task"], r["temperature"], r["drafter"]) for r in rows] == [
        ("whole", t, name) for t in (0.0, 1.0) for name in names
    ]
    ways = [(s, "token", d) for s in config.schedule for d in config.draft]
    assert [(r["schedule"], r["verify"], r["draft"]) for r in rows] == ways * 2
    for r in rows:
        assert (r["samples"], r["turns"], r["later_turns"], r["dropped"]) == (34, 35, 1, {"odd": 3})
        assert r["first_prompt"] == "text of [0]" and len(r["accept_rates_prefix"]) == 3
        assert r["greedy_equal"]["total"] == 34 and (r["timed_greedy_equal"] is None) == (r["temperature"] > 0)
    assert [(t["id"], t["tokens"], t["rounds"]) for t in texts[:35]] == [
        (f"p{i}", [i, 7], [[3, 1]]) for i in (0, 1, *range(1, 34))
    ]
    assert [(t["drafter"], t["temperature"]) for t in texts[::35]] == [
        (name, t) for t in (0.0, 1.0) for name in ["baseline", *names]
    ]


def test_what_failed_leaves_no_folder(tmp_path):
    """Those made on the way go with it; one in which something is kept stays."""
    records = Records(tmp_path / "a" / "b" / "progress")
    for keep in (False, True):
        with pytest.raises(RuntimeError), output(tmp_path / "a" / "b", records):
            records.begin({}, False)
            if keep:
                records.add(("x",), {})
            raise RuntimeError
        assert (tmp_path / "a").exists() == keep


def test_contenders_take_turns_with_equal_prompts_seeds_and_sampling(world, place):
    command.run(
        arguments(
            place, "--temperature", "0.7", "--top-p", "0.9", "--seed", "100", "--repeats", "2", "--concurrency", "2"
        )
    )
    timed = [c for c in world.calls if c["timed"]]
    b, f, s = "baseline", "dflash", "dspark"
    turns = [[b, f, s], [f, s, b], [s, b, f]]
    assert [c["name"] for c in timed] == [name for turn in (*turns, turns[1], turns[2], turns[0]) for name in turn]
    for number in range(6):
        same = timed[3 * number : 3 * number + 3]
        for call in same[1:]:
            assert all(call[k] == same[0][k] for k in ("prompts", "seeds", "sampling", "max_new_tokens", "concurrency"))
    assert [len(c["prompts"]) for c in timed[::3]] == [8, 8, 4, 8, 8, 4]
    assert [seed for c in timed[:9:3] for seed in c["seeds"]] == list(range(100, 120))
    assert timed[0]["sampling"].temperature == 0.7 and timed[0]["sampling"].top_p == 0.9
    assert timed[0]["stop_ids"] == (0,)
    schedules = [c["schedule"] for c in timed]
    assert len({id(x) for x in schedules}) == len(schedules), "a schedule may remember: each stream gets its own"
    rows = rows_of(place)
    assert rows[0]["tokens_per_second"] == pytest.approx(2 * 20 * 13 / rows[0]["wall_seconds"])
    assert rows[0]["rounds"] == 20 * 6, "tokens and rounds come from the first repeat"


def test_the_check_runs_first_in_float32_and_warm_up_is_not_timed(world, place):
    command.run(arguments(place, "--equality", "5", "--warmup", "3"))
    assert world.loads == [("some/target", "r1", "float32"), ("some/target", "r1", "auto")]
    first = world.calls[:3]
    assert [(c["name"], len(c["prompts"])) for c in first] == [("baseline", 5), ("dflash", 5), ("dspark", 5)]
    assert all(c["dtype"] == torch.float32 and c["sampling"].temperature == 0 and not c["timed"] for c in first)
    assert [(len(c["prompts"]), c["timed"], c["dtype"]) for c in world.calls[3:6]] == [(3, False, torch.bfloat16)] * 3
    assert all(c["timed"] for c in world.calls[6:])
    assert rows_of(place)[0]["greedy_equal"]["total"] == 5


def test_compiled_rounds_meet_every_shape_before_they_are_timed(world, place):
    """--compile: the check stays as it is; target and drafters are compiled once, and each timed run is preceded by
    the same run untimed, with its prompts and budget. Repeats need that once."""
    command.run(arguments(place, "--equality", "5", "--compile", "--repeats", "2"))
    assert [c["compiled"] for c in world.calls[:3]] == [0] * 3 and all(c["compiled"] == 1 for c in world.calls[3:])
    assert [world.drafters[d].compiled for d in ("dflash", "dspark")] == [1, 1]
    seen = []
    for call in world.calls[3:]:
        key = (call["name"], call["prompts"], call["seeds"], call["max_new_tokens"])
        assert not call["timed"] or key in seen
        seen.append(key)
    timed = sum(c["timed"] for c in world.calls)
    assert len(world.calls) - 3 - 3 == timed + timed // 2  # three checks, three warm-ups


def test_one_copy_serves_where_the_dtype_is_float32(world, place):
    command.run(arguments(place, "--dtype", "float32"))
    assert [dtype for *_, dtype in world.loads] == ["float32"]


def test_a_drafter_that_changes_the_output_is_found_and_its_speed_marked(world, place, capsys):
    command.run(arguments(place, drafters=("liar", "dspark")))
    liar, dspark = rows_of(place)
    assert liar["greedy_equal"]["equal"] == 10 and dspark["greedy_equal"]["equal"] == 20
    assert liar["greedy_equal"]["differ"][0] == {"id": "p0", "turn": 0, "index": 12, "margin": 0.25}
    assert [d["id"] for d in liar["greedy_equal"]["differ"]] == [f"p{i}" for i in range(0, 20, 2)]
    out = capsys.readouterr().out
    assert "liar 10/20, dspark 20/20" in out and "speed-up not proven lossless for liar:" in out


def test_skipping_the_check_is_said(world, place, capsys):
    command.run(arguments(place, "--equality", "0"))
    assert rows_of(place)[0]["greedy_equal"] is None
    assert world.loads == [("some/target", "r1", "auto")]
    assert (
        "not proven lossless for dflash, dspark: the check against the baseline was not run" in capsys.readouterr().out
    )


def test_results_of_finished_tasks_outlive_a_crash(world, place, monkeypatch):
    other = place / "other.jsonl"
    other.write_text((place / "task.jsonl").read_text())
    measure = evaluator.measure

    def crashing(models, work, task, *rest):
        if task.name == "other":
            raise KeyboardInterrupt
        return measure(models, work, task, *rest)

    monkeypatch.setattr(evaluator, "measure", crashing)
    args = arguments(place)
    args[args.index("--tasks") + 1] += f",{other}"
    with pytest.raises(KeyboardInterrupt):
        command.run(args)
    assert {r["task"] for r in rows_of(place)} == {"task"}
    assert len((place / "out" / "generations.jsonl").read_text().splitlines()) == 3 * 20


def test_tiny_budgets_write_valid_json(world, place):
    """One new token: no rounds, so most figures are null."""
    args = arguments(place, "--limit", "1", "--warmup", "0")
    args[args.index("--max-new-tokens") + 1] = "1"
    command.run(args)
    for r in rows_of(place):
        assert r["tau"] is None and r["tau_interval"] is None and r["samples"] == 1
        assert r["accept_rates_conditional"] == [None] * 3
        assert not any(isinstance(v, float) and not math.isfinite(v) for v in r.values())


def change(name, text):
    def apply(place, args):
        (place / name).write_text(text)
        return args

    return apply


def replace(flag, value):
    def apply(place, args):
        if flag in args:
            args[args.index(flag) + 1] = value.format(place=place)
            return args
        return [*args, flag, value]

    return apply


MISTAKES = {
    "unknown flag": (lambda place, args: [*args, "--temprature", "1"], "--temprature"),
    "no such task": (replace("--tasks", "{place}/nope.jsonl"), "nope.jsonl"),
    "benchmark without a network": (replace("--tasks", "aime25"), "'aime25' could not be fetched"),
    "empty task": (change("task.jsonl", ""), "task.jsonl is empty"),
    "broken line": (change("task.jsonl", '{"id": "a", "prompt_ids": [3]}\n{"id": \n'), "task.jsonl, line 2"),
    "no such drafter": (replace("--drafter", "{place}/nope"), "nope"),
    "broken config": (change("dspark/drafter/config.json", "{"), "config.json"),
    "no target named": (change("dspark/drafter/config.json", "{}"), "pass --target"),
    "two targets": (
        change("dspark/drafter/config.json", '{"deepspec": {"target": {"name": "b"}}}'),
        "different targets (some/target, b)",
    ),
    "schedule": (replace("--schedule", "threshold:1.5"), "threshold:X with X in [0, 1]"),
    "schedule name": (replace("--schedule", "fast"), "'fast' must be verify_all, threshold:X"),
    "temperature": (replace("--temperature", "-1"), "temperature must be >= 0"),
    "endless heat": (replace("--temperature", "inf"), "temperature must be >= 0 and finite"),
    "seed": (replace("--seed", "4611686018427387904"), "seed must be between -2**62 and 2**62"),
    "temperatures": (lambda place, args: [*args, "--temperature", "1", "1.0"], "given twice"),
    "budget": (replace("--max-new-tokens", "0"), "max_new_tokens must be >= 1"),
    "too long": (replace("--max-new-tokens", "200"), "passes the target's 200 positions"),
    "equality": (replace("--equality", "some"), "--equality must be a number of prompts or all"),
    "token ids": (change("task.jsonl", '{"id": "a", "prompt_ids": [100]}\n'), "outside 0 to 99"),
    "unwritable": (replace("--out", "{place}/task.jsonl/out"), "cannot be written"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_exit_code_2_and_nothing_left(mistake, world, place, capsys):
    apply, message = MISTAKES[mistake]
    args = apply(place, arguments(place))
    before = sorted(place.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        cli.main(lambda: command.run(args))
    assert stop.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert sorted(place.rglob("*")) == before
    late = ("too long", "token ids")  # these ask the target
    assert bool(world.loads) == (mistake in late)


def test_names_of_drafters():
    assert named(["runs/a", "runs/b/"]) == {"a": "runs/a", "b": "runs/b/"}
    assert named(["runs/a/drafter"]) == {"a": "runs/a/drafter"}
    assert list(named(["x/one/final", "x/two/final", "mine=z"])) == ["one/final", "two/final", "mine"]
    assert list(named(["mine=z", "x/mine"])) == ["mine", "x/mine"]
    for twice in (["a", "a"], ["n=a", "n=b"], ["baseline=a"]):
        with pytest.raises(InputError, match="NAME=DIR"):
            named(twice)


def test_a_missing_picture_is_one_line_and_the_rest_is_written(world, place, capsys):
    command.run(arguments(place))
    assert capsys.readouterr().err.count(plots.MISSING) == 1
    assert not list((place / "out").glob("*.png"))
    for name in ("results.md", "results.html"):
        assert ".png" not in (place / "out" / name).read_text() and "<img" not in (place / "out" / name).read_text()


def test_a_real_target_and_drafters_of_random_weights(tmp_path, capsys):
    """Nothing faked: random weights, so a drafter is seldom right, yet every output equals the baseline's."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from deepspec import DSparkConfig, Target

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Qwen3Config(vocab_size=64, num_hidden_layers=3, max_position_embeddings=96, eos_token_id=63, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), device="cpu")
    common = {"block_size": SLOTS, "target_layer_ids": (0, 1), "num_draft_layers": 1, "mask_token_id": 62}
    spark = DSparkConfig(**common, markov_head_type="vanilla", markov_rank=4)
    for name, settings in (("dflash", DFlashConfig(**common)), ("dspark", spark)):
        drafter = settings.build(target.spec, target.vocab)
        drafter.save(tmp_path / name, target={"name": str(tmp_path / "target"), "revision": None})
    with (tmp_path / "task.jsonl").open("w") as file:
        for i in range(9):
            file.write(json.dumps({"prompt_ids": [(7 * i + k) % 60 for k in range(2 + i)]}) + "\n")
    out = tmp_path / "out"
    more = ("--max-new-tokens", "12", "--temperature", "0", "1", "--concurrency", "4", "--device", "cpu")
    command.run(
        [
            "--drafter",
            f"{tmp_path}/dflash",
            f"{tmp_path}/dspark",
            "--tasks",
            f"{tmp_path}/task.jsonl",
            "--out",
            str(out),
            *more,
        ]
    )
    rows = json.loads((out / "results.json").read_text())
    assert [r["greedy_equal"]["equal"] for r in rows] == [9] * 4
    texts = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    for r in rows:
        mine = [t for t in texts if (t["drafter"], t["temperature"]) == (r["drafter"], r["temperature"])]
        assert r["tau"] == sum(len(t["tokens"]) - 1 for t in mine) / sum(len(t["rounds"]) for t in mine)
        assert r["draft_seconds"] > 0 and r["verify_seconds"] > 0 and r["prefill_seconds"] > 0
        assert r["draft_seconds"] + r["verify_seconds"] + r["prefill_seconds"] < r["wall_seconds"]
    greedy = [
        [t["tokens"] for t in texts if (t["drafter"], t["temperature"]) == (d, 0)] for d in ("baseline", "dspark")
    ]
    assert greedy[0] == greedy[1]
    assert "dflash 9/9, dspark 9/9" in capsys.readouterr().out


def test_help_is_quick_and_loads_no_torch():
    code = "import sys; sys.argv = ['x', '--help']\nimport runpy\n"
    code += "try: runpy.run_module('deepspec.eval', run_name='__main__')\nexcept SystemExit as e: assert not e.code\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--schedule" in done.stdout
