"""The grammar of values and of override lines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.overrides import parse_overrides, read_overrides_file
from dovetail.config.values import parse_value

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("1e-6", 1e-6),
        ("0.", 0.0),
        (".5", 0.5),
        ("10.0", 10.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("None", None),
        ("", ""),
        ("fsdp2", "fsdp2"),
        ("2.5B", "2.5B"),
        ("0.999_1.001", "0.999_1.001"),
        ("2_4", "2_4"),
        ("1.2.3", "1.2.3"),
        ("'3'", "3"),
        ('"a b"', "a b"),
        ("<path_to_x>", "<path_to_x>"),
        (".*visual.*", ".*visual.*"),
        ("/data/a=b/c.parquet", "/data/a=b/c.parquet"),
        ('["console","wandb"]', ["console", "wandb"]),
        ("['']", [""]),
        ("[]", []),
        ("[a, b,]", ["a", "b"]),
        ("[1,[2,3],{a:4}]", [1, [2, 3], {"a": 4}]),
        ("{a:1,b:[x,y],'c d':null}", {"a": 1, "b": ["x", "y"], "c d": None}),
        ("{url:http://host:80/x}", {"url": "http://host:80/x"}),
        ("{}", {}),
        ("${oc.env:HOME}/x", "${oc.env:HOME}/x"),
    ],
)
def test_values_are_read_as_launch_lines_mean_them(text: str, value: Any) -> None:
    read = parse_value(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["[a", "{a:1", "[a}", "{a}", "[a] b"])
def test_an_unfinished_structure_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_value(text)


def test_plus_signs_set_and_tilde_deletes() -> None:
    parsed = parse_overrides(["a.b=1", "+a.c=x", "++a.d=[1]", "~a.e", "~a.f=3"], source="override")
    assert [(one.key, one.value, one.delete) for one in parsed.overrides] == [
        ("a.b", 1, False),
        ("a.c", "x", False),
        ("a.d", [1], False),
        ("a.e", None, True),
        ("a.f", None, True),
    ]


def test_what_is_no_override_is_a_problem_that_says_how_to_write_one() -> None:
    parsed = parse_overrides(["trainer.nnodes 2"], source="override")
    assert "key=value" in str(parsed.problems[0])


def test_a_script_with_variables_of_its_own_says_how_a_shell_writes_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_OF_TEST", "/data")
    path = tmp_path / "run.sh"
    path.write_text(
        "set -xeuo pipefail\nsteps=3\nLAUNCH=(python3)\necho on three steps\n"
        "if python3 -c 'import no_such_module' 2>/dev/null; then kind=npu; else kind=gpu; fi\n"
        '"${LAUNCH[@]}" -m verl.trainer.main_ppo data.train_files=$DATA_OF_TEST/a.parquet \\\n'
        "  trainer.total_training_steps=${steps} 'data.seed=${trainer.seed}' trainer.project_name=${kind} \"$@\" 2>&1 "
        "| tee log.txt\n"
    )
    [problem] = read_overrides_file(path).problems
    assert "'trainer.total_training_steps=${steps}' has a variable that only a shell can fill in" in problem.message
    command = re.search(r"bash -c '.*'(?=,)", problem.message)
    assert command is not None
    subprocess.run(command[0], shell=True, cwd=tmp_path, check=True, capture_output=True)
    parsed = read_overrides_file(tmp_path / "launch.txt")
    assert {one.key: one.value for one in parsed.overrides} == {
        "data.train_files": "/data/a.parquet",
        "trainer.total_training_steps": 3,
        "data.seed": "${trainer.seed}",
        "trainer.project_name": "gpu",
    }


def test_a_launch_list_may_keep_its_comments_and_its_shell(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text(
        "# --config-name=x\n\nset -x\nexport A=b\n"
        "python3 -m main data.seed=1 \\\n"
        "  'data.truncation=left' \\\n"
        '  trainer.logger=\'["console"]\' trainer.nnodes="2" \\\\\n'
        "  trainer.experiment_name=two words # a comment\n"
        "  data.val_files=[''] \"$@\"\n"
    )
    parsed = read_overrides_file(path)
    assert parsed.problems == []
    assert {one.key: one.value for one in parsed.overrides} == {
        "data.seed": 1,
        "data.truncation": "left",
        "trainer.logger": ["console"],
        "trainer.nnodes": 2,
        "trainer.experiment_name": "two words",
        "data.val_files": [""],
    }
