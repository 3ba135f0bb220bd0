"""Where graphs run: the device, and an environment in which two packages fight over one module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from hivlp.models.errors import ArtifactError, MissingExtra
from hivlp.models.runtime.providers import (
    ConflictingDistributions,
    check_distributions,
    choose_providers,
    open_session,
)
from tests.tiny_artifact import make_tiny_artifact

CUDA_OFFERED = "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def site(folder: Path, *distributions: str) -> list[str]:
    """A folder in which these distributions are installed, as far as their metadata goes."""
    for name in distributions:
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    return [str(folder)]


@pytest.mark.parametrize(
    ("module", "pair"),
    [
        ("onnxruntime", ("onnxruntime", "onnxruntime-gpu")),
        ("faiss", ("faiss-cpu", "faiss-gpu")),
        ("faiss", ("faiss-cpu", "faiss-gpu-cu12")),
        ("faiss", ("faiss-gpu", "faiss-gpu-cuvs")),
    ],
)
def test_two_distributions_of_one_module_are_refused(
    tmp_path: Path, module: str, pair: tuple[str, str]
) -> None:
    with pytest.raises(ConflictingDistributions, match="pip uninstall") as caught:
        check_distributions(site(tmp_path, *pair, "numpy"))
    assert (caught.value.module, caught.value.distributions) == (module, pair)


@pytest.mark.parametrize("names", [(), ("onnxruntime", "faiss-cpu"), ("onnxruntime-gpu",)])
def test_one_distribution_of_each_is_fine(tmp_path: Path, names: tuple[str, ...]) -> None:
    check_distributions(site(tmp_path, *names))


def test_this_environment_is_fine() -> None:
    check_distributions()


def test_cpu_is_always_the_cpu() -> None:
    assert choose_providers("cpu") == ("CPUExecutionProvider",)


def test_auto_takes_what_is_offered() -> None:
    assert choose_providers("auto")[-1] == "CPUExecutionProvider"
    assert (len(choose_providers("auto")) == 2) == CUDA_OFFERED


@pytest.mark.skipif(CUDA_OFFERED, reason="this onnxruntime has CUDA")
def test_cuda_names_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingExtra, match=r"hivlp\[gpu\]"):
        choose_providers("cuda")


def test_absent_onnxruntime_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match=r"hivlp\[cpu\]") as caught:
        choose_providers("cpu")
    assert caught.value.package == "onnxruntime"


@pytest.mark.parametrize("content", [b"", b"not a graph", bytes(100)])
def test_file_that_is_no_graph_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stage1.onnx").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"stage1\.onnx"):
        open_session(tmp_path, "stage1.onnx", threads=1, providers=choose_providers("cpu"))


def test_session_keeps_to_its_threads(tmp_path: Path) -> None:
    make_tiny_artifact(tmp_path)
    session = open_session(
        tmp_path, "text/stage1.onnx", threads=2, providers=choose_providers("cpu")
    )
    options = session.get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.inter_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_session_keeps_no_memory_for_every_shape_it_has_seen(tmp_path: Path) -> None:
    make_tiny_artifact(tmp_path)
    cpu = choose_providers("cpu")
    session = open_session(tmp_path, "text/stage1.onnx", threads=1, providers=cpu)
    options = session.get_session_options()
    assert not options.enable_mem_pattern
    assert not options.enable_cpu_mem_arena


def test_importing_the_runtime_imports_neither_onnxruntime_nor_torch() -> None:
    code = (
        "import sys, hivlp.models.runtime.loading\n"
        "print([m for m in ('onnxruntime', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
