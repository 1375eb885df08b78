"""What Newton-Schulz says it runs on."""

import json

import torch

import dmuon


def test_status_and_line_agree():
    status = dmuon.get_backend_status()
    assert json.loads(json.dumps(status)) == status
    assert status["cpu"] == {"name": "cpu", "available": True, "reason": "torch.matmul in float32"}
    assert status["cublas"]["available"] == torch.cuda.is_available()
    kernel = "cublas" if torch.cuda.is_available() else "cpu"
    assert dmuon.get_ns_backend().startswith(f"Gram NS · kernel={kernel} (")
