"""What Newton-Schulz says it runs on, and which kernel it takes."""

import json

import pytest
import torch

import dmuon
from torchtitan_dmuon.dmuon.kernels import select
from torchtitan_dmuon.dmuon.kernels.select import check_kernel, select_kernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("DMUON_NS_KERNEL", raising=False)


def test_status_and_line_agree():
    status = dmuon.get_backend_status()
    assert json.loads(json.dumps(status)) == status
    assert status["cpu"] == {"name": "cpu", "available": True, "reason": "torch.matmul in float32"}
    assert status["cublas"]["available"] == torch.cuda.is_available()
    assert status.keys() == {"cublas", "cpu", "triton", "quack"}
    assert all(entry["reason"] for entry in status.values())
    kernel = "cpu"
    if torch.cuda.is_available():
        kernel = "triton" if status["triton"]["available"] else "cublas"
    assert dmuon.get_ns_backend().startswith(f"Gram NS · kernel={kernel} (")


def test_the_variable_overrides_auto_alone(monkeypatch):
    monkeypatch.setenv("DMUON_NS_KERNEL", "cublas")
    assert check_kernel("auto") == dmuon.NewtonSchulz().kernel == "cublas"
    monkeypatch.setenv("DMUON_NS_KERNEL", "cutlass")
    known = r"\('auto', 'cublas', 'triton', 'quack'\)"
    with pytest.raises(ValueError, match=f"DMUON_NS_KERNEL must be one of {known}, got 'cutlass'"):
        dmuon.NewtonSchulz()
    assert dmuon.NewtonSchulz(kernel="cublas").kernel == "cublas"
    with pytest.raises(ValueError, match=f"kernel must be one of {known}, got 'cute'"):
        dmuon.NewtonSchulz(kernel="cute")


def test_auto_on_the_cpu_is_pytorch():
    assert select_kernel("auto", CPU, 4096, 4096).name == "cublas"


def test_auto_on_a_gpu_is_a_rule_on_the_shape(monkeypatch):
    monkeypatch.setattr(select.TritonKernel, "unavailable", lambda *_: None)
    device = torch.device("cuda")
    for shape, expected in {
        (4096, 14336): "triton",
        (8192, 3072): "triton",
        (512, 512): "triton",
        (504, 4096): "cublas",  # small
        (1000, 2999): "cublas",  # rows not aligned
        (2999, 1000): "cublas",
    }.items():
        assert select_kernel("auto", device, *shape).name == expected
    assert select_kernel("cublas", device, 4096, 4096).name == "cublas"


def test_a_kernel_asked_for_by_name_is_not_replaced(monkeypatch):
    with pytest.raises(RuntimeError, match="'quack' cannot be used: quack-kernels does not run on cpu"):
        dmuon.NewtonSchulz(kernel="quack")(torch.randn(4, 8))
    monkeypatch.setattr(select, "symmetric", None)
    monkeypatch.setattr(select, "_NO_TRITON", "Triton cannot be imported: no module", raising=False)
    with pytest.raises(ValueError, match="kernel='triton' cannot be used: Triton cannot be imported"):
        dmuon.NewtonSchulz(kernel="triton")
    with pytest.raises(RuntimeError, match="'triton' cannot be used: Triton cannot be imported"):
        select_kernel("triton", CPU, 4096, 4096)


def test_where_triton_does_not_run(monkeypatch):
    """The kernels asked for on a CPU, unless they are interpreted there."""
    symmetric = pytest.importorskip("torchtitan_dmuon.dmuon.kernels.symmetric", exc_type=ImportError)
    # The answer is remembered: asked anew, without what the fixture will put back.
    monkeypatch.setattr(symmetric, "_INTERPRETED", False)
    monkeypatch.setattr(symmetric, "unavailable", symmetric.unavailable.__wrapped__)
    with pytest.raises(RuntimeError, match="'triton' cannot be used: Triton does not run on cpu"):
        dmuon.NewtonSchulz(kernel="triton")(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="Triton does not run on cpu"):
        symmetric.symmetric_product(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
