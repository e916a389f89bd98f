"""What trainers of others ask of a transformed model (V13)."""

import inspect
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder_xform as tx

import thunder  # isort: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, features, labels=None, *, scale: float = 1.0):
        out = self.linear(features) * scale
        return {"loss": F.mse_loss(out, labels), "logits": out} if labels is not None else {"logits": out}


def compiled(model):
    return thunder.jit(model, transforms=tx.registry.resolve([]))


def test_the_signature_is_that_of_the_users_forward():
    def replaced(self, features, more, labels=None):
        return {"logits": self.linear(features) + more}

    plain, patched = Net(), Net()
    patched.forward = types.MethodType(replaced, patched)
    first, second = compiled(plain), compiled(patched)
    for model, module in ((first, plain), (second, patched)):
        assert inspect.signature(model.forward) == inspect.signature(module.forward)
    assert list(inspect.signature(type(first).forward).parameters) == ["self", "features", "labels", "scale"]
    x = torch.ones(2, 3)
    torch.testing.assert_close(first(x, scale=2.0)["logits"], plain(x, scale=2.0)["logits"])
    torch.testing.assert_close(second(x, 3.0)["logits"], patched(x, 3.0)["logits"])
    assert second.linear.weight is second.get_parameter("linear.weight")


def test_a_transformers_trainer_trains_in_one_process(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(1)
    rows = [{"features": torch.randn(3), "labels": torch.randn(2), "unused": torch.ones(7)} for _ in range(8)]

    def trained(model):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, learning_rate=0.1, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    expected, found = trained(Net()), trained(compiled(Net()))
    assert not torch.equal(expected["linear.weight"], Net().linear.weight)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
