"""Workers: the same bits as one process, no work done twice, losses that change nothing; Ray's part in this process.

test_ray.py tells the same on Ray.
"""

import pickle
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from helpers import model, normal
from in_process import ActorError, Engine, installed
from lsuv_cli import Settings, compare, initialize, inspect, measure
from lsuv_cli.data.batches import from_arrays
from lsuv_cli.data.inputs import InputSpec
from lsuv_cli.data.reading import read
from lsuv_cli.errors import LsuvError
from lsuv_cli.scaling.devices import open_device
from lsuv_cli.workers import crew
from lsuv_cli.workers.worker import Ran, Sight, Worker
from shell import lsuv
from stories import BATCH, SAMPLES, STORIES, bits, figures, tanhs

ONE: Any = {"device": "cpu", "threads": 1, "batch_size": BATCH}


@pytest.fixture
def engine(monkeypatch):
    with installed(monkeypatch, Engine()) as made:
        yield made


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", STORIES)
def test_the_bits_are_those_of_one_process(name, workers, engine):
    graph, data, settings = STORIES[name]
    one = initialize(graph, data, **ONE, **settings)
    several = initialize(graph, data, workers=workers, **ONE, **settings)
    assert bits(several) == bits(one)
    assert figures(several.report) == figures(one.report)
    assert len(several.report.workers) == workers


def test_looking_and_comparing_give_the_same_figures(engine):
    graph, data, _ = STORIES["images"]
    assert figures(inspect(graph, data, workers=2, **ONE)) == figures(inspect(graph, data, **ONE))
    assert figures(measure(graph, data, workers=2, **ONE)) == figures(measure(graph, data, **ONE))
    started = engine.started
    several, one = compare(graph, data, workers=2, **ONE), compare(graph, data, **ONE)
    assert engine.started == started + 2  # the same workers for all initializations
    assert {name: figures(report) for name, report in several.items()} == {
        name: figures(report) for name, report in one.items()
    }


def test_every_worker_runs_each_stage_once(engine):
    report = initialize(tanhs(), normal(SAMPLES, 16), workers=2, **ONE).report
    runs = [call for call in engine.calls if call[1] == "run"]
    assert runs.count((1, "run")) == report.stages + 1  # and the one piece of verification
    assert runs.count((2, "run")) == report.stages + 1


def test_a_stage_that_is_measured_again_stops_after_the_first_batch(engine, monkeypatch):
    ran: list[tuple[int, int]] = []
    real = Worker.run

    def run(self, work, share, *given):
        done = real(self, work, share, *given)
        assert isinstance(done, Ran)
        ran.append((share, len(done.sums)))
        return done

    monkeypatch.setattr(Worker, "run", run)
    graph = model("x (float[N,16] x) => (y) { far = Add(x, shift) y = MatMul(far, w) }",
                  w=normal(16, 1), shift=np.array(1e4, np.float32))  # fmt: skip
    one = initialize(graph, normal(SAMPLES, 16), **ONE)
    ran.clear()
    assert bits(initialize(graph, normal(SAMPLES, 16), workers=2, **ONE)) == bits(one)
    assert (0, 1) in ran  # the worker that has the very first batch stopped behind it
    assert (0, 5) in ran


def test_weights_go_into_the_object_store_once_for_each_stage(engine):
    graph, data, _ = STORIES["large weights"]
    report = initialize(graph, data, workers=3, **ONE).report
    weight = 300 * 300 * 4
    assert [size for size in engine.put_bytes if size] == [weight] * report.stages + [3 * weight]


def test_large_weights_are_drawn_by_the_workers(engine):
    graph, data, _ = STORIES["large weights"]
    initialize(graph, data, workers=2, **ONE)
    assert [number for number, name in engine.calls if name == "draw"] == [1, 2, 1]


@pytest.mark.parametrize("name", ["run", "draw", "take", "receive", "begin", "keep_only"])
@pytest.mark.parametrize("story", ["images", "large weights"])
def test_a_lost_worker_is_replaced_and_the_bits_stay(name, story, monkeypatch):
    graph, data, _ = STORIES[story]
    one = initialize(graph, data, **ONE)
    with installed(monkeypatch, Engine(lost_at=[(2, name)])) as engine:
        several = initialize(graph, data, workers=2, **ONE)
    assert bits(several) == bits(one)
    if (2, name) in engine.calls:
        assert any("worker 2" in warning and "was replaced" in warning for warning in several.report.warnings)
        assert engine.started == 3


def test_a_lost_connection_is_told_in_words_and_not_in_calls_of_rays():
    text = "The actor 98 is unavailable: The actor is temporarily unavailable: RpcError: RPC error: Socket closed"
    assert crew._reason(ActorError(text)) == "the connection to it was lost"


def test_a_worker_lost_in_the_third_stage_is_replayed_through_two(monkeypatch):
    graph, data, _ = STORIES["tanhs"]
    one = initialize(graph, data, **ONE)
    engine = Engine()
    lose_at_third = [(2, "run")]

    real = engine.call

    def call(actor, name, given):
        if (actor.number, name) == (2, "run") and len([c for c in engine.calls if c == (2, "run")]) == 2:
            engine.lost_at = lose_at_third
        return real(actor, name, given)

    monkeypatch.setattr(engine, "call", call)
    with installed(monkeypatch, engine):
        several = initialize(graph, data, workers=2, **ONE)
    assert bits(several) == bits(one)
    replayed = [call for call in engine.calls if call[0] == 3 and call[1] == "run"]
    assert len(replayed) == 2 + (several.report.stages - 2) + 1


def test_without_room_for_another_worker_one_that_is_left_takes_over(monkeypatch):
    graph, data, _ = STORIES["tanhs"]
    one = initialize(graph, data, **ONE)
    with installed(monkeypatch, Engine(lost_at=[(2, "run")], room=2)):
        several = initialize(graph, data, workers=2, **ONE)
    assert bits(several) == bits(one)
    assert [worker.batches for worker in several.report.workers] == [SAMPLES // BATCH]
    assert any("went to another" in warning for warning in several.report.warnings)


def test_work_that_loses_every_worker_is_an_error_of_one_line(monkeypatch):
    lost = [(number, "run") for number in range(2, 9)]
    with installed(monkeypatch, Engine(lost_at=lost)), pytest.raises(LsuvError, match="3 workers were lost"):
        initialize(tanhs(), normal(SAMPLES, 16), workers=2, **ONE)


def test_a_worker_that_is_killed_while_it_starts_is_told_as_that(monkeypatch):
    with installed(monkeypatch, Engine(lost_at=[(2, "place")])), pytest.raises(LsuvError) as problem:
        initialize(tanhs(), normal(SAMPLES, 16), workers=2, **ONE)
    assert str(problem.value).startswith("a worker ended while it started (it was killed)")
    assert "lsuv-cli" not in str(problem.value)  # it is no matter of versions


def test_an_error_in_a_worker_is_the_error_of_one_process(engine):
    graph = model("x (float[N,4] x) => (y) { r = MatMul(x, w) y = Reshape(r, s) }", w=normal(4, 4), s=np.array([4, 4]))
    with pytest.raises(LsuvError) as one:
        initialize(graph, normal(12, 4), **ONE | {"batch_size": 3})
    with pytest.raises(LsuvError) as several:
        initialize(graph, normal(12, 4), workers=2, **ONE | {"batch_size": 3})
    assert str(several.value) == str(one.value)


def test_a_model_with_random_numbers_runs_in_the_driver_alone(engine):
    graph = model(
        "x (float[N,16] x) => (y) { n = RandomNormalLike(x) s = Add(x, n) y = MatMul(s, w) }", w=normal(16, 16)
    )
    one = initialize(graph, normal(SAMPLES, 16), **ONE)
    assert bits(initialize(graph, normal(SAMPLES, 16), workers=2, **ONE)) == bits(one)


def test_progress_counts_the_batches_of_all_workers(engine):
    heard = []
    initialize(tanhs(), normal(SAMPLES, 16), workers=2, listen=lambda *step: heard.append(step), **ONE)
    done = [step[1:] for step in heard if step[0] == "scaling"]
    assert done[-1] == (4 * SAMPLES // BATCH,) * 2
    assert done == sorted(done)


def test_more_workers_than_batches_leave_some_without_any(engine):
    report = initialize(tanhs(), normal(8, 16), workers=3, **ONE).report
    assert [worker.batches for worker in report.workers] == [1, 1, 0]


def test_report_and_json_say_how_many_and_where(engine):
    report = initialize(tanhs(), normal(SAMPLES, 16), workers=2, **ONE).report
    assert "2 workers, CPU, 1 thread each" in repr(report)
    told = report.to_json()["workers"]
    assert [worker["batches"] for worker in told] == [5, 5]
    assert told[0]["device"] == "CPU, 1 thread"


@pytest.fixture
def picky_workers(picky, monkeypatch):
    """Workers with a device that takes no session, and a driver with the CPU; what that device says."""
    monkeypatch.setattr("lsuv_cli.workers.worker.open_device", lambda device, threads: open_device("picky", threads))
    return picky[0]


def test_a_stage_that_a_workers_device_does_not_take_is_told_once(engine, picky_workers):
    """Each of four stages and the verification runs on the host of either worker."""
    graph, data = tanhs(), normal(SAMPLES, 16)
    several = initialize(graph, data, workers=2, **ONE)
    (warning,) = several.report.warnings
    assert warning.startswith("a stage ran on the CPU, because Picky device 0 does not take it: ")
    assert warning.endswith(picky_workers)
    assert bits(several) == bits(initialize(graph, data, **ONE))


def test_a_refusal_is_told_by_the_worker_that_takes_over(monkeypatch, picky_workers):
    """The only worker is lost at its first stage."""
    with installed(monkeypatch, Engine(lost_at=[(1, "run")])):
        report = initialize(tanhs(), normal(SAMPLES, 16), workers=1, **ONE).report
    assert sum("a stage ran on the CPU" in warning for warning in report.warnings) == 1
    assert sum("was replaced" in warning for warning in report.warnings) == 1


def test_a_workers_reason_for_its_device_is_told_where_it_is_not_the_drivers(engine, monkeypatch, tmp_path):
    onnx.save(tanhs(), tmp_path / "m.onnx")
    np.save(tmp_path / "c.npy", normal(SAMPLES, 16))
    reasons = iter(["as asked", "CUDA cannot be used: no card"])
    elsewhere = lambda device, threads: replace(open_device(device, threads), reason=next(reasons))  # noqa: E731
    monkeypatch.setattr("lsuv_cli.workers.worker.open_device", elsewhere)
    words = ["--threads", 1, "--device", "cpu", "--batch-size", BATCH, "--workers", 2]
    done = lsuv("check", tmp_path / "m.onnx", "--data", tmp_path / "c.npy", *words, "-v")
    first, second = [line for line in done.out.splitlines() if line.startswith("worker ")]
    assert first.endswith("; CPU, 1 thread; 5 batches read")
    assert second.endswith("; CPU, 1 thread (CUDA cannot be used: no card); 5 batches read")


def test_verbose_shows_who_does_what(engine, tmp_path):
    onnx.save(tanhs(), tmp_path / "m.onnx")
    np.save(tmp_path / "c.npy", normal(SAMPLES, 16))
    words = ["--threads", 1, "--device", "cpu", "--batch-size", BATCH, "--workers", 2]
    done = lsuv("check", tmp_path / "m.onnx", "--data", tmp_path / "c.npy", *words, "-v")
    told = [line for line in done.out.splitlines() if line.startswith("worker ")]
    assert [line.partition(":")[0] for line in told] == ["worker 1", "worker 2"]
    assert all(line.endswith("CPU, 1 thread; 5 batches read") for line in told)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_batches_of_files_are_sent_as_their_names(suffix, tmp_path):
    data = normal(SAMPLES, 16)
    path = tmp_path / f"c.{suffix}"
    np.save(path, data) if suffix == "npy" else np.savez(path, x=data)
    found = read([str(path)], [InputSpec("x", "float32", (None, 16))], batch_size=BATCH)
    assert found.files == [path]
    sent = pickle.dumps(found.batches)
    assert len(sent) < 2000
    np.testing.assert_array_equal(pickle.loads(sent)[3]["x"], data[12:16])


def test_data_in_memory_is_in_no_file():
    assert from_arrays(normal(4, 16), [InputSpec("x", "float32", (None, 16))]).files is None


def test_a_worker_reads_only_files_that_are_the_drivers(tmp_path):
    path = tmp_path / "c.npy"
    np.save(path, normal(SAMPLES, 16))
    seen = Sight.of(path)
    worker = Worker("cpu", 1, str(tmp_path))
    assert worker.sees([seen])
    np.save(path, normal(SAMPLES, 16, seed=1))
    assert not worker.sees([seen])
    path.unlink()
    assert not worker.sees([seen])


@pytest.mark.parametrize("wrong", [0, -1, "two", "ray://", "ray://host", "http://host:1", True, 5000])
def test_workers_are_a_number_or_a_cluster(wrong):
    with pytest.raises(LsuvError, match="workers"):
        Settings(workers=wrong)


@pytest.mark.parametrize("right", [1, "2", "auto", "ray://head:10001"])
def test_workers_as_text(right):
    assert str(Settings(workers=right).workers) == str(right)


def test_without_ray_one_line_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    onnx.save(tanhs(), tmp_path / "m.onnx")
    np.save(tmp_path / "c.npy", normal(SAMPLES, 16))
    done = lsuv("check", tmp_path / "m.onnx", "--data", tmp_path / "c.npy", "--workers", "2")
    assert done.code == 2
    assert done.err == "lsuv: --workers needs Ray: pip install 'lsuv-cli[ray]'\n"
