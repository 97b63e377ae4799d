"""PrivateModule: the same parameters as a loop of run.step under Lightning's Trainer, what is refused, resuming."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from peft import LoraConfig, get_peft_model
from private_runs import N, fixed, losses_of, network, table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import eachgrad
from eachgrad.private import PrivacyError, make_private
from eachgrad.private.lightning import Privacy, PrivateModule, TrainingSet, check_trainer

pytestmark = [
    # Lightning's own: it builds a tree of torch's in a way that torch has given up.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # Lightning's advice on a loader that is refused, an accumulation that is refused, and files of the run before.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:When using `Trainer.accumulate_grad_batches != 1.`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
]


class Table(PrivateModule):
    """The table of the other tests, with a schedule that lets the learning rate fall at each step."""

    def __init__(self, batch_size: int = 12, **options: Any):
        super().__init__()
        self.net = network()
        given = {"target_delta": 1e-3, "noise_multiplier": 1.0, "max_grad_norm": 0.5, "accountant": "rdp"}
        self.batch_size, self.options = batch_size, given | options

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return losses_of(self.net(x), y)

    def training_set(self) -> TrainingSet:
        return TrainingSet(table(), self.batch_size)

    def configure_privacy(self) -> Privacy:
        return Privacy(**self.options)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.5)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": falling(sgd), "interval": "step"}}


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def trainer(folder: Path, **more: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
    }  # fmt: skip
    return pl.Trainer(**(given | more))


@pytest.mark.parametrize("options", [{}, {"max_physical_batch": 4}, {"clipping": "normalised"}], ids=str)
def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path, options):
    module, used = Table(generator=fixed(), **options), trainer(tmp_path)
    used.fit(module)
    assert used.global_step == module.run.spent == 10  # 60 / 12 in each of two epochs

    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = falling(sgd)
    run = make_private(
        model, sgd, table(), loss_fn=losses_of, batch_size=12, steps=10, noise_multiplier=1.0, target_delta=1e-3,
        max_grad_norm=0.5, accountant="rdp", generator=fixed(), progress=False, **options,
    )  # fmt: skip
    for batch in run.loader:
        result = run.step(batch)
        schedule.step()

    for name, p in model.named_parameters():
        torch.testing.assert_close(module.net.get_parameter(name), p, rtol=1e-6, atol=1e-7)
        assert not torch.equal(p, network().get_parameter(name))
    shown = used.callback_metrics
    assert float(shown["epsilon"]) == pytest.approx(run.epsilon(), rel=1e-6)
    assert float(shown["train_loss"]) == pytest.approx(result.loss, rel=1e-5)
    assert float(shown["clipped"]) == pytest.approx(result.clipped)


@pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_compiled_and_eager_steps_are_the_same(tmp_path, monkeypatch, precision):
    torch._dynamo.reset()
    monkeypatch.setattr(eachgrad, "compile", partial(eachgrad.compile, backend="aot_eager"))
    eager, compiled = (Table(generator=fixed(), compile=way) for way in (False, True))
    for module in (eager, compiled):
        trainer(tmp_path, precision=precision).fit(module)
    ask = compiled.run.engine.ask
    assert ask.reasons() == []
    assert [bool(graph.step) for graph in ask.graphs] == [True]
    for name, p in eager.net.named_parameters():
        torch.testing.assert_close(compiled.net.get_parameter(name), p, rtol=1e-5, atol=1e-6)
        assert not torch.equal(p, network().get_parameter(name))


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"max_steps": 7}, 7),
        ({"limit_train_batches": 2}, 4),
        ({"limit_train_batches": 0.5}, 4),
        ({"fast_dev_run": 3}, 3),
    ],
    ids=str,
)
def test_the_steps_that_fit_takes_are_those_planned(tmp_path, given, steps):
    module, used = Table(), trainer(tmp_path, **given)
    used.fit(module)
    assert used.global_step == module.run.spent == module.run.settings.steps == steps


def test_a_target_is_met(tmp_path):
    module = Table(noise_multiplier=None, target_epsilon=3.0)
    trainer(tmp_path).fit(module)
    assert 2.95 < module.run.epsilon() <= 3.0


def test_draws_of_nobody_are_steps(tmp_path):
    module, used = Table(batch_size=1), trainer(tmp_path, max_epochs=1)
    sizes: list[int] = []

    class Sizes(pl.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            sizes.append(module.run.last.samples)

    used.callbacks.append(Sizes())
    used.fit(module)
    # Each is Binomial(60, 1/60): one of these fails by chance less than once in a million runs.
    assert len(sizes) == used.global_step == module.run.spent == N
    assert sizes.count(0) >= 1
    assert max(sizes) >= 2
    assert bool(used.callback_metrics["train_loss"].isfinite())


def test_lora_in_bf16(tmp_path):
    class Text(Table):
        def __init__(self):
            super().__init__()
            config = LlamaConfig(
                vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2,
            )  # fmt: skip
            lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            self.net = get_peft_model(LlamaForCausalLM(config), lora)

        def losses(self, batch: dict[str, Tensor]) -> Tensor:
            ids = batch["ids"]
            logits = self.net(ids, use_cache=False).logits
            return F.cross_entropy(logits[:, :-1].float().movedim(-1, 1), ids[:, 1:], reduction="none").mean(1)

        def training_set(self) -> TrainingSet:
            return TrainingSet([{"ids": (torch.arange(6) + k) % 11} for k in range(30)], 10)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.01)

    module = Text()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer(tmp_path, precision="bf16-mixed").fit(module)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in module.named_parameters() if p.requires_grad}
    assert len(changed) == 4
    assert module.run.spent == 6


def test_a_second_fit_counts_the_first(tmp_path):
    module = Table()
    trainer(tmp_path).fit(module)
    once = module.run.epsilon()
    trainer(tmp_path).fit(module)
    assert sum(some.steps for some in module.run.history) == 20
    assert module.run.epsilon() > 1.2 * once


REFUSED = {
    "accumulation": ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\) takes several batches.*max_physical"),
    "clipping": ({"gradient_clip_val": 1.0}, r"gradient_clip_val=1\.0\) scales down the sum"),
    "endless": ({"max_epochs": -1}, "the noise is for a number of steps"),
    "accumulation later": (
        {"callbacks": [GradientAccumulationScheduler({1: 2})]}, r"accumulate_grad_batches=2\) takes several batches",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_by_name(tmp_path, case):
    given, message = REFUSED[case]
    with pytest.raises(PrivacyError, match=message):
        trainer(tmp_path, **given).fit(Table())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("precision", "16-mixed", r'precision="16-mixed"\) divides the gradients'),
        ("world_size", 2, "2 devices: the accounting is for one process"),
        ("strategy", DDPStrategy(), r"strategy=DDPStrategy\), 1 devices: the accounting is for one process"),
    ],
)
def test_refused_where_this_machine_would_not_let_them_be(name, value, message):
    usual: dict[str, Any] = {
        "world_size": 1, "strategy": SingleDeviceStrategy("cpu"), "accumulate_grad_batches": 1, "gradient_clip_val": None,
        "precision": "32-true",
    }  # fmt: skip
    check_trainer(SimpleNamespace(**usual))
    with pytest.raises(PrivacyError, match=message):
        check_trainer(SimpleNamespace(**(usual | {name: value})))


def test_another_loader_is_refused(tmp_path):
    with pytest.raises(PrivacyError, match="that the run has not drawn"):
        trainer(tmp_path).fit(Table(), DataLoader(table(), 12))


def test_an_optimizer_that_needs_a_closure_is_refused(tmp_path):
    module = Table()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(PrivacyError, match="LBFGS computes the loss again within a step"):
        trainer(tmp_path).fit(module)


def test_a_step_of_its_own_is_refused():
    for name in ("training_step", "train_dataloader", "backward", "optimizer_zero_grad"):
        with pytest.raises(TypeError, match=f"Mine.{name} takes the place of the one that makes a step private"):
            type("Mine", (Table,), {name: lambda self, *args: None})

    class Plain(pl.LightningModule):
        def training_step(self, *args: Any) -> Tensor:
            raise AssertionError("the private step comes first")

    assert type("Both", (PrivateModule, Plain), {}).training_step is PrivateModule.training_step


def test_what_is_not_defined_is_named():
    module = type("Empty", (PrivateModule,), {})()
    for missing in (module.losses, module.training_set, module.configure_privacy):
        with pytest.raises(NotImplementedError, match=rf"Empty needs {missing.__name__}\(self"):
            missing()


class Crash(pl.Callback):
    """The process dies, as far as a test can die, after so many steps."""

    def __init__(self, after: int):
        self.after = after

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.after:
            raise ZeroDivisionError


def crashed(folder: Path) -> tuple[Table, str]:
    """A module that was to take 10 steps, saved after 4 and crashed after 7, and the checkpoint."""
    module = Table()
    saving = ModelCheckpoint(folder, filename="saved", every_n_train_steps=4)
    with pytest.raises(ZeroDivisionError):
        trainer(folder, callbacks=[saving, Crash(7)], enable_checkpointing=True).fit(module)
    assert module.run.spent == 7
    module.run.close()  # as the end of a process does
    return module, str(folder / "saved.ckpt")


def test_a_resumed_run_counts_the_steps_that_were_lost(tmp_path):
    first, saved = crashed(tmp_path)
    later, used = Table(), trainer(tmp_path)
    used.fit(later, ckpt_path=saved)
    receipt = later.run.receipt()
    # 4 steps of the checkpoint, 3 lost, and the 3 that are left.
    assert (later.run.spent, receipt.lost, used.global_step) == (10, 3, 7)
    assert later.run.epsilon() > first.run.epsilon()
    assert receipt.samples > 0
    assert later.run.id == first.run.id


def test_what_cannot_be_resumed(tmp_path):
    _, saved = crashed(tmp_path)
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, filename="other")]}
    with pytest.raises(PrivacyError, match="is of another run, which has counted 7 steps"):
        trainer(tmp_path, **saving).fit(Table())
    (tmp_path / "private_run.journal").rename(tmp_path / "away")
    with pytest.raises(PrivacyError, match=r"private_run\.journal is not there: steps taken after it was saved"):
        trainer(tmp_path).fit(Table(), ckpt_path=saved)
    Table.load_from_checkpoint(saved)  # to use the model is another matter
    state = torch.load(saved, weights_only=False)
    del state["eachgrad_private_run"]
    torch.save(state, tmp_path / "bare.ckpt")
    with pytest.raises(PrivacyError, match=r"bare\.ckpt has no private run in it"):
        trainer(tmp_path).fit(Table(), ckpt_path=str(tmp_path / "bare.ckpt"))
