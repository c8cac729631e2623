"""Laws of profiles: the two JSON forms are looked up as SGLang does, survive a round trip, and refuse nonsense."""

import json

import numpy as np
import pytest

from deepspec import InputError
from deepspec.eval.cost import Additive, Profile, StepsPerSecond, load_profile

TABLE = dict(sample_batch_tokens=[1, 4, 16], sample_steps_per_sec=[100.0, 80.0, 20.0], max_batch_tokens=64)
ADDITIVE = dict(
    bias_seconds=0.001, bs_probes=[1, 8], alpha_seconds=[0.0, 0.007],
    m_probes=[1, 8, 32], theta_seconds=[0.01, 0.03, 0.05],
)  # fmt: skip


def test_the_table_is_read_at_the_floor_probe():
    """Below the first probe the first, between two the lower one, beyond the last the last; drafting is free."""
    cost = StepsPerSecond(**TABLE)
    seconds = cost.step(3, np.array([0, 1, 3, 4, 15, 16, 64, 999]))
    assert np.allclose(1 / seconds, [100, 100, 100, 80, 80, 20, 20, 20])
    assert cost.plain(4) == pytest.approx(1 / 80)


def test_the_additive_form_is_linear_between_probes_and_clamped_outside():
    """bias + alpha(requests) + theta(tokens); a plain round has no drafting in it."""
    cost = Additive(**ADDITIVE)
    assert np.allclose(
        cost.step(1, np.array([1, 2, 8, 20, 32, 99])), 0.001 + np.array([10, 90 / 7, 30, 40, 50, 50]) / 1e3
    )
    assert np.allclose(cost.step(4, np.array([8])), 0.001 + 0.003 + 0.03)
    assert np.allclose(cost.step(99, np.array([8])), 0.001 + 0.007 + 0.03)
    assert cost.plain(8) == pytest.approx(0.001 + 0.007 + 0.03)
    assert Additive(**ADDITIVE, draft_seconds=[0.0, 0.005]).plain(8) == pytest.approx(0.001 + 0.002 + 0.03)


@pytest.mark.parametrize("cost", [StepsPerSecond(**TABLE), Additive(**ADDITIVE, draft_seconds=[0.0, 0.005])])
def test_files_survive_a_round_trip_and_hold_a_servers_keys(tmp_path, cost):
    """What is written reads back equal; its top level has exactly SGLang's keys and one section of ours, with which a
    server still tells the two forms apart: it looks for the text "bias_seconds"."""
    path = tmp_path / "profile.json"
    path.write_text(Profile(cost, {"dtype": "float32"}).to_json())
    assert load_profile(path) == Profile(cost, {"dtype": "float32"})
    keys = TABLE if isinstance(cost, StepsPerSecond) else ADDITIVE
    assert set(json.loads(path.read_text())) == {*keys, "deepspec"}
    assert ('"bias_seconds"' in path.read_text()) == (keys is ADDITIVE)


@pytest.mark.parametrize(
    "raw, words",
    [
        ({**TABLE, "sample_batch_tokens": [1, 4, 4]}, "strictly increasing"),
        ({**TABLE, "sample_batch_tokens": [1, 4]}, "2 probes for 3 values"),
        ({**TABLE, "max_batch_tokens": 15}, "below the last probe"),
        ({**TABLE, "sample_batch_tokens": [], "sample_steps_per_sec": []}, "at least one probe"),
        ({**TABLE, "sample_steps_per_sec": [100, 80, 0]}, "must be > 0"),
        ({**TABLE, "sample_batch_tokens": [1, 4.5, 16]}, "sample_batch_tokens"),
        ({"sample_batch_tokens": [1]}, "has no sample_steps_per_sec, max_batch_tokens"),
        ({**ADDITIVE, "bias_seconds": 0}, "bias_seconds must be > 0"),
        ({**ADDITIVE, "bs_probes": [8, 1]}, "bs_probes must be strictly increasing"),
        ({**ADDITIVE, "theta_seconds": [1.0]}, "m_probes holds 3 probes for 1"),
        ({**ADDITIVE, "deepspec": {"draft_seconds": [1.0]}}, "one value a bs_probe"),
        ([], "has no"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(tmp_path, raw, words):
    """One line that names the file and the mistake."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=words) as error:
        load_profile(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_profile(tmp_path / "broken.json")
