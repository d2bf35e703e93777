"""Any decoder of the library, from its own key names; what it would ignore is an error."""

import math
from pathlib import Path

import pytest
import torch

from keepstep.errors import UsageError
from keepstep.tasks.language.config import ModelConfig
from keepstep.tasks.language.model import build_decoder, router_loss_weight
from tests.helpers.language import SETTINGS

ROTARY = {name: value for name, value in SETTINGS.items() if name != "attention_dropout"}
DECODERS = {
    "llama": dict(SETTINGS),
    "qwen3": {**ROTARY, "head_dim": 8},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "mixtral": {**ROTARY, "num_local_experts": 4},
    "olmo2": dict(ROTARY),
    # An encoder that can be a decoder: it must not see the tokens that it is to predict.
    "bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 32},
}  # fmt: skip


def build(architecture="llama", *, vocab_size=64, sequence_length=8, settings=None, **more):
    config = ModelConfig(
        architecture=architecture,
        settings=dict(DECODERS.get(architecture, {}) if settings is None else settings),
        **{name: more.pop(name) for name in ("pretrained", "attention") if name in more},
    )
    torch.manual_seed(0)
    return build_decoder(config, vocab_size=vocab_size, sequence_length=sequence_length, **more)


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_prediction_does_not_depend_on_later_tokens(architecture):
    model = build(architecture).eval()
    ids = torch.arange(16).reshape(2, 8)
    changed = ids.clone()
    changed[:, 5:] += 20
    with torch.no_grad():
        one, two = (model(input_ids=i, use_cache=False).logits for i in (ids, changed))
    assert one.shape == (2, 8, 64)
    torch.testing.assert_close(one[:, :5], two[:, :5])
    assert not torch.allclose(one[:, 5:], two[:, 5:])


def test_the_same_random_numbers_build_the_same_model():
    one, two = build().state_dict(), build().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_vocabulary_is_that_of_the_data_unless_the_settings_have_a_larger_one():
    assert build().get_input_embeddings().num_embeddings == 64
    larger = build(settings={**SETTINGS, "vocab_size": 70})
    assert larger.get_input_embeddings().num_embeddings == 70
    with pytest.raises(UsageError, match="vocabulary has 60 tokens, the data's has 64"):
        build(settings={**SETTINGS, "vocab_size": 60})


def test_the_cache_of_generation_is_off_and_dropout_is_on():
    model = build()
    assert model.config.use_cache is False
    ids = torch.arange(16).reshape(2, 8)
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden_sise": 3}, "no key 'hidden_sise'; did you mean `hidden_size`"),
        ({"hidden_size": "abc"}, "hidden_size"),
        ({"hidden_size": 15}, "not a multiple of the number of attention"),
        ({"num_attention_heads": 0}, "llama"),
        ({"hidden_size": -4}, "negative dimension"),
        ({"num_hidden_layers": 1.5}, "expected int, got float"),
        ({"hidden_act": "nope"}, "nope"),
        ({"max_position_embeddings": 4}, r"less than data.sequence_length \(8\)"),
    ],
)
def test_settings_that_the_library_refuses_or_would_ignore_are_errors(settings, said):
    with pytest.raises(UsageError, match=said):
        build(settings={**SETTINGS, **settings})


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "initializer_range"])
def test_the_librarys_own_and_older_key_names_are_taken(key):
    model = build(settings={**SETTINGS, key: 0.5 if key != "rope_theta" else 5000.0})
    if key == "rope_theta":
        assert model.config.rope_parameters["rope_theta"] == 5000.0
    else:
        assert getattr(model.config, key) == 0.5


def test_an_unknown_architecture_or_attention_is_an_error():
    with pytest.raises(UsageError, match="nope"):
        build("nope")
    with pytest.raises(UsageError, match="nope"):
        build(attention="nope")


def test_a_mixture_reports_the_loss_of_its_router_with_its_weight():
    model = build("mixtral", settings={**DECODERS["mixtral"], "router_aux_loss_coef": 0.5})
    ids = torch.arange(16).reshape(2, 8)
    assert math.isfinite(model(input_ids=ids).aux_loss.item())
    assert router_loss_weight(model) == 0.5
    assert router_loss_weight(build()) == 0.0


def test_recomputed_activations_give_the_same_gradients():
    settings = {**ROTARY, "num_hidden_layers": 2}
    plain, recomputed = (
        build(settings=settings, activation_checkpointing=on) for on in (False, True)
    )
    ids = torch.arange(16).reshape(2, 8)
    gradients = []
    for model in (plain, recomputed):
        model.train()
        model(input_ids=ids).logits.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert any(getattr(m, "gradient_checkpointing", False) for m in recomputed.modules())
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_pretrained_folder_gives_its_weights_and_its_settings_can_be_overridden(tmp_path: Path):
    first = build()
    first.save_pretrained(tmp_path)
    again = build(pretrained=str(tmp_path), settings={"attention_dropout": 0.7})
    saved, loaded = first.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert again.config.attention_dropout == 0.7
    assert again.config.use_cache is False
    with pytest.raises(UsageError, match="attention_dropuot"):
        build(pretrained=str(tmp_path), settings={"attention_dropuot": 0.7})


def test_a_pretrained_folder_that_is_missing_or_broken_is_an_error(tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        build(pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be loaded"):
        build(pretrained=str(tmp_path))


NEOX = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("architecture", "key", "settings"),
    [
        ("llama", "num_attention_heads", {**SETTINGS, "num_key_value_heads": 2}),
        ("llama", "num_key_value_heads", {**SETTINGS, "num_attention_heads": 4}),
        ("gpt_neox", "num_attention_heads", NEOX),
    ],
)
def test_heads_that_tensor_parallel_ranks_cannot_share_are_an_error(architecture, key, settings):
    assert build(architecture, settings={**settings, key: 4}, tp=2)
    said = rf"distributed.tp \(4\) does not divide model.{key} \(2\)"
    with pytest.raises(UsageError, match=said):
        build(architecture, settings={**settings, key: 2}, tp=4)


def test_heads_that_no_rank_has_of_its_own_may_be_any_number():
    """Phi3's plan gathers them before they part."""
    assert build("phi3", settings={**SETTINGS, "pad_token_id": 0}, tp=2)
