"""Dispatch and collection as pure functions of lists, without processes."""

from __future__ import annotations

import logging
import pickle
from functools import partial

import pytest
import torch

from dovetail.controller import (
    Dispatch,
    Execute,
    LocalWorkerGroup,
    MeshLayout,
    RankArguments,
    RayClassWithInitArgs,
    Worker,
    WorkerDiedError,
    WorkerError,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    registered_methods,
)
from dovetail.controller import dispatch as d
from dovetail.controller.cluster import _start_with_retry
from dovetail.controller.forwarding import merged_runtime_env
from dovetail.controller.futures import BatchPart, BatchSlice
from dovetail.controller.hangs import CallLimits
from dovetail.controller.worker_logging import RoleFilter, logging_as
from dovetail.observability import waits
from dovetail.protocol import DataProto
from tests.controller.worker_examples import Calculator, Collective, batch, column

pytestmark = pytest.mark.unit


class Layout:
    """What dispatch functions need to know of a group."""

    takes_slices = True
    role = "actor"

    def __init__(self, world_size: int, dp_ranks: tuple[int, ...] = (), collect_ranks: tuple[int, ...] = ()) -> None:
        self.world_size = world_size
        self._mesh = MeshLayout(dp_ranks, collect_ranks)

    def mesh_layout(self, mesh_name: str) -> MeshLayout:
        return self._mesh


def test_one_to_all_gives_every_rank_the_same_arguments() -> None:
    arguments = Dispatch.ONE_TO_ALL.dispatch(Layout(3), 7, key="v")
    assert [arguments.of(rank) for rank in range(3)] == [([7], {"key": "v"})] * 3


def test_all_to_all_splits_lists_of_world_size_and_broadcasts_anything_else() -> None:
    assert Dispatch.ALL_TO_ALL.dispatch(Layout(2), [1, 2]).of(1) == ([2], {})
    assert Dispatch.ALL_TO_ALL.dispatch(Layout(2), [1, 2, 3]).of(1) == ([[1, 2, 3]], {})
    assert Dispatch.ALL_TO_ALL.dispatch(Layout(2), [1, 2], flag=True).of(1) == ([[1, 2]], {"flag": True})


def test_dp_compute_refuses_a_list_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=r"'b' is a list of 3; .* 2 ranks of actor"):
        Dispatch.DP_COMPUTE.dispatch(Layout(2), [1, 2], b=[1, 2, 3])


def test_proto_batches_are_split_evenly_and_scalars_go_to_all() -> None:
    arguments = Dispatch.DP_COMPUTE_PROTO.dispatch(Layout(2), batch(4), amount=3)
    assert arguments.padding is None
    assert [column(arguments.of(rank)[0][0]) for rank in range(2)] == [[0, 1], [2, 3]]
    assert arguments.of(1)[1] == {"amount": 3}


def test_a_batch_that_does_not_divide_is_padded_with_its_first_rows_and_unpadded_after() -> None:
    arguments = Dispatch.DP_COMPUTE_PROTO.dispatch(Layout(4), batch(6))
    assert [column(arguments.of(rank)[0][0]) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    whole = DataProto.concat([arguments.of(rank)[0][0] for rank in range(4)])
    assert column(d.drop_padding(whole, arguments.padding)) == [0, 1, 2, 3, 4, 5]


def test_a_batch_smaller_than_the_group_is_padded() -> None:
    arguments = Dispatch.DP_COMPUTE_PROTO.dispatch(Layout(4), batch(1))
    assert [column(arguments.of(rank)[0][0]) for rank in range(4)] == [[0], [0], [0], [0]]


def test_padding_is_dropped_k_times_when_each_row_became_k_rows() -> None:
    repeated = batch(8).repeat(3, interleave=True)
    assert len(d.drop_padding(repeated, d.Padding(added=2, total=8))) == 18


def test_padding_that_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padded to 8 rows and the result has 5"):
        d.drop_padding(batch(5), d.Padding(added=2, total=8))


def test_metric_and_mesh_calls_refuse_to_count_a_row_twice() -> None:
    with pytest.raises(ValueError, match="6 rows do not divide by the data-parallel size 4 of actor"):
        Dispatch.DP_COMPUTE_METRIC.dispatch(Layout(4), batch(6))
    with pytest.raises(ValueError, match="3 rows do not divide by the data-parallel size 2"):
        Dispatch.mesh("actor").dispatch(Layout(4, (0, 0, 1, 1), (0, 2)), batch(3))


def test_a_batch_that_allows_padding_is_padded_by_any_mode() -> None:
    data = DataProto.from_dict(tensors={"x": torch.arange(3.0)}, auto_padding=True)
    assert Dispatch.mesh("actor").dispatch(Layout(2, (0, 1), (0, 1)), data).padding == d.Padding(added=1, total=4)


def test_batches_of_one_call_must_have_the_same_length() -> None:
    with pytest.raises(ValueError, match=r"\{0: 4, 'other': 6\}"):
        Dispatch.DP_COMPUTE_PROTO.dispatch(Layout(2), batch(4), other=batch(6))


def test_a_shared_call_without_a_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="got no DataProto"):
        Dispatch.DP_COMPUTE_PROTO.dispatch(Layout(2), 3)


def test_mesh_sends_one_share_to_all_ranks_of_a_data_parallel_rank() -> None:
    group = Layout(4, dp_ranks=(0, 0, 1, 1), collect_ranks=(0, 2))
    arguments = make_nd_compute_dataproto_dispatch_fn("actor").dispatch(group, batch(4))
    assert [column(arguments.of(rank)[0][0]) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert arguments.args[0][0] is arguments.args[0][1], "the share is one object, so it is stored once"


def test_mesh_shares_follow_the_data_parallel_rank_not_the_rank() -> None:
    arguments = Dispatch.mesh("actor").dispatch(Layout(2, dp_ranks=(1, 0), collect_ranks=(1, 0)), batch(2))
    assert [column(arguments.of(rank)[0][0]) for rank in range(2)] == [[1], [0]]


def test_collecting_something_else_than_batches_says_what_came() -> None:
    with pytest.raises(TypeError, match=r"must return a DataProto .* one returned float"):
        Dispatch.DP_COMPUTE_PROTO.collect_fn(Layout(2), [batch(1), 1.0])


def test_a_function_goes_to_every_rank_beside_its_shares() -> None:
    arguments = Dispatch.DP_COMPUTE_PROTO_WITH_FUNC.dispatch(Layout(2), column, batch(2))
    assert [arguments.of(rank)[0][0] for rank in range(2)] == [column, column]
    with pytest.raises(TypeError, match="first argument must be a function"):
        Dispatch.DP_COMPUTE_PROTO_WITH_FUNC.dispatch(Layout(2), batch(2), batch(2))


def test_users_can_add_a_dispatch_mode() -> None:
    mode = register_dispatch_mode(
        "EVEN_RANKS_ONLY",
        lambda group, value: ([[value if rank % 2 == 0 else None for rank in range(group.world_size)]], {}),
        lambda group, outputs: outputs[::2],
    )
    assert Dispatch.get("EVEN_RANKS_ONLY") is mode
    assert mode.dispatch(Layout(4), 5) == RankArguments([[5, None, 5, None]], {})
    with pytest.raises(ValueError, match="exists already"):
        register_dispatch_mode("ONE_TO_ALL", lambda *a: a, lambda *a: a)
    with pytest.raises(ValueError, match="Did you mean DP_COMPUTE_PROTO"):
        Dispatch.get("DP_COMPUTE_PROTOO")


def test_register_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"use Dispatch\.RANK_ZERO"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    with pytest.raises(ValueError, match="exactly dispatch_fn and collect_fn"):
        register(dispatch_mode={"dispatch_fn": print})
    with pytest.raises(TypeError, match=r"one of Dispatch\.\*"):
        register(dispatch_mode="ONE_TO_ALL")  # type: ignore[arg-type]


def test_an_override_in_a_subclass_keeps_the_registration() -> None:
    class Loud(Calculator):
        def describe(self, word: str, *, mark: str = "") -> str:
            return super().describe(word, mark=mark).upper()

    assert registered_methods(Loud)["describe"].dispatch_mode is Dispatch.ONE_TO_ALL
    assert LocalWorkerGroup(RayClassWithInitArgs(Loud)).describe("hi") == ["HI-0/1"]
    assert "not_registered" not in registered_methods(Loud)


@pytest.mark.parametrize(("num_rows", "chunks"), [([2, 2], 4), ([1, 3], 2), ([4, 0, 4], 2), ([3, 5], 1), ([5, 1], 3)])
def test_slices_of_a_future_cover_every_row_once(num_rows: list[int], chunks: int) -> None:
    taken: list[tuple[int, int]] = []
    for index in range(chunks):
        ranges = BatchSlice([BatchPart(None, None)] * len(num_rows), index, chunks)._overlaps(num_rows)
        taken += [(part, row) for part, (first, last) in enumerate(ranges) for row in range(first, last)]
    assert taken == [(part, row) for part, rows in enumerate(num_rows) for row in range(rows)]


def test_a_future_that_cannot_be_shared_evenly_says_so() -> None:
    with pytest.raises(ValueError, match="future of 5 rows cannot be shared by 2"):
        BatchSlice([], 0, 2)._overlaps([5])


def test_worker_errors_survive_pickling_with_all_their_facts() -> None:
    error = WorkerError(
        "actor",
        3,
        "update",
        pid=7,
        node="10.0.0.1",
        reason="KeyError: 'x'",
        worker_traceback="Tb",
        exception=KeyError("x"),
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.role, copy.rank, copy.method, copy.pid, copy.node) == ("actor", 3, "update", 7, "10.0.0.1")
    assert str(copy) == str(error)
    assert isinstance(copy.exception, KeyError)
    assert "while running 'update'" in str(WorkerDiedError("actor", 3, "update"))
    assert "between calls" in str(WorkerDiedError("actor", 3, ""))


def test_log_records_carry_the_role_of_the_running_call() -> None:
    record = logging.LogRecord("n", logging.INFO, "f", 1, "m", None, None)
    stamp = RoleFilter("actor+critic", rank=2, world_size=4)
    stamp.filter(record)
    assert (record.role, record.rank) == ("actor+critic", 2)
    with logging_as("critic"):
        stamp.filter(record)
    assert record.role == "critic"


def test_a_ray_that_timed_out_is_started_again_and_other_errors_are_raised() -> None:
    log: list[str] = []

    def start(errors: list[Exception]) -> None:
        log.append("start")
        if errors:
            raise errors.pop()

    _start_with_retry(partial(start, [TimeoutError("node timed out during startup")]), lambda: log.append("clean"), 2)
    assert log == ["start", "clean", "start"]
    with pytest.raises(ValueError, match="bad argument"):
        _start_with_retry(partial(start, [ValueError("bad argument")]), lambda: None, 2)
    with pytest.raises(TimeoutError):
        _start_with_retry(partial(start, [TimeoutError("timed out"), TimeoutError("timed out")]), lambda: None, 2)


def test_a_world_of_one_needs_no_port_for_its_process_group() -> None:
    worker = Collective()
    worker.init_process_group("gloo")
    try:
        assert worker.all_reduce() == 0.0
        assert worker.master_port is None
    finally:
        torch.distributed.destroy_process_group()


def test_workers_get_the_variables_of_the_driver_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    env = merged_runtime_env({}, {"MINE": "yes"})["env_vars"]
    assert (env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"], env["MINE"]) == ("3", "1", "yes")


def test_a_worker_by_itself_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    worker = Calculator()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.master_port) == (0, 1, 0, None)


def test_a_worker_under_torchrun_reads_its_rank_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    worker = Calculator()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.master_port) == (3, 4, 1, 29)


def test_a_mesh_cannot_change_under_a_group_that_uses_it() -> None:
    worker = Calculator()
    worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
    worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
    with pytest.raises(ValueError, match="cannot become"):
        worker._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)


def test_local_exceptions_keep_their_type_and_traceback() -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(Calculator))
    with pytest.raises(KeyError, match="no such thing") as caught:
        group.fail_on(0)
    assert caught.traceback[-1].name == "fail_on"


def test_a_wrong_method_name_suggests_the_right_one() -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(Calculator), role="actor")
    with pytest.raises(AttributeError, match="Did you mean describe"):
        group.descrbe("x")
    with pytest.raises(AttributeError, match="not registered; decorate it"):
        group.not_registered()


def test_local_roles_share_a_process_and_know_each_other() -> None:
    spec = create_colocated_worker_cls(
        {"actor": RayClassWithInitArgs(Calculator, offset=1.0), "critic": RayClassWithInitArgs(Calculator, offset=2.0)}
    )
    groups = LocalWorkerGroup(spec).spawn({"actor", "critic"})
    assert column(groups["critic"].plus(batch(2))) == [2, 3]
    assert groups["actor"].place()[0]["colocated"] == ["actor", "critic"]
    with pytest.raises(ValueError, match="no role 'ref'"):
        LocalWorkerGroup(spec).spawn({"ref"})


def test_only_workers_can_be_hosted() -> None:
    with pytest.raises(TypeError, match=r"not a subclass of dovetail\.controller\.Worker"):
        RayClassWithInitArgs(dict)
    assert issubclass(RayClassWithInitArgs(Calculator).cls, Worker)


def test_a_local_group_closes_all_of_its_workers_also_when_one_of_them_cannot() -> None:
    closed: list[str] = []

    class Holds(Worker):
        def close(self) -> None:
            closed.append(self.role)
            if self.role == "actor":
                raise RuntimeError("the server does not end")

    group = LocalWorkerGroup(
        create_colocated_worker_cls({role: RayClassWithInitArgs(Holds) for role in ("ref", "actor")})
    )
    with pytest.raises(RuntimeError, match="the server does not end"):
        group.shutdown()
    assert sorted(closed) == ["actor", "ref"]
    group.shutdown()
    assert len(closed) == 2


def test_a_local_worker_that_takes_long_to_close_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[waits.Wait] = []

    class Slow(Worker):
        def close(self) -> None:
            named.extend(waits._REGISTER.look())

    monkeypatch.setattr(waits, "_REGISTER", waits._Register())
    LocalWorkerGroup(RayClassWithInitArgs(Slow), role="actor", limits=CallLimits(0.0)).shutdown()
    assert [(wait.who, wait.what) for wait in named] == [("the driver", "actor.close")]
