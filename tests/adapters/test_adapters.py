"""The adapters give what the predictor gives, in the form that each library expects, and leave the model as it was."""

import pickle
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import latedrop
from frameworks import hugging_face, lightning_module, needs, padded, trainer
from latedrop.adapters.huggingface import predict_with
from latedrop.adapters.lightning import predict_callback
from latedrop.errors import ArgumentError, DataError
from quick import quick
from rounding import assert_same_up_to_rounding, rounding


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1] * x[:, 1:2]


def calibrated(model: nn.Module, **options: Any) -> latedrop.Predictor:
    return quick([0.1], 10)(model, rows(64), **options)


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1))


@pytest.fixture
def untouched(net: nn.Module) -> Iterator[None]:
    """State, flags, hooks and attributes of `net` are the same after the test."""
    state, flags = deepcopy(net.state_dict()), [module.training for module in net.modules()]
    attributes = [set(vars(module)) for module in net.modules()]
    yield
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == flags
    assert [set(vars(module)) for module in net.modules()] == attributes
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


LIGHTNING = [
    needs("lightning"),
    # Lightning's own: it suggests workers for small loaders, and calls what torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec"),
]


class TestLightning:
    pytestmark = LIGHTNING

    @pytest.mark.usefixtures("untouched")
    @pytest.mark.parametrize("method", ["sample", "linear", "propagate"])
    @pytest.mark.parametrize("inner", [False, True])
    def test_predict_gives_dicts(self, net: nn.Module, method: Any, inner: bool) -> None:
        module, (x, y) = lightning_module(net), rows(50, 1)
        uq = calibrated(net if inner else module, method=method)
        before = set(vars(module))
        batches = trainer(predict_callback(uq, level=0.8)).predict(module, DataLoader(TensorDataset(x, y), 20))
        assert [len(batch["mean"]) for batch in batches] == [20, 20, 10]
        expected = uq.predict(x).to_dict(0.8)
        assert expected["std"].min() > 0
        for name, value in expected.items():
            assert_same_up_to_rounding(torch.cat([batch[name] for batch in batches]), value)
        assert {name for name in set(vars(module)) - before if "predict" in name} == set()

    def test_plain_batches_and_several_loaders(self, net: nn.Module) -> None:
        module, (x, _) = lightning_module(net), rows(30, 1)
        uq = calibrated(module)
        loaders = [DataLoader(x, batch_size=20), DataLoader(x[:5], batch_size=5)]
        batches = trainer(predict_callback(uq, level=0.5)).predict(module, loaders)
        assert [[len(batch["mean"]) for batch in part] for part in batches] == [[20, 10], [5]]
        assert_same_up_to_rounding(batches[1][0]["low"], uq.predict(x[:5]).interval(0.5)[0])

    def test_unpack_says_what_the_inputs_are(self, net: nn.Module) -> None:
        class Backwards(type(lightning_module(net))):  # type: ignore[misc]
            def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self(batch[1])

        module, (x, y) = Backwards(), rows(10, 1)
        uq = calibrated(module)
        loader = DataLoader(TensorDataset(y, x), batch_size=10)
        (actual,) = trainer(predict_callback(uq, unpack=lambda batch: batch[1])).predict(module, loader)
        assert_same_up_to_rounding(actual["std"], uq.predict(x).std)

    def test_it_runs_twice_and_after_an_error(self, net: nn.Module) -> None:
        module, (x, _) = lightning_module(net), rows(10)
        run = trainer(predict_callback(calibrated(module)))
        loader = DataLoader(x, batch_size=5)
        bad = DataLoader(torch.cat([x[:5], x[5:] * torch.inf]), batch_size=5)
        first = run.predict(module, loader)
        with pytest.raises(DataError, match="expected finite inputs"):
            run.predict(module, bad)
        again = run.predict(module, loader)
        assert len(again) == 2
        # The same call on the same batch.
        assert all(torch.equal(a["std"], b["std"]) for a, b in zip(first, again, strict=True))

    def test_a_predictor_of_another_model_is_refused(self, net: nn.Module) -> None:
        module = lightning_module(net)
        run = trainer(predict_callback(calibrated(deepcopy(net))))
        with pytest.raises(ArgumentError, match="expected a predictor of Module or of a network inside it"):
            run.predict(module, DataLoader(rows(10)[0], batch_size=5))
        with pytest.raises(ArgumentError, match=r"expected a probability inside \(0, 1\); found 1\.5"):
            predict_callback(calibrated(net), level=1.5)

    def test_nothing_is_kept_where_nothing_is_returned(self, net: nn.Module) -> None:
        module = lightning_module(net)
        callback = predict_callback(calibrated(net), level=0.5)
        loader = DataLoader(rows(10)[0], batch_size=5)
        assert trainer(callback).predict(module, loader, return_predictions=False) is None
        assert callback._predictions == []
        assert pickle.loads(pickle.dumps(callback)).level == 0.5


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "label": float(row.float().mean()) / 20} for row in tokens]


@needs("transformers", "accelerate")
class TestHuggingFace:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Any:
        def mse(both: Any) -> dict[str, float]:
            return {"mse": float(((both.predictions[:, 0] - both.label_ids) ** 2).mean())}

        return hugging_face(tmp_path, compute_metrics=mse)

    @staticmethod
    def calibrated(run: Any, **options: Any) -> latedrop.Predictor:
        options = {"readout": "logits", **options}
        return quick([0.05], 10)(run.model, run.get_eval_dataloader(texts(48)), **options)

    @pytest.mark.parametrize("method", ["sample", "linear"])
    def test_it_gives_the_trainers_fields_and_more(self, run: Any, method: Any) -> None:
        uq, test = self.calibrated(run, method=method), texts(40, 1)
        state = deepcopy(run.model.state_dict())
        output, plain = predict_with(run, test, uq, level=0.8), run.predict(test)
        predictions, label_ids, metrics = output[:3]
        assert predictions.shape == plain.predictions.shape == (40, 1)
        np.testing.assert_array_equal(label_ids, plain.label_ids)
        if method == "linear":  # which keeps the model's own prediction
            assert_same_up_to_rounding(predictions, plain.predictions)
            assert metrics["test_mse"] == pytest.approx(plain.metrics["test_mse"], rel=rounding())
        p = uq.predict({name: value for name, value in padded(test).items() if name != "labels"})
        for ours, value in zip((predictions, *output[3:6]), p.to_dict(0.8).values(), strict=True):
            assert_same_up_to_rounding(ours, value)
        target = torch.tensor([row["label"] for row in test])[:, None]
        assert metrics["test_nll"] == pytest.approx(
            float(latedrop.metrics.nll(p.mean, p.variance, target)), rel=rounding()
        )
        coverage = latedrop.metrics.coverage(p.mean, p.variance, target, level=0.8)
        assert metrics["test_coverage"] == pytest.approx(float(coverage))
        assert all(torch.equal(state[name], value) for name, value in run.model.state_dict().items())
        bare = predict_with(run, [{"input_ids": row["input_ids"]} for row in test[:5]], uq)
        assert (bare.label_ids, bare.metrics, bare.low.shape, bare.std.shape) == (None, {}, (5, 1), (5, 1))

    def test_novelty_and_the_prefix_of_metrics(self, tmp_path: Path) -> None:
        run, test = hugging_face(tmp_path), texts(12, 1)
        uq = self.calibrated(run, method="terms")
        p = uq.predict({name: value for name, value in padded(test).items() if name != "labels"})
        output = predict_with(run, test, uq, metric_key_prefix="shifted")
        assert_same_up_to_rounding(output.novelty, p.novelty)
        assert set(output.metrics) == {"shifted_nll", "shifted_coverage"}

    def test_what_cannot_be_right_is_refused(self, run: Any, net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ArgumentError, match="expected a predictor of the trainer's model; found one of another"):
            predict_with(run, texts(5), calibrated(net))
        uq = self.calibrated(run)
        with pytest.raises(DataError, match="expected at least one row to predict; found none"):
            predict_with(run, [], uq)
        monkeypatch.setattr(type(run.args), "world_size", 2)
        with pytest.raises(ArgumentError, match="expected a trainer that runs in one process; found 2, each with"):
            predict_with(run, texts(5), uq)
