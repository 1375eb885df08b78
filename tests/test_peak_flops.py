"""Peak FLOP/s by the names that drivers report."""

import logging

import pytest
import torch

from torchtitan_dmuon.peak_flops import peak_flops, peak_of


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H800", 989),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1300),
        ("AMD Instinct MI325X", 1300),
        ("AMD Instinct MI355X", 2500),
    ],
)
def test_peak_of_known_devices(name, tflops):
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H100",  # which of the three forms is not said
        "NVIDIA L40",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "AMD Instinct MI300A",
    ],
)
def test_no_peak_is_guessed(name):
    assert peak_flops(name) is None


def test_the_user_knows_better_and_the_unknown_is_said(caplog):
    caplog.set_level(logging.INFO, logger="torchtitan_dmuon")
    assert peak_of(torch.device("cpu"), 1.5) == 1.5e12 and not caplog.messages
    assert peak_of(torch.device("cpu"), None) is None
    told = "The peak FLOP/s of the CPU are not known: MFU is not shown (metrics.peak_tflops sets them)"
    assert caplog.messages == [told]
