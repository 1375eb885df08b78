"""Profiler traces and memory snapshots on CPU, and what a training writes into a trace."""

import json
import logging

import pytest
import torch

from tests.support.training import tiny, train, write_corpus
from torchtitan_dmuon.config.job_config import Profiling
from torchtitan_dmuon.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling


def profile_steps(config, folder, steps, global_step=0):
    with maybe_enable_profiling(config, str(folder), global_step) as profiler:
        for _ in range(steps):
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_off_yields_none_and_writes_nothing(tmp_path):
    with maybe_enable_profiling(Profiling(), str(tmp_path), 0) as profiler:
        assert profiler is None
    with maybe_enable_memory_snapshot(Profiling(), str(tmp_path), 0) as snapshots:
        assert snapshots is None
    assert list(tmp_path.iterdir()) == []


def test_a_trace_every_profile_freq_steps(tmp_path):
    config = Profiling(enable_profiling=True, profile_freq=3, profiler_active=1, profiler_warmup=1)
    files = profile_steps(config, tmp_path, steps=8)
    assert files == [f"profile_traces/iteration_{step}/rank0_trace.json" for step in (3, 6)]
    events = json.loads((tmp_path / files[1]).read_text())["traceEvents"]
    assert [event["name"] for event in events if event["name"].startswith("ProfilerStep")] == ["ProfilerStep#5"]
    assert sum(event["name"] == "aten::mm" for event in events) == 1


def test_a_resumed_run_profiles_the_same_steps(tmp_path):
    config = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1, save_traces_folder="t")
    assert profile_steps(config, tmp_path, steps=6, global_step=5) == ["t/iteration_8/rank0_trace.json"]


def test_a_cycle_cut_short_writes_nothing(tmp_path):
    config = Profiling(enable_profiling=True, profile_freq=3, profiler_active=2, profiler_warmup=1)
    assert profile_steps(config, tmp_path, steps=5) == ["profile_traces/iteration_3/rank0_trace.json"]
    with (
        pytest.raises(RuntimeError, match=r"^stop$"),
        maybe_enable_profiling(config, str(tmp_path / "b"), 0) as profiler,
    ):
        profiler.step()
        profiler.step()
        raise RuntimeError("stop")
    assert not (tmp_path / "b").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_memory_snapshot_without_cuda_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = Profiling(enable_memory_snapshot=True)
    with maybe_enable_memory_snapshot(config, str(tmp_path), 0) as snapshots:
        assert snapshots is None
    assert caplog.messages == ["profiling.enable_memory_snapshot is ignored: memory snapshots need CUDA"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory snapshots need CUDA")
def test_memory_snapshot_files(tmp_path):
    config = Profiling(enable_memory_snapshot=True, profile_freq=2)
    with (
        pytest.raises(torch.OutOfMemoryError),
        maybe_enable_memory_snapshot(config, str(tmp_path), 1) as snapshots,
    ):
        snapshots.step()
        snapshots.step()
        raise torch.OutOfMemoryError("simulated")
    names = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.pickle"))
    folders = ("iteration_2", "iteration_4_out_of_memory")
    assert names == [f"memory_snapshot/{folder}/rank0_memory_snapshot.pickle" for folder in folders]


@pytest.mark.dist
def test_the_parts_of_a_step_are_named_in_the_trace_of_a_training(tmp_path):
    write_corpus(tmp_path / "corpus")
    options = {"checkpoint__enable": False, "profiling__enable_profiling": True, "profiling__profile_freq": 4}
    run = train(2, *tiny(tmp_path, **options))
    assert run.codes == [0, 0], run.output
    for rank in range(2):
        trace = tmp_path / "out" / "profile_traces" / "iteration_4" / f"rank{rank}_trace.json"
        names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
        assert {f"trainer/{part}" for part in ("data", "forward", "backward", "clip", "step", "newton_schulz")} <= names
        dmuon = {name.split()[0] for name in names if name.startswith("dmuon/")}
        assert {"dmuon/unshard", "dmuon/reduce", "dmuon/newton_schulz", "dmuon/adamw"} <= dmuon
