"""Classifiers in scikit-learn, Lightning, Hugging Face and timm: the predictor's probabilities in each one's form."""

from __future__ import annotations

import pickle
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
from latedrop.adapters.sklearn import CalibratedClassifier
from latedrop.errors import ArgumentError
from networks import mlp
from rounding import assert_same_up_to_rounding

NAMES = ["low", "mid", "top"]
QUICK: dict[str, Any] = {"method": latedrop.Terms(["leverage"]), "progress": False}


@pytest.fixture
def net() -> nn.Module:
    return mlp(3, 20, 3, act=nn.ReLU)


def rows(net: nn.Module, count: int = 90, seed: int = 0) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=dice)
    return x, (4 * net(x) + torch.rand(count, 3, generator=dice)).argmax(1)


def calibrated(net: nn.Module, **options: Any) -> Any:
    return latedrop.calibrate(net, rows(net), **QUICK, **options)


@needs("sklearn")
def test_probabilities_and_names(net: nn.Module) -> None:
    from sklearn.base import clone, is_classifier
    from sklearn.metrics import accuracy_score

    uq = calibrated(net, task=latedrop.Classification(names=NAMES))
    x, y = rows(net, 40, 1)
    classifier = CalibratedClassifier(uq)
    assert is_classifier(clone(classifier))
    assert_same_up_to_rounding(classifier.predict_proba(x.numpy()), uq.predict(x).probabilities.numpy())
    assert classifier.predict(x.numpy()).tolist() == uq.predict(x).names
    named = np.array(NAMES, dtype=object)[y.numpy()]
    assert classifier.score(x.numpy(), named) == accuracy_score(named, classifier.predict(x.numpy()))
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict(x.numpy()), classifier.predict(x.numpy()))


@needs("sklearn")
def test_fit_calibrates(net: nn.Module) -> None:
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    x, y = (part.numpy() for part in rows(net))
    settings: dict[str, Any] = {"options": {"method": latedrop.Terms(["leverage"])}}
    numbered = CalibratedClassifier(net, **settings).fit(x, y)
    expected = calibrated(net).predict(x).probabilities
    assert_same_up_to_rounding(numbered.predict_proba(x), expected)
    assert numbered.classes_.tolist() == [0, 1, 2]
    named = CalibratedClassifier(net, **settings).fit(x, np.array(NAMES)[y])  # whose order is that of the alphabet
    assert_same_up_to_rounding(named.predict_proba(x), numbered.predict_proba(x))
    assert set(named.predict(x)) <= set(NAMES)
    turned = CalibratedClassifier(net, classes=["top", "mid", "low"], **settings).fit(x, np.array(NAMES)[2 - y])
    assert_same_up_to_rounding(turned.predict_proba(x), numbered.predict_proba(x))
    pipeline = make_pipeline(FunctionTransformer(), CalibratedClassifier(net, **settings))
    assert np.isfinite(cross_val_score(pipeline, x, y, scoring="neg_log_loss", cv=2)).all()
    grid = {"method": [latedrop.Sampling([rate], draws=4) for rate in (0.1, 0.3)]}
    search = GridSearchCV(CalibratedClassifier(net), grid, scoring="neg_log_loss", cv=2)
    assert search.fit(x, y).predict_proba(x).shape == (90, 3)
    with pytest.raises(ValueError, match="expected labels of the network's 3 classes; found 2"):
        CalibratedClassifier(net).fit(x, np.where(y > 0, "a", "b"))
    with pytest.raises(ArgumentError, match="expected model=, a trained"):
        CalibratedClassifier().fit(x, y)


@needs("sklearn")
def test_sets(net: nn.Module) -> None:
    x, y = (part.numpy() for part in rows(net))
    fresh, labels = (part.numpy() for part in rows(net, 60, 1))
    classifier = CalibratedClassifier(net, options={"method": latedrop.Terms(["leverage"])}).fit(x, y)
    with pytest.raises(ArgumentError, match="expected a predictor with prediction sets"):
        classifier.predict_set(x)
    classifier.predictor_ = classifier.predictor_.conformal((fresh, labels))
    members = classifier.predict_set(x, 0.8)
    expected = calibrated(net).conformal((fresh, labels)).predict(x).prediction_set(0.8)
    np.testing.assert_array_equal(members, expected.numpy())


@needs("lightning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
def test_lightning(net: nn.Module) -> None:
    module, (x, y) = lightning_module(net), rows(net, 50, 1)
    uq = calibrated(net).conformal(rows(net, 60, 2))
    batches = trainer(predict_callback(uq, level=0.8)).predict(module, DataLoader(TensorDataset(x, y), batch_size=20))
    expected = uq.predict(x).to_dict(0.8)
    assert {"label", "confidence", "entropy", "novelty", "set", "probabilities"} == set(expected)
    for name, value in expected.items():
        assert_same_up_to_rounding(torch.cat([batch[name] for batch in batches]), value)


@pytest.mark.filterwarnings("ignore:.* of these rows are rows that the calibration was fitted to")
@needs("transformers", "accelerate")
def test_hugging_face(tmp_path: Path) -> None:
    def right(both: Any) -> dict[str, float]:
        return {"right": float((both.predictions.argmax(1) == both.label_ids).mean())}

    run = hugging_face(tmp_path, 3, compute_metrics=right)
    tokens = [torch.randint(1, 20, (4 + i % 4,)) for i in range(88)]
    texts = [{"input_ids": row, "label": int(row[0]) % 3} for row in tokens]
    options: dict[str, Any] = {"readout": "logits", **QUICK}
    uq = latedrop.calibrate(run.model, run.get_eval_dataloader(texts[:48]), **options)
    output, plain = predict_with(run, texts[48:], uq), run.predict(texts[48:])
    assert_same_up_to_rounding(output.predictions, plain.predictions)
    np.testing.assert_array_equal(output.label_ids, plain.label_ids)
    assert output.metrics["test_right"] == pytest.approx(plain.metrics["test_right"])
    assert output.metrics["test_accuracy"] == pytest.approx(output.metrics["test_right"])
    inputs = {name: value for name, value in padded(texts[48:]).items() if name != "labels"}
    assert_same_up_to_rounding(output.probabilities, uq.predict(inputs).probabilities)
    assert output.metrics["test_nll"] > 0
    ruled = uq.reject(run.get_eval_dataloader(texts[:48]), risk=0.9)
    np.testing.assert_array_equal(predict_with(run, texts[48:], ruled).kept, ruled.predict(inputs).kept())
    bare = predict_with(run, [{"input_ids": row} for row in tokens[:5]], uq)
    assert (bare.label_ids, bare.metrics, bare.label.shape) == (None, {}, (5,))
