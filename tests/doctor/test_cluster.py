"""`dovetail doctor --cluster`: real paths on gloo give verdicts; wrong numbers, hangs and wrong names differ."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from ray.exceptions import RayTaskError

import dovetail
from dovetail.cli import doctor_cluster
from dovetail.cli.main import main
from dovetail.doctor import paths
from dovetail.doctor.cluster import run_paths, select
from dovetail.doctor.collectives import CollectivesWorker
from dovetail.doctor.paths import PATHS, DoctorPath
from dovetail.doctor.same_update import Update, overrides, update_once
from dovetail.doctor.site import Site, node_facts, prepare
from dovetail.rollout.sglang.environment import PYTHON_VARIABLE
from tests.ray_workers import quick_workers


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    prepare(folder)
    return Site(folder, "cpu", num_nodes=1, devices_per_node=2)


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_paths_pass_on_two_gloo_ranks_and_the_report_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On real Ray actors. The guide's page on nodes runs `nodes`, `make test-all` whole runs, vLLM and SGLang, too."""
    report, wanted = tmp_path / "report.json", select(["collectives", "fsdp", "megatron", "native engine"])
    words = [word for name in wanted for word in ("--paths", name)]
    words.append(f"ray_init.runtime_env.py_executable={quick_workers()['py_executable']}")
    assert main(["doctor", "--cluster", *words, "--limit", "400", "--out", str(report)]) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert f"{len(wanted)} ok; the details are in" in " ".join(shown.split())
    rows = {row["name"]: row for row in json.loads(report.read_text())["paths"]}
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys(wanted, "ok")
    assert "slowest pair: ranks 0" in rows["collectives"]["seen"]
    assert "old weights would be off by" in rows["native engine, own devices"]["seen"]
    for name in ("fsdp2", "fsdp", "megatron, tensor 2", "megatron, pipeline 2"):
        assert ", one process " in rows[name]["seen"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_path_that_can_be_tried_here_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes: all engines and backends that are installed, as a user's first call on a cluster."""
    report = tmp_path / "report.json"
    assert main(["doctor", "--cluster", "--limit", "600", "--out", str(report)]) == 0, capsys.readouterr().out
    rows = json.loads(report.read_text())["paths"]
    assert [row["name"] for row in rows] == [path.name for path in PATHS]
    assert {row["verdict"] for row in rows} <= {"ok", "not here", "refused"}
    (ulysses,) = [row for row in rows if row["name"] == "fsdp2, ulysses 2"]
    assert "one process" in ulysses["seen"]
    assert sum(row["verdict"] == "ok" for row in rows) >= 12


@pytest.mark.engine
def test_a_path_that_does_not_answer_in_time_is_killed_and_named_with_the_stage_it_is_at(site: Site) -> None:
    (result,) = run_paths(site, ["collectives"], timeout_s=0.5)
    assert result.verdict == "hung"
    assert result.failed
    assert "waiting at: " in result.seen


@pytest.mark.unit
def test_an_unknown_path_and_an_unknown_key_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="there is no path 'nccl'; the paths are: nodes; collectives"):
        select(["nccl"])
    assert select(["fsdp"]) == ["fsdp2", "fsdp", "fsdp2, ulysses 2"]
    assert main(["doctor", "--cluster", "trainer.nnods=2", "--out", str(tmp_path / "report.json")]) == 1
    assert "trainer.nnodes" in capsys.readouterr().out
    assert not (tmp_path / "report.json").exists()


@pytest.mark.unit
def test_a_path_that_needs_more_devices_is_said_to_be_untested(site: Site) -> None:
    alone = Site(site.folder, "cpu", 1, 1)
    (result,) = run_paths(alone, ["fsdp2, ulysses 2"], timeout_s=60.0)
    assert (result.verdict, result.seen) == ("not here", "needs 2 devices, there is 1")
    assert not result.failed


@pytest.mark.unit
def test_sglang_is_tried_where_it_is_installed_or_a_python_that_has_it_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = [path for path in PATHS if path.name == "sglang, tensor 1"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    assert path.missing(site) == "sglang is not installed"
    monkeypatch.setenv(PYTHON_VARIABLE, "python")
    assert path.missing(site) == ""


@pytest.mark.unit
def test_a_cluster_with_gpus_is_tried_on_its_cpus_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_cluster, "_gpus_by_node", lambda address: [0, 8, 4])
    words = argparse.Namespace(items=["ray_init.address=auto"], devices=None)
    there = doctor_cluster._site(tmp_path, words)
    assert (there.on_cuda, there.num_nodes, there.devices_per_node) == (True, 2, 4)
    words.items.append("trainer.device=cpu")
    there = doctor_cluster._site(tmp_path, words)
    assert (there.on_cuda, there.num_nodes, there.devices_per_node) == (False, 3, 2)


@pytest.mark.unit
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_is_tried_whole_in_two_parts_and_on_devices_of_its_own(engine: str) -> None:
    names = [path.name for path in PATHS if path.library == engine]
    assert names == [f"{engine}, tensor 1", f"{engine}, tensor 2", f"{engine}, own devices"]


@pytest.mark.unit
def test_a_wrong_number_after_a_collective_is_an_error_that_names_the_rank() -> None:
    with pytest.raises(RuntimeError, match=r"all-reduce: rank 0 on .* has values from 1 to 2 where 3 is right"):
        CollectivesWorker()._require(torch.tensor([1.0, 2.0]), 3.0, "all-reduce")


@pytest.mark.engine
def test_an_update_with_another_learning_rate_is_told_apart_from_the_same_update(site: Site) -> None:
    small = overrides(8)
    first = update_once(site.config(*small, devices=1), use_ray=False, use_gpu=False)
    again = update_once(site.config(*small, devices=1), use_ray=False, use_gpu=False)
    other = update_once(
        site.config(*small, "actor_rollout_ref.actor.optim.lr=3e-4", devices=1), use_ray=False, use_gpu=False
    )
    assert again.difference(first) == 0
    assert other.difference(first) > 1


@pytest.mark.unit
def test_a_gradient_norm_that_is_off_by_a_percent_fails() -> None:
    zeros = torch.zeros(2, 3)
    assert Update(zeros, zeros, 1.01).difference(Update(zeros, zeros, 1.0)) > 1
    assert Update(zeros, zeros, 1.0001).difference(Update(zeros, zeros, 1.0)) < 1


@pytest.mark.unit
def test_nodes_that_run_from_a_source_folder_tell_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_metadata(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_metadata)
    facts = node_facts(str(tmp_path))
    assert facts["dovetail"] == dovetail.__version__
    assert facts["torch"] == torch.__version__
    assert facts["sees_folder"] is True


@pytest.mark.unit
def test_the_verdict_on_a_failed_path_names_the_error_of_the_process_that_failed(site: Site, tmp_path: Path) -> None:
    def run(site: Site, stage: object) -> str:
        raise RayTaskError(
            "node_facts", "traceback there", ValueError("the value is 3, it must be 4")
        ).as_instanceof_cause()

    assert not paths.run_path(dataclasses.replace(site, folder=tmp_path), DoctorPath("broken", "nothing", run))
    seen = json.loads((tmp_path / "path-broken.json").read_text())
    assert seen["verdict"] == "FAILED"
    assert seen["seen"] == "ValueError: the value is 3, it must be 4"
