"""`asyncrl algos`: what the list and the explanation of one algorithm must tell."""

import subprocess
import sys

import pytest

from asyncrl import algos, cli
from asyncrl.config import Algo
from asyncrl.envs.registry import PluginError
from asyncrl.trainers.parts import PARTS
from asyncrl.trainers.presets import PRESETS, needs, parts, resolve


def test_the_list_names_every_preset_every_part_and_every_parameter():
    text = algos.algos_text()
    words = set(text.replace(",", " ").split())
    assert set(PRESETS) <= words
    for known in PARTS.values():
        assert set(known) <= words
        assert {key for part in known.values() for key in part.parameters} <= words
    dual = PARTS["loss"]["ppo_clip"].parameters["clip_dual"].default
    assert f"clip_low = 0.2, clip_high = 0.2, clip_dual = {dual}" in text
    assert max(map(len, text.splitlines())) <= 160


def test_the_list_loads_no_torch():
    code = "import sys, asyncrl.algos as a; a.algos_text(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


def test_installed_plugins_are_listed_and_a_broken_one_hides_nobody(monkeypatch):
    def find(kind, name):
        if name == "broken":
            raise PluginError("loss 'broken' of the distribution bad 1.0 cannot be loaded")
        return PARTS[kind]["reinforce" if name == "mine" else name]

    installed = {"asyncrl.losses": ["broken", "mine"], "asyncrl.algorithms": ["house-blend"]}
    monkeypatch.setattr(algos, "names", lambda group: installed.get(group, []))
    monkeypatch.setattr(algos, "find", find)
    text = " ".join(algos.algos_text().split())
    assert "house-blend" in text
    assert "mine -A log pi (Williams 1992)" in text
    assert "broken cannot be used: loss 'broken' of the distribution bad 1.0 cannot be loaded" in text
    assert "kl_cov" in text


@pytest.mark.parametrize("name", PRESETS)
def test_the_explanation_of_a_preset_has_its_parts_with_their_numbers_and_formulas(name):
    text, algo = algos.show_text(name), resolve(Algo(name=name))
    assert text.startswith(f"{name}: ")
    for kind, part_name, part in parts(algo):
        assert f"{kind} = {part_name}" in text
        if part_name != "none":
            assert (part.function().__doc__ or "?").splitlines()[0].strip() in text
    for key, value in algo.loss_args.items():
        assert f"{key} = {value}" in text
    assert all(algos.NEEDS[need] in text for need in needs(algo))


def test_every_need_of_a_part_has_words():
    wanted = {need for known in PARTS.values() for part in known.values() for need in part.needs}
    assert wanted <= set(algos.NEEDS)


def test_the_explanation_of_dapo_is_what_its_paper_says():
    text = algos.show_text("dapo")
    assert "clip_low = 0.2, clip_high = 0.28, clip_dual = 10.0" in text
    assert "filter = equal_rewards" in text
    assert "needs: nothing but the policy" in text
    assert "Args:" not in text


def test_a_preset_of_a_file_is_explained(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from asyncrl.config import Algo\nMINE = Algo(advantage='gae', kl='k3')\n")
    text = algos.show_text(f"{path}:MINE")
    assert "a critic" in text
    assert "kl_coef = 0.001" in text


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["algos"], 0, "dapo"),
        (["algos", "show", "gspo"], 0, "loss = gspo"),
        (["algos", "show", "gspoo"], 2, "did you mean 'gspo'"),
        (["algos", "show"], 2, "show needs a NAME"),
        (["algos", "dapo"], 2, "did you mean `asyncrl algos show dapo`?"),
    ],
)
def test_the_command_prints_it_or_says_what_is_wrong(capsys, arguments, status, expected):
    try:
        code = cli.main(arguments)
    except SystemExit as exit_info:
        code = exit_info.code
    done = capsys.readouterr()
    assert code == status
    assert expected in (done.err if status else done.out)
