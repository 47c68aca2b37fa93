"""Other people's training loops take what this package makes: Lightning, Transformers, Accelerate, Datasets, torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import pipes
from pipes import batch, collate, execute, from_arrays, from_iterable, from_map, map, pipe, sample, shuffled

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

X = np.random.default_rng(0).random((64, 4), np.float32)
Y = (X.sum(1) > 2).astype(np.int64)
PIPELINE = pipe(from_arrays({"x": X, "labels": Y}), sample(shuffled()), batch(16), collate())
ROWS: Any = [{"x": torch.from_numpy(x), "labels": int(y)} for x, y in zip(X, Y, strict=True)]
WAYS = {
    "DataLoader": lambda: pipes.DataLoader(ROWS, 16, shuffle=True, num_workers=2),
    "Loader": lambda: execute(PIPELINE, workers=2),
    "Pipeline": lambda: PIPELINE,
    "as_torch": PIPELINE.as_torch,
}


class Classifier(nn.Module):
    """Gives loss and logits, as Transformers wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: list[int] = []

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        if self.training:
            self.seen.append(len(labels))
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("way", WAYS)
def test_lightning_trains_on_it(way: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # a class of a module got at run time
        def __init__(self) -> None:
            super().__init__()
            self.model = Classifier()

        def training_step(self, x: dict[str, Any], _: int) -> Any:
            return self.model(**x)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet).fit(module, WAYS[way]())
    assert module.model.seen == [16] * 8


@pytest.mark.parametrize("way", WAYS)
def test_transformers_trains_on_it(way: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]  # see above
        def get_train_dataloader(self) -> Any:
            return WAYS[way]()

    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "use_cpu": True}
    model = Classifier()
    arguments = transformers.TrainingArguments(tmp_path, num_train_epochs=2, **quiet)
    result = Trainer(model, arguments, train_dataset=ROWS).train()
    assert result.global_step == 8
    assert model.seen == [16] * 8


@pytest.mark.parametrize("way", ["DataLoader", "as_torch"])
def test_accelerate_prepares_it(way: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = WAYS[way]()
    prepared = accelerate.Accelerator(cpu=True).prepare(
        loader if way == "DataLoader" else TorchDataLoader(loader, batch_size=None)
    )
    assert [len(b["labels"]) for b in prepared] == [16] * 4


def test_datasets_are_read_alike_with_their_states() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch")
    theirs = list(TorchDataLoader(table, 16))
    for ours in (list(pipes.DataLoader(table, 16, num_workers=2)), list(pipe(from_map(table), batch(16), collate()))):
        assert all(torch.equal(a["x"], b["x"]) for a, b in zip(ours, theirs, strict=True))
    stream = table.to_iterable_dataset(num_shards=4)
    loader: Any = pipes.DataLoader(stream, 16, num_workers=2)
    batches = iter(loader)
    first = next(batches)["y"].tolist()
    state = loader.state_dict()
    rest = [b["y"].tolist() for b in batches]
    again: Any = pipes.DataLoader(stream, 16, num_workers=2)
    again.load_state_dict(state)
    assert [b["y"].tolist() for b in again] == rest
    assert sorted(itertools.chain(first, *rest)) == sorted(Y.tolist())


@given(workers=st.integers(0, 3), size=st.integers(1, 4), n=st.integers(0, 12), streamed=st.booleans())
def test_torchs_own_loader_gives_the_pipeline(workers: int, size: int, n: int, streamed: bool) -> None:
    source = from_iterable(range(n)) if streamed else from_map(range(n))
    pipeline = pipe(source, map(drawn), batch(size)) if streamed else pipe(source, sample(shuffled()), map(drawn))
    dataset = pipeline.as_torch()
    dataset.set_epoch(2)
    context = "fork" if workers else None
    theirs = TorchDataLoader(
        dataset, batch_size=None, collate_fn=as_it_is, num_workers=workers, multiprocessing_context=context
    )
    assert list(theirs) == list(pipeline.at_epoch(2))


def as_it_is(x: Any) -> Any:
    """Keep torch from making tensors of arrays and lists of tuples."""
    return x


def drawn(x: int, rng: np.random.Generator) -> tuple[int, float]:
    return x, float(rng.random())


def test_a_loader_has_workers_of_its_own() -> None:
    loader = execute(PIPELINE, workers=1)
    given: Any = loader.as_torch()
    assert len(given) == 4
    first = [b["labels"].tolist() for b in TorchDataLoader(given, batch_size=None)]
    second = [b["labels"].tolist() for b in TorchDataLoader(given, batch_size=None)]
    assert [first, second] == [[b["labels"].tolist() for b in PIPELINE.at_epoch(e)] for e in (0, 1)]
    with pytest.raises(RuntimeError, match="num_workers=0"):
        list(TorchDataLoader(given, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    loader.close()


def test_torch_data_sets_samplers_and_batch_samplers_are_taken_by_the_combinators() -> None:
    from torch.utils.data import BatchSampler, SequentialSampler

    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    sampler = BatchSampler(SequentialSampler(rows), 16, drop_last=False)
    ours = list(pipe(from_map(rows), sample(sampler), collate()))
    for (x, y), (a, b) in zip(ours, TorchDataLoader(rows, 16), strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
