"""What a save costs, for each `checkpoint.async_mode`, side by side.

    python scripts/bench_checkpoint.py [--nproc 2] [--saves 3] [--interval 8] [--folder DIR] [--section.key value ...]

Further arguments go to the run (default: train_configs/debug_model.toml); `--model.flavor 1B` on GPUs, say. Each mode
trains in processes of its own. Columns, each the worst of all ranks, and of all saves but the first (which makes
buffers):

- blocked: how long the loop stands still in a save, and before the weights change next;
- stall: by how much a save makes the run longer, with what it costs the steps behind it (against steps without saves);
- durable: from the beginning of the save until the checkpoint has its name;
- host, device: peak memory of a process from the save to its end, above what it had just before.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODES = ("disabled", "async", "async_with_pinned_mem")
_MIB = 2**20


def _resident() -> int:
    """Bytes of host memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakSampler:
    """The largest resident size since `reset`, sampled by a thread."""

    def __init__(self) -> None:
        self._peak = _resident()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._peak = max(self._peak, _resident())
            time.sleep(0.002)

    def reset(self) -> None:
        self._peak = _resident()

    @property
    def peak(self) -> int:
        return self._peak


def worker(result: str, argv: list[str]) -> int:
    """`train.py` that writes its figures to `<result>-<rank>.json`."""
    import torch

    import train
    from torchtitan_dmuon.checkpoint import TrainState
    from torchtitan_dmuon.trainer import Trainer

    class Timed(Trainer):
        def train(self) -> None:
            self.sampler = PeakSampler()
            self.began: list[float] = []
            self.saves: list[dict[str, float]] = []
            self.current: dict[str, float] | None = None
            save, wait_staged = self.checkpointer.save, self.checkpointer.wait_staged

            def timed_save(state: TrainState, last: bool = False, stopping: bool = False) -> None:
                begin = time.perf_counter()
                if self.current is None:
                    self.sampler.reset()
                    self.current = {"step": self.step, "host": -_resident(), "device": 0.0, "begin": begin}
                    if self.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats(self.device)
                        self.current["device"] = -torch.cuda.memory_allocated(self.device)
                save(state, stopping=stopping)  # never the last one, which does not run behind the training
                self.current["blocked"] = time.perf_counter() - begin

            def timed_wait() -> None:
                begin = time.perf_counter()
                wait_staged()
                if self.current is not None and "durable" not in self.current:
                    self.current["blocked"] += time.perf_counter() - begin

            self.checkpointer.save, self.checkpointer.wait_staged = timed_save, timed_wait
            super().train()
            self.finish()
            figures = {"began": self.began, "saves": self.saves}
            Path(f"{result}-{self.rank}.json").write_text(json.dumps(figures))

        def finish(self) -> None:
            """Take the figures of the save that has become durable."""
            done, self.current = self.current, None
            if done is not None:
                done["host"] += self.sampler.peak
                if self.device.type == "cuda":
                    done["device"] += torch.cuda.max_memory_allocated(self.device)
                done.setdefault("durable", time.perf_counter() - done["begin"])
                self.saves.append(done)

        def train_step(self, batches: Iterator[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
            folder = self.folder / self.config.checkpoint.folder
            if self.current is not None and (folder / f"step-{self.current['step']}").exists():
                self.finish()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.began.append(time.perf_counter())
            return super().train_step(batches)

    return train.main(argv, Timed)


def run(folder: Path, nproc: int, name: str, arguments: list[str]) -> list[dict]:
    """The figures of every rank."""
    command = [sys.executable, "-m", "torchtitan_dmuon.launch", "--standalone", "--nproc-per-node", str(nproc)]
    out = folder / name
    command += [str(Path(__file__).resolve()), "worker", str(folder / name), "--job.dump_folder", str(out), *arguments]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), **os.environ}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run with {name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    size = sum(path.stat().st_size for path in out.glob("checkpoint/step-*/*"))
    steps = max(1, len(list(out.glob("checkpoint/step-*"))))
    shutil.rmtree(out)
    ranks = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(nproc)]
    return [{**rank, "bytes": size / steps} for rank in ranks]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--interval", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "bench_checkpoint", help="is emptied first")
    options, keys = parser.parse_known_args(argv)
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps = (options.saves + 1) * options.interval + options.interval // 2
    config = [] if "--job.config_file" in keys else ["--job.config_file", "train_configs/debug_model.toml"]
    common = [*config, "--training.steps", str(steps), "--checkpoint.keep_latest_k", "2"]
    common += ["--metrics.log_freq", "100000"]

    plain = run(folder, options.nproc, "none", [*common, *keys, "--checkpoint.enable", "false"])
    step_seconds = statistics.median(
        later - begin for begin, later in zip(plain[0]["began"][2:], plain[0]["began"][3:], strict=False)
    )
    say(f"a step without saves: {1000 * step_seconds:.1f} ms, {options.nproc} processes")
    say(f"{'async_mode':<22} {'blocked ms':>11} {'stall ms':>9} {'durable ms':>11} {'host MiB':>9} {'device MiB':>11}")
    for mode in MODES:
        saving = ["--checkpoint.enable", "true", "--checkpoint.interval", str(options.interval)]
        ranks = run(folder, options.nproc, mode, [*common, *keys, *saving, "--checkpoint.async_mode", mode])
        # Without the first save, and without the one after the last step, which waits for all that is under way.
        saves = [save for rank in ranks for save in rank["saves"][1 : options.saves + 1]]
        stalls = []
        for rank in ranks:
            # From the step of the second save to a few steps after that of the last one that counts.
            begin = 2 * options.interval - 1
            end = min(len(rank["began"]) - 1, (options.saves + 1) * options.interval + 3)
            took = rank["began"][end] - rank["began"][begin]
            stalls.append((took - (end - begin) * step_seconds) / options.saves)
        worst = {key: max(save[key] for save in saves) for key in ("blocked", "durable", "host", "device")}
        say(
            f"{mode:<22} {1000 * worst['blocked']:11.1f} {1000 * max(stalls):9.1f} {1000 * worst['durable']:11.1f} "
            f"{worst['host'] / _MIB:9.1f} {worst['device'] / _MIB:11.1f}"
        )
    say(f"one checkpoint has {ranks[0]['bytes'] / _MIB:.1f} MiB")
    return 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import environment  # noqa: F401

    if sys.argv[1:2] == ["worker"]:
        sys.exit(worker(sys.argv[2], sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
