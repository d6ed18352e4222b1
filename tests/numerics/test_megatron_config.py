"""Model folders that cannot be trained are refused by name; shard maps cover each tensor once. Starts no process."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hybridflow.errors import ConfigError
from placement.layout import Layout
from tests.data.models import TINY
from workers.megatron.hf_config import Architecture, Rope, check_complete, read_architecture
from workers.megatron.model import check_layout
from workers.megatron.packing import _ranges
from workers.megatron.shard_map import weight_map

LLAMA = {**TINY, "model_type": "llama"}


def folder_with(tmp_path: Path, config: dict, files: tuple[str, ...] = ("model.safetensors",)) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in files:
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' (built: llama, mistral, qwen2, qwen3)"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding-window attention (window 64)"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, change: dict, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_architecture(folder_with(tmp_path, LLAMA | change))
    assert told in str(caught.value)


def test_old_and_new_rotary_keys_mean_the_same(tmp_path: Path) -> None:
    old = read_architecture(folder_with(tmp_path, LLAMA | {"rope_theta": 5e5}))
    new = read_architecture(
        folder_with(tmp_path, LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    )
    assert old == new
    assert old.rope == Rope(5e5)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        check_complete(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"lacks config.json, model.safetensors \(or"):
        check_complete(tmp_path)
    folder_with(tmp_path, LLAMA, files=("model-00001-of-00003.safetensors",))
    names = {f"tensor{i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match="lacks model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Layout(tp=4), "does not divide the model's 2 KV heads"),
        (Layout(tp=8), "8 does not divide the model's 4 attention heads"),
        (Layout(pp=3), "pipeline_model_parallel_size 3 does not divide the model's 2 layers"),
    ],
)
def test_layouts_that_do_not_divide(tmp_path: Path, layout: Layout, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(read_architecture(folder_with(tmp_path, LLAMA)), layout)
    assert told in str(caught.value)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_shard_map_covers_each_tensor_and_each_parameter_once(tp: int) -> None:
    """Brute force: every element of every tensor has one home over the TP ranks, and no two share a place in it."""
    a = Architecture("qwen2", 2, 16, 24, 8, 4, 4, 13, 64, 1e-6, Rope(1e4), False, True, False)
    layer = "decoder.layers.1"
    rows = {f"{layer}.self_attention.linear_qkv.weight": ((8 + 2 * 4) * 4 // tp, 16)}
    rows |= {f"{layer}.self_attention.linear_qkv.bias": ((8 + 2 * 4) * 4 // tp,)}
    rows |= {f"{layer}.self_attention.linear_proj.weight": (16, 32 // tp)}
    rows |= {f"{layer}.mlp.linear_fc1.weight": (48 // tp, 16), f"{layer}.mlp.linear_fc2.weight": (16, 24 // tp)}
    rows |= {"embedding.word_embeddings.weight": (-(-13 // tp), 16), "output_layer.weight": (-(-13 // tp), 16)}
    covered: dict[str, Counter] = {}
    for rank in range(tp):
        places = {name: np.zeros(shape, int) for name, shape in rows.items()}
        for piece in weight_map(a, rows, tp=tp, tp_rank=rank, first_layer=2):
            places[piece.parameter][piece.slices] += 1
            indices = np.ndindex(piece.box.shape)
            covered.setdefault(piece.box.tensor, Counter()).update(
                tuple(np.add(index, piece.box.start).tolist()) for index in indices
            )
        for name, times in places.items():
            assert times.max() <= 1, name
            assert times.all() or name in ("embedding.word_embeddings.weight", "output_layer.weight"), name
    shapes = {"q": (32, 16), "k": (16, 16), "v": (16, 16)}
    expected = {f"model.layers.3.self_attn.{part}_proj.weight": shape for part, shape in shapes.items()}
    expected |= {f"model.layers.3.self_attn.{part}_proj.bias": shape[:1] for part, shape in shapes.items()}
    expected |= {"model.layers.3.self_attn.o_proj.weight": (16, 32), "model.layers.3.mlp.down_proj.weight": (16, 24)}
    expected |= {f"model.layers.3.mlp.{part}_proj.weight": (24, 16) for part in ("gate", "up")}
    expected |= {"model.embed_tokens.weight": (13, 16), "lm_head.weight": (13, 16)}
    assert covered.keys() == expected.keys()
    for name, shape in expected.items():
        assert covered[name] == Counter(np.ndindex(shape)), name


def test_ranges() -> None:
    assert _ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]


def test_the_engine_imports_nothing_that_it_does_not_need() -> None:
    """Each of these would add seconds to the start of every process."""
    heavy = ("transformers", "vllm", "wandb", "tensorboard", "torch._inductor.compile_fx")
    code = f"import sys, workers.megatron.engine; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
