"""The adapters give what the predictor gives, in the form that each library expects, and leave the model as it was."""

import pickle
import warnings
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
from architectures import missing
from latedrop.adapters.huggingface import predict_with
from latedrop.adapters.lightning import predict_callback
from latedrop.adapters.sklearn import LatedropRegressor
from latedrop.errors import ArgumentError, DataError, LatedropError
from quick import quick
from rounding import assert_same_up_to_rounding, rounding

NAMES = ["age", "bmi", "pressure"]


def needs(*libraries: str) -> pytest.MarkDecorator:
    absent = missing("torchvision", *libraries) if set(libraries) & {"lightning"} else missing(*libraries)
    return pytest.mark.skipif(bool(set(absent) & set(libraries)), reason=f"not installed: {', '.join(libraries)}")


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1] * x[:, 1:2]


def calibrated(model: nn.Module, **options: Any) -> latedrop.Predictor:
    found: latedrop.Predictor = quick([0.1], 10)(model, rows(64), **options)
    return found


@pytest.fixture
def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
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


class AnyWidth(nn.Module):
    """Takes tables of any width, as scikit-learn's checks have many."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Conv1d(1, 20, 1), nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.each(x[:, None]).relu().mean(2))


# What scikit-learn's checks ask for and a network that is trained already does not give.
NOT_APPLICABLE = {
    "check_estimators_unfitted": "it is fitted from the start",
    "check_fit_check_is_fitted": "it is fitted from the start",
    "check_n_features_in": "it knows the number of columns before fit",
    "check_n_features_in_after_fitting": "the network of this test takes any number",
    "check_estimators_overwrite_params": "compares hashes, and a copy of a torch module has another hash",
    "check_regressors_train": "asks for a good score after fit, which learns nothing",
    "check_regressor_multioutput": "fits several targets, and the network has one output",
    "check_array_api_input": "skipped by scikit-learn unless an environment variable is set",
}


@needs("sklearn")
def test_what_applies_of_scikit_learns_checks() -> None:
    from sklearn.utils.estimator_checks import check_estimator

    torch.manual_seed(0)
    regressor = LatedropRegressor(calibrated(AnyWidth()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(regressor, on_fail=None)
    status = {result["check_name"]: result["status"] for result in results}
    assert {name for name, found in status.items() if found != "passed"} <= set(NOT_APPLICABLE)
    passed = [name for name, found in status.items() if found == "passed"]
    assert len(passed) > 40
    assert {"check_estimator_cloneable", "check_dict_unchanged", "check_methods_subset_invariance"} <= set(passed)


@needs("sklearn")
@pytest.mark.usefixtures("untouched")
def test_a_regressor_gives_arrays(net: nn.Module) -> None:
    uq, x = calibrated(net), rows(30, 1)[0]
    regressor, p = LatedropRegressor(uq), uq.predict(x)
    mean, std, low, high = regressor.predict(x.numpy(), return_std=True, return_interval=0.8)
    assert isinstance(mean, np.ndarray)
    for ours, theirs in zip((mean, std, low, high), (p.mean, p.std, *p.interval(0.8)), strict=True):
        assert_same_up_to_rounding(ours, theirs[:, 0].numpy())
    assert_same_up_to_rounding(regressor.predict(x.numpy()), mean)
    assert [part.shape for part in regressor.predict(x.numpy(), return_std=True)] == [(30,)] * 2
    assert [part.shape for part in regressor.predict(x.numpy(), return_interval=0.9)] == [(30,)] * 3
    assert_same_up_to_rounding(regressor.predict(np.zeros((2, 3), int)), regressor.predict(np.zeros((2, 3))))


@needs("sklearn")
def test_several_outputs_stay_columns() -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2)), rows(64)
    uq = latedrop.calibrate(model, (x, y.repeat(1, 2)), method=latedrop.Sampling(rates=[0.1], draws=10), progress=False)
    assert [part.shape for part in LatedropRegressor(uq).predict(x.numpy(), return_std=True)] == [(64, 2)] * 2


@needs("sklearn")
@pytest.mark.usefixtures("untouched")
def test_pipelines_scores_clones_and_pickles(net: nn.Module) -> None:
    from sklearn.base import clone, is_regressor
    from sklearn.metrics import r2_score
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = (part.numpy() for part in rows(40, 1))
    regressor = LatedropRegressor(calibrated(net))
    scaler = StandardScaler().fit(x)
    pipeline = make_pipeline(scaler, regressor)
    mean, std = pipeline.predict(x, return_std=True)
    assert_same_up_to_rounding(mean, regressor.predict(scaler.transform(x)))
    assert std.shape == (40,)
    assert pipeline.fit(x, y[:, 0]).score(x, y[:, 0]) == pytest.approx(r2_score(y[:, 0], mean))
    scores = cross_val_score(regressor, x, y[:, 0], cv=4)
    assert scores[0] == pytest.approx(regressor.score(x[:10], y[:10, 0]))
    twin = clone(regressor)
    assert is_regressor(twin)
    assert twin is not regressor
    assert twin.predictor is regressor.predictor
    named = twin.set_params(feature_names=NAMES).get_params()
    assert named == {"predictor": regressor.predictor, "feature_names": NAMES}
    # A pickle keeps every bit, and the batch is the same.
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(regressor)).predict(x), regressor.predict(x))


@needs("sklearn", "pandas")
def test_columns_are_counted_and_named(net: nn.Module) -> None:
    import pandas
    from sklearn.exceptions import NotFittedError

    x = rows(8)[0].numpy()
    regressor = LatedropRegressor(calibrated(net), feature_names=NAMES)
    table = pandas.DataFrame(x, columns=NAMES)
    nameless = LatedropRegressor(regressor.predictor)
    for values in (table, x):
        assert_same_up_to_rounding(regressor.predict(table), nameless.predict(values))
    with pytest.raises(ValueError, match="feature names should match"):
        regressor.predict(table[NAMES[::-1]])
    with pytest.raises(ValueError, match="X has 2 features, but LatedropRegressor is expecting 3"):
        nameless.predict(x[:, :2])
    with pytest.raises(ValueError, match="could not convert string"):
        regressor.predict(table.assign(bmi="low"))
    with pytest.raises(ValueError, match="contains NaN"):
        nameless.predict(np.full((2, 3), np.nan))
    with pytest.raises(NotFittedError):
        LatedropRegressor().predict(x)
    assert regressor.n_features_in_ == 3
    assert regressor.feature_names_in_.tolist() == NAMES
    bare = LatedropRegressor(calibrated(AnyWidth()))
    assert not hasattr(bare, "n_features_in_")
    assert not hasattr(bare, "feature_names_in_")
    normed = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1))
    assert LatedropRegressor(calibrated(nn.DataParallel(normed))).n_features_in_ == 3


def test_an_absent_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop.adapters.sklearn.validate_data", None)
    with pytest.raises(LatedropError, match=r"expected scikit-learn 1\.6 or newer; not found\. Run: pip install"):
        LatedropRegressor()


LIGHTNING = [
    needs("lightning"),
    # Lightning's own: it suggests workers for small loaders, and calls what torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec"),
]


def lightning_module(net: nn.Module) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            if isinstance(batch, list):
                batch = batch[0]
            return self(batch)

    return Module()


def trainer(*callbacks: Any) -> Any:
    import lightning.pytorch as pl

    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", callbacks=[*callbacks], enable_progress_bar=False, **quiet)


class TestLightning:
    pytestmark = LIGHTNING

    @pytest.mark.usefixtures("untouched")
    @pytest.mark.parametrize("method", ["sample", "linear", "propagate"])
    @pytest.mark.parametrize("inner", [False, True])
    def test_predict_gives_dicts(self, net: nn.Module, method: Any, inner: bool) -> None:
        module, (x, y) = lightning_module(net), rows(50, 1)
        uq = calibrated(net if inner else module, method=method)
        before = set(vars(module))
        found = trainer(predict_callback(uq, level=0.8)).predict(module, DataLoader(TensorDataset(x, y), batch_size=20))
        assert [len(batch["mean"]) for batch in found] == [20, 20, 10]
        expected = uq.predict(x).to_dict(0.8)
        assert expected["std"].min() > 0
        for name, value in expected.items():
            assert_same_up_to_rounding(torch.cat([batch[name] for batch in found]), value)
        assert {name for name in set(vars(module)) - before if "predict" in name} == set()

    def test_plain_batches_several_loaders_and_predictions(self, net: nn.Module) -> None:
        module, (x, _) = lightning_module(net), rows(30, 1)
        uq = calibrated(module)
        loaders = [DataLoader(x, batch_size=20), DataLoader(x[:5], batch_size=5)]
        found = trainer(predict_callback(uq, as_dict=False)).predict(module, loaders)
        assert [[type(batch) for batch in part] for part in found] == [[latedrop.Prediction] * 2, [latedrop.Prediction]]
        assert_same_up_to_rounding(found[1][0].interval(0.5)[0], uq.predict(x[:5]).interval(0.5)[0])

    def test_unpack_says_what_the_inputs_are(self, net: nn.Module) -> None:
        class Backwards(type(lightning_module(net))):  # type: ignore[misc]
            def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self(batch[1])

        module, (x, y) = Backwards(), rows(10, 1)
        uq = calibrated(module)
        loader = DataLoader(TensorDataset(y, x), batch_size=10)
        (found,) = trainer(predict_callback(uq, unpack=lambda batch: batch[1])).predict(module, loader)
        assert_same_up_to_rounding(found["std"], uq.predict(x).std)

    def test_nothing_is_kept_where_nothing_is_returned(self, net: nn.Module) -> None:
        module = lightning_module(net)
        callback = predict_callback(calibrated(module))
        loader = DataLoader(rows(10)[0], batch_size=5)
        assert trainer(callback).predict(module, loader, return_predictions=False) is None
        assert callback._found == []

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
        with pytest.raises(
            ArgumentError, match="expected a predictor of Module or of a network inside it; found one of"
        ):
            run.predict(module, DataLoader(rows(10)[0], batch_size=5))
        with pytest.raises(ArgumentError, match=r"expected a probability inside \(0, 1\); found 1\.5"):
            predict_callback(calibrated(net), level=1.5)

    def test_the_callback_is_lightnings_and_can_be_pickled(self, net: nn.Module) -> None:
        import lightning.pytorch as pl

        callback = predict_callback(calibrated(net), level=0.5)
        assert isinstance(callback, pl.Callback)
        assert pickle.loads(pickle.dumps(callback)).settings == callback.settings


def test_an_absent_lightning_is_named(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    monkeypatch.setattr("latedrop.adapters.lightning.find_spec", lambda name: None)
    with pytest.raises(LatedropError, match=r"expected lightning; it is not installed\. Run: pip install lightning"):
        predict_callback(calibrated(net))


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "label": float(row.float().mean()) / 20} for row in tokens]


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    found = {"input_ids": tokens, "attention_mask": (tokens > 0).long()}
    return found | ({"labels": torch.tensor([row["label"] for row in batch])} if "label" in batch[0] else {})


def hugging_face(folder: Path, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=16, num_labels=1, **small)
    model = transformers.BertForSequenceClassification(config)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_eval_batch_size=16, report_to=[], use_cpu=True, disable_tqdm=True
    )
    return transformers.Trainer(model, arguments, data_collator=padded, **options)


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
        found: latedrop.Predictor = quick([0.05], 10)(run.model, run.get_eval_dataloader(texts(48)), **options)
        return found

    @pytest.mark.parametrize("method", ["sample", "linear"])
    def test_it_gives_the_trainers_fields_and_more(self, run: Any, method: Any) -> None:
        uq, test = self.calibrated(run, method=method), texts(40, 1)
        state = deepcopy(run.model.state_dict())
        found, theirs = predict_with(run, test, uq, level=0.8), run.predict(test)
        predictions, label_ids, metrics = found[:3]
        assert predictions.shape == theirs.predictions.shape == (40, 1)
        np.testing.assert_array_equal(label_ids, theirs.label_ids)
        if method == "linear":  # which keeps the model's own prediction
            assert_same_up_to_rounding(predictions, theirs.predictions)
            assert metrics["test_mse"] == pytest.approx(theirs.metrics["test_mse"], rel=rounding())
        p = uq.predict({name: value for name, value in padded(test).items() if name != "labels"})
        for ours, value in zip((predictions, *found[3:6]), p.to_dict(0.8).values(), strict=True):
            assert_same_up_to_rounding(ours, value)
        target = torch.tensor([row["label"] for row in test])[:, None]
        assert metrics["test_nll"] == pytest.approx(
            float(latedrop.metrics.nll(p.mean, p.variance, target)), rel=rounding()
        )
        held = latedrop.metrics.coverage(p.mean, p.variance, target, level=0.8)
        assert metrics["test_coverage"] == pytest.approx(float(held))
        assert all(torch.equal(state[name], value) for name, value in run.model.state_dict().items())

    def test_strange_rows_are_told_by_the_default(self, run: Any) -> None:
        uq, test = self.calibrated(run, method="terms"), texts(12, 1)
        p = uq.predict({name: value for name, value in padded(test).items() if name != "labels"})
        assert p.novelty is not None
        assert_same_up_to_rounding(predict_with(run, test, uq).novelty, p.novelty)

    def test_data_without_labels(self, run: Any) -> None:
        uq = self.calibrated(run)
        bare = [{"input_ids": row["input_ids"]} for row in texts(5)]
        found = predict_with(run, bare, uq)
        assert found.label_ids is None
        assert found.metrics == {}
        assert found.low.shape == found.std.shape == (5, 1)

    def test_metrics_have_the_prefix_and_need_no_function(self, tmp_path: Path) -> None:
        run = hugging_face(tmp_path)
        found = predict_with(run, texts(20), self.calibrated(run), metric_key_prefix="shifted")
        assert set(found.metrics) == {"shifted_nll", "shifted_coverage"}

    def test_what_cannot_be_right_is_refused(self, run: Any, net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            ArgumentError, match=r"expected a predictor of the trainer's model; found one of another Seq"
        ):
            predict_with(run, texts(5), calibrated(net))
        uq = self.calibrated(run)
        with pytest.raises(DataError, match="expected at least one row to predict; found none"):
            predict_with(run, [], uq)
        monkeypatch.setattr(type(run.args), "world_size", 2)
        with pytest.raises(ArgumentError, match="expected a trainer that runs in one process; found 2, each with"):
            predict_with(run, texts(5), uq)
