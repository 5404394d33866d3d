"""`mainstem info`: numbers that can be checked elsewhere, of a preset, a run and a changed config."""

import pytest

from mainstem import counts
from mainstem.presets import PRESETS


def test_the_known_numbers_of_andrea_120m(mainstem):
    found = mainstem("info", "andrea-120m", "--json").json
    assert found["parameters"]["total"] == 92_331_264
    assert found["parameters"]["per_block"] == 7_087_872
    assert found["parameters"]["mlp_weights_per_block"] == 4_718_592
    assert found["norms"] == 25
    assert found["config"]["d_head"] == 64


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_counted(mainstem, name):
    found = mainstem("info", name, "--json").json
    assert found["name"] == name
    assert {key: found[key] for key in counts.summary(PRESETS[name].model)} == counts.summary(PRESETS[name].model)
    assert f"{found['parameters']['total']:,}" in mainstem("info", name).out


def test_flags_change_the_config_before_it_is_counted(mainstem):
    found = mainstem("info", "--json", "tiny", "--model.n-layer", "6", "--model.residual", "sandwich").json
    assert found["config"]["n_layer"] == 6
    assert found["norms"] == 4 * 6 + 1


def test_a_run_and_its_checkpoints_are_counted(mainstem, small_run):
    found = [mainstem("info", path, "--json").json for path in (small_run, small_run / "checkpoints/step-00000008")]
    assert found[0]["parameters"] == found[1]["parameters"]
    assert found[0]["config"]["d_model"] == 32
    assert found[0]["parameters"]["wte"] == 300 * 32


def test_a_folder_that_is_no_run_is_refused(mainstem, tmp_path):
    result = mainstem("info", tmp_path)
    assert result.code == 2
    assert "neither a run folder (no run.json) nor a checkpoint (no config.json)" in result.err
