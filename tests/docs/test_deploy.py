"""The files in deploy/ name commands that exist.

The SLURM script is run with stand-ins for SLURM and Ray; by hand it was run on a real SLURM with two hosts. The KubeRay
manifest and the Dockerfile are read and have not run.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from dovetail.cli.main import main
from tests.docs.commands import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODEL = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
RUN = """
data: {train_files: prompts.parquet, train_batch_size: 64, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: model}
  rollout: {n: 8}
  actor: {ppo_mini_batch_size: 64, use_dynamic_bsz: true}
algorithm: {adv_estimator: grpo}
"""
# More names than a pipe holds: a script that reads only the first one must not be ended by the writer's SIGPIPE.
SCONTROL = "#!/bin/bash\nprintf 'node-a\\n'\nprintf 'node-b-%s\\n' {1..20000}\n"
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
GETENT = "#!/bin/bash\n[[ $* == 'ahostsv4 node-a' ]] || exit 2\nprintf '%s STREAM\\n' 127.0.1.1 10.0.0.7 10.0.0.8\n"
# As the real one it returns the highest code of all tasks: on another node, one that it ended with SIGTERM.
SRUN_OF_TWO = f"{SRUN.replace('exec ', '')}[[ $? == 0 ]] || exit 143\n"
RAY_RUNS = '#!/bin/bash\n[[ $1 == symmetric-run ]] || exit 0\nwhile [[ $1 != -- ]]; do shift; done\nshift\n"$@"\n'
RAY = '#!/bin/bash\nprintf \'%s\\n\' "$@" >> "$RAY_CALLS"\necho >> "$RAY_CALLS"\n'


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and a model to plan for."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_training(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The launch line resolves and can run, on a cluster of that size."""
    assert words[:2] == ["dovetail", "train"]
    assert main(["check", "--no-files", *words[2:]]) == 0, capsys.readouterr()


def test_the_slurm_script_starts_ray_on_all_nodes_and_trains_on_the_first(
    reader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.scripts.scripts import get_auth_token, start
    from ray.scripts.symmetric_run import symmetric_run

    done = run_slurm_script(reader, {"ray": RAY}, "run.yaml", "data.seed=3")
    assert done.returncode == 0, done.stderr
    token, run = [call.splitlines() for call in (reader / "calls").read_text().strip().split("\n\n")]
    assert token[0] == "get-auth-token"
    assert token[1:] == [option for parameter in get_auth_token.params for option in parameter.opts]
    assert run[0] == "symmetric-run"
    separator = run.index("--")
    parsed = symmetric_run.make_context("symmetric-run", run[1:separator]).params
    assert (parsed["address"], parsed["min_nodes"]) == ("10.0.0.7:6379", 2)
    for_ray = list(parsed["ray_args_and_entrypoint"])
    assert start.make_context("start", for_ray).params["num_gpus"] == 4
    train = run[run.index("dovetail") :]
    check_training(train, capsys)
    assert {"data.seed=3", "trainer.nnodes=2", "trainer.n_gpus_per_node=4", "ray_init.address=auto"} <= set(train)


@pytest.mark.parametrize(("dovetail", "code"), [("exit 0", 0), ("exit 75", 75), ("kill -9 $$", 137), ("", 127)])
def test_the_slurm_job_ends_with_the_runs_own_exit_code(reader: Path, dovetail: str, code: int) -> None:
    commands = {"ray": RAY_RUNS, "srun": SRUN_OF_TWO}
    done = run_slurm_script(reader, commands | ({"dovetail": f"#!/bin/bash\n{dovetail}\n"} if dovetail else {}))
    assert done.returncode == code, done.stderr


def test_a_slurm_job_whose_ray_does_not_start_ends_with_the_code_of_srun(reader: Path) -> None:
    done = run_slurm_script(reader, {"ray": RAY_RUNS.replace('"$@"', "exit 1"), "srun": SRUN_OF_TWO})
    assert done.returncode == 143, done.stderr


def test_a_slurm_job_that_is_cancelled_waits_for_the_run(reader: Path) -> None:
    """SLURM sends SIGTERM to every process of the step; the run saves a checkpoint before it ends."""
    dovetail = "#!/bin/bash\ntrap 'sleep 0.2; exit 9' TERM\nkill $PPID $$\nwhile :; do sleep 0.05; done\n"
    done = run_slurm_script(reader, {"ray": RAY_RUNS, "srun": SRUN_OF_TWO, "dovetail": dovetail})
    assert done.returncode == 9, done.stderr


def run_slurm_script(folder: Path, commands: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """On the first of two nodes, with stand-ins for what is not here."""
    (folder / "bin").mkdir()
    commands = {"scontrol": SCONTROL, "srun": SRUN, "getent": GETENT, "activate": "", **commands}
    for name, text in commands.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "DOVETAIL_VENV": str(folder)}
    environment |= {"RAY_CALLS": str(folder / "calls"), "SLURM_GPUS_ON_NODE": "8"}
    environment |= {"SLURM_GPUS_PER_NODE": "h100:4"}
    environment |= {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    script = ["bash", str(DEPLOY / "slurm.sh"), *arguments]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_the_kuberay_manifest_has_the_devices_that_its_launch_line_asks_for(
    reader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.scripts.scripts import start

    manifest = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    [worker] = workers["template"]["spec"]["containers"]
    words = shlex.split(manifest["spec"]["entrypoint"])
    check_training([word.replace("/shared/run.yaml", "run.yaml") for word in words], capsys)
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    assert workers["replicas"] == workers["minReplicas"] == int(keys["trainer.nnodes"])
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == int(keys["trainer.n_gpus_per_node"])
    known = {option for parameter in start.params for option in parameter.opts}
    for group in (head, workers):
        assert {f"--{name}" for name in group["rayStartParams"]} <= known
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == worker["image"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert keys["trainer.default_local_dir"].startswith(f"{mounts['shared']}/")


def test_the_dockerfile_installs_what_the_project_declares_and_runs_commands_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    assert {word for word, _ in steps} <= {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "CMD"}
    arguments = dict(rest.split("=", 1) for word, rest in steps if word == "ARG")
    extras = set(arguments["EXTRAS"].split(","))
    installed: list[str] = []
    for _, rest in [step for step in steps if step[0] == "RUN"]:
        words = shlex.split(rest)
        if words[:2] == ["pip", "install"]:
            installed += [word for word in words[2:] if not word.startswith("--")]
        elif words[0] == "dovetail":
            assert exit_code(words[1:]) == 0
        else:
            assert words[0] == "apt-get", rest
    assert ".[$EXTRAS]" in installed
    assert extras <= set(PROJECT["optional-dependencies"])
    rest = {word.replace("[default]", "") for word in installed if not word.startswith(".")}
    assert rest <= set(PROJECT["dependencies"]), "the image has another version than the project"
    [command] = [json.loads(rest) for word, rest in steps if word == "CMD"]
    assert command[0] == "dovetail"
    assert exit_code(command[1:]) == 0
    assert "usage: dovetail" in capsys.readouterr().out


def test_everything_that_the_dockerfile_copies_is_there_and_reaches_the_builder() -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    copies = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    for name in [name for line in copies for name in line.split()]:
        assert (ROOT / name).exists()
        last = [rule for rule in ignore if fnmatch.fnmatch(name, rule.lstrip("!"))][-1]
        assert last == f"!{name}"


def exit_code(arguments: list[str]) -> int | str | None:
    """Of a `dovetail` command that may end in argparse."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code
