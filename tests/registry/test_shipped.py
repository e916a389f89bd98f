"""The plugins that are published with this package: what `plan` refuses of their options, without importing them."""

from pathlib import Path

import pytest

from thunder_xform.errors import OptionError
from thunder_xform.manifest import Manifest
from thunder_xform.registry import Record, Registry

PLUGINS = Path(__file__).parents[2] / "plugins"
pytestmark = pytest.mark.skipif(not PLUGINS.exists(), reason="the plugins' sources are not beside the tests")


@pytest.fixture(scope="module")
def shipped():
    manifests = [Manifest.read(path) for path in sorted(PLUGINS.glob("*/thunder_xform_*/manifest.toml"))]
    return Registry(Record(name=m.name, distribution=m.name, version="1", manifest=m) for m in manifests)


REFUSED = {
    "lora(r=-1)": "int >= 1",
    "lora(r=0)": "int >= 1",
    "lora(r=True)": "int >= 1",
    "lora(lora_alpha=0)": "float > 0 and < inf",
    "lora(lora_alpha=1e999)": "float > 0 and < inf",
    "lora(lora_dropout=1)": "float >= 0 and < 1",
    "lora(lora_dropout=-0.1)": "float >= 0 and < 1",
    "lora(rank_pattern={'q': 0})": "Mapping[str, int >= 1]",
    "lora(alpha_pattern={'q': -1.0})": "Mapping[str, float > 0 and < inf]",
    "lora(bias='some')": "'none' or 'all' or 'lora_only'",
    "lora(init_lora_weights='zero')": "bool or 'gaussian' or 'pissa'",
    "ddp(bucket_cap_mb=-1)": "float >= 0",
    "ddp(broadcast_from=-1)": "int >= 0 or None",
    "fsdp(zero=1)": "2 or 3",
    "fsdp(prefetch=-1)": "int >= 0",
    "fsdp(broadcast_from=-1)": "int >= 0 or None",
    "fsdp(units='blocks')": "'block' or 'layer' or 'none' or Sequence[str or type]",
    "fsdp(gather_dtype='int8')": "'float32' or 'float16' or 'bfloat16' or 'float64' or None",
    "fsdp(reduce_dtype='float')": "'float32' or 'float16' or 'bfloat16' or 'float64' or None",
    "quant(blocksize=0)": "int >= 1 or None",
    "quant(compute_dtype='int8')": "'float32' or 'float16' or 'bfloat16' or 'float64' or None",
    "aten(operators=('gelo',))": "",
    "qlora + lora(r=0)": "int >= 1",
}


@pytest.mark.parametrize("text", REFUSED)
def test_v22_options_out_of_range_are_refused_by_plan(shipped, text):
    with pytest.raises(OptionError) as caught:
        shipped.plan(text)
    assert str(caught.value).endswith(f" Give {REFUSED[text]}.") or not REFUSED[text]


def test_the_defaults_and_usual_values_are_taken(shipped):
    for text in (
        "lora(r=1, lora_alpha=16, lora_dropout=0, rank_pattern={'q': 2}, layers_to_transform=(0, 1)) + aten",
        "fsdp(zero=2, units=('Block',), prefetch=0, gather_dtype='bfloat16', broadcast_from=None)",
        "ddp(bucket_cap_mb=0) + aten(operators=('relu',)) + quant(blocksize=128)",
    ):
        shipped.plan(text)
