from dataclasses import replace

import pytest

from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape

LAYER = LayerShape(
    mixers=(AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25),),
    feed=MlpShape(size=96, activation="silu"),
    norm=NormShape(eps=1e-5),
)


@pytest.mark.parametrize(
    "change", [{"norm_after": True}, {"norm_before": False}, {"branch_scale": 0.5}, {"feed": None}]
)
def test_a_parallel_layer_has_two_sublayers_and_no_other_form(change):
    assert replace(LAYER, parallel="one norm").parallel == "one norm"
    with pytest.raises(AssertionError, match="a parallel layer"):
        replace(LAYER, parallel="one norm", **change)
