import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.layers import apply_formats, named_weights
from everycast.relax_models.config import DecoderConfig
from everycast.relax_models.decoder import DecoderForCausalLM
from everycast.relax_models.llama import from_hf
from everycast.relax_models.name_map import EMBEDDING, HEAD, parameter_shapes

Q4 = TensorFormat("float16", 4, zero_point=7)
Q8 = TensorFormat("float16", 8, zero_point=127)


def config(**changes: object) -> DecoderConfig:
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    return from_hf({**values, **changes})


def model(**changes: object) -> DecoderForCausalLM:
    return DecoderForCausalLM(config(**changes), kv_dtype="float16")


@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_is_found_by_its_parameter_name(tied: bool) -> None:
    shapes = parameter_shapes(config(tie_word_embeddings=tied))
    matrices = {name: tuple(shape) for name, shape in shapes.items() if len(shape) == 2}
    found = named_weights(model(tie_word_embeddings=tied))
    assert set(found) == set(matrices)
    assert (HEAD in found) != tied
    for name, layer in found.items():
        assert (layer.n, layer.k) == matrices[name]


def test_formats_change_the_parameters() -> None:
    made = model()
    formats = dict.fromkeys(named_weights(made), Q4) | {EMBEDDING: Q8, HEAD: Q8}
    apply_formats(made, formats)
    parameters = {name: (p.shape, p.dtype) for name, p in made.named_parameters()}
    for name, layer in named_weights(made).items():
        assert layer.format == formats[name]
        prefix = name.removesuffix("weight")
        for part, (shape, dtype) in formats[name].parts(layer.n, layer.k).items():
            found_shape, found_dtype = parameters.pop(prefix + part)
            assert (tuple(int(s) for s in found_shape), found_dtype) == (shape, dtype)
    assert not [name for name in parameters if ".q_" in name or name in formats]


def test_a_matrix_without_a_format_is_named() -> None:
    made = model()
    formats = dict.fromkeys(named_weights(made), Q4)
    del formats[HEAD]
    with pytest.raises(KeyError, match="lm_head"):
        apply_formats(made, formats)
