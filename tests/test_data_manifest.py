"""Laws of the warnings about answers that are used otherwise than they were made: a line each, none without reason."""

import json

import pytest
from test_data_chat import load

from deepspec.checked import InputError
from deepspec.data.manifest import differences, doubts, manifest_path, template_hash
from deepspec.eval.doubts import doubts as eval_doubts

MADE = {"target": "T", "target_revision": "r", "dtype": "bfloat16", "thinking": "off", "chat_template_sha256": "abc"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("target", "U", 'target was "T" and is "U"'),
        ("target_revision", "s", 'target_revision was "r" and is "s"'),
        ("dtype", "float32", 'dtype was "bfloat16" and is "float32"'),
        ("thinking", "on", 'thinking was "off" and is "on"'),
        ("chat_template_sha256", "xyz", "the chat template was another"),
    ],
)
def test_each_difference_is_said_and_what_is_not_known_is_none(key, value, said):
    assert differences(MADE, {**MADE, key: value}) == said
    assert differences({**MADE, key: None}, {**MADE, key: value}) == "" == differences(MADE, {**MADE, key: None})
    assert differences({**MADE, "seed": 1}, {**MADE, "seed": 2}) == ""


def test_a_line_for_every_file(tmp_path):
    fits, other, bare = (tmp_path / name for name in ("fits", "other", "bare"))
    for path, settings in ((fits, MADE), (other, {**MADE, "thinking": "on", "dtype": "float32"})):
        manifest_path(path).write_text(json.dumps({"settings": settings}))
    lines = list(doubts([fits, other, bare], MADE))
    assert len(lines) == 2 and not any("\n" in line for line in lines)
    assert str(other) in lines[0] and 'thinking was "on" and is "off"' in lines[0] and "float32" in lines[0]
    assert lines[1] == f"{bare} has no manifest: nothing says that the target itself wrote these answers"
    manifest_path(bare).write_text("{")
    with pytest.raises(InputError, match=r"bare\.manifest\.json"):
        list(doubts([bare], MADE))


def drafter(folder, files=("a.jsonl",), **settings):
    folder.mkdir()
    data = {"manifests": {file: {"settings": settings} if settings else None for file in files}}
    (folder / "config.json").write_text(json.dumps({"deepspec": {"data": data}}))
    (folder / "model.safetensors").touch()
    return str(folder)


def test_a_drafter_is_measured_as_it_was_trained(tmp_path):
    """Thinking counts only where the template makes another prompt of it."""
    knows, ignores = load("small-qwen3"), load("small-llama3_1")
    made = {**MADE, "target_revision": None, "chat_template_sha256": template_hash(knows)}
    drafters = {"same": drafter(tmp_path / "s", **made), "unknown": drafter(tmp_path / "u")}
    drafters["other"] = drafter(tmp_path / "o", **{**made, "thinking": "on"})
    used = {"target": "T", "target_revision": None, "dtype": "auto", "thinking": "off"}
    (line,) = eval_doubts(drafters, knows, used)
    assert line == 'drafter other was trained on answers made otherwise (a.jsonl): thinking was "on" and is "off"'
    of_ignoring = {"x": drafter(tmp_path / "i", **{**made, "chat_template_sha256": None, "thinking": "on"})}
    assert not list(eval_doubts(of_ignoring, ignores, used)) and len(list(eval_doubts(of_ignoring, knows, used))) == 1
    lines = list(eval_doubts({"same": drafters["same"]}, ignores, {**used, "target": "U", "dtype": "float32"}))
    assert len(lines) == 1 and all(word in lines[0] for word in ('target was "T"', "dtype", "chat template"))
    assert not list(eval_doubts(drafters, None, used))


def test_what_is_amiss_with_several_drafters_is_said_once(tmp_path):
    """One line for all drafters and files that differ in the same way, another for those that differ otherwise."""
    drafters = {"x": drafter(tmp_path / "x", ("a.jsonl", "b.jsonl"), **MADE), "y": drafter(tmp_path / "y", **MADE)}
    used = {"target": "T", "target_revision": MADE["target_revision"], "dtype": "float32", "thinking": "off"}
    (line,) = eval_doubts(drafters, None, used)
    assert line.startswith("drafters x, y were trained on answers made otherwise (a.jsonl, b.jsonl): dtype was ")
    drafters["z"] = drafter(tmp_path / "z", ("c.jsonl",), **{**MADE, "target": "U"})
    assert [x.split(":")[0] for x in eval_doubts(drafters, None, used)][1:] == [
        "drafter z was trained on answers made otherwise (c.jsonl)"
    ]
