"""Every family under every parallelism, through the trainer. Llama 3 is the family of all other tests."""

import pytest
import torch
from safetensors.torch import load_file

from models import get_model_spec, model_names
from tests.support.toy import read_checkpoint
from tests.support.training import tiny, train, write_corpus

pytestmark = pytest.mark.dist

FAMILIES = [name for name in model_names() if name != "llama3"]
TENSOR_PARALLEL = {"parallelism__tensor_parallel_degree": 2, "training__global_batch_size": 4}
COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}
VARIANTS = {
    "tensor parallel": TENSOR_PARALLEL,
    "everything dedicated, compiled": {**TENSOR_PARALLEL, **COMPILED, "dmuon__others": "dedicated"},
    "recomputed but for products, compiled": {
        **COMPILED,
        "activation_checkpoint__mode": "selective",
        "activation_checkpoint__selective_ac_option": "op",
    },
    "recomputed, tensor parallel": {**TENSOR_PARALLEL, "activation_checkpoint__mode": "full"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def plain(request, tmp_path_factory):
    """(family, folder, losses) of a run that ends with a HuggingFace folder."""
    folder = tmp_path_factory.mktemp(request.param)
    write_corpus(folder / "corpus")
    options = {"checkpoint__last_save_model_only": True, "checkpoint__last_save_in_hf": True}
    run = train(2, *tiny(folder, model__name=request.param, **options))
    assert run.codes == [0, 0], run.output
    return request.param, folder, [run.steps[step][0] for step in range(1, 5)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_trains_alike(plain, tmp_path, variant):
    family, folder, losses = plain
    options = {"job__dump_folder": tmp_path, "checkpoint__enable": False, **VARIANTS[variant]}
    run = train(2, *tiny(folder, model__name=family, **options))
    assert run.codes == [0, 0], run.output
    assert [run.steps[step][0] for step in range(1, 5)] == pytest.approx(losses, abs=3e-4)
    assert losses[3] < losses[0] - 0.1


def test_a_run_starts_from_the_huggingface_folder_of_another(plain, tmp_path):
    family, folder, _ = plain
    exported = folder / "out/checkpoint/step-4"
    options = {"job__dump_folder": tmp_path, "checkpoint__initial_load_path": exported}
    options |= {"checkpoint__initial_load_in_hf": True, "training__steps": 1, "lr_scheduler__warmup_steps": 0}
    options |= {"optimizer__lr": "1e-30", "optimizer__weight_decay": 0}  # moves nothing that float32 can show
    run = train(2, *tiny(folder, model__name=family, **options, **TENSOR_PARALLEL))
    assert run.codes == [0, 0], run.output
    found, names = read_checkpoint(tmp_path / "checkpoint/step-1"), get_model_spec(family).hf
    weights = load_file(exported / "model.safetensors")
    assert len(weights) > 30
    for name, tensor in weights.items():
        torch.testing.assert_close(found[f"model.{names.from_hf(name)}"], tensor, atol=1e-20, rtol=0)
