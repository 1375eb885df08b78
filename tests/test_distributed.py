"""What PyTorch is told of the run's process groups."""

from torchtitan_dmuon.config.job_config import Comm
from torchtitan_dmuon.distributed import flight_recorder


def test_flight_recorder(tmp_path):
    """The names are PyTorch's (ProcessGroupNCCL and FlightRecorder)."""
    assert flight_recorder(Comm(trace_buf_size=7, save_traces_folder="a/b", save_traces_file_prefix="r"), tmp_path) == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/a/b/r",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert (tmp_path / "a/b").is_dir()
