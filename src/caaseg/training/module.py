"""The whole journey of a batch: uint8 to the device, normalized, through the network, the loss and the optimizer.

What is random in a step depends on the seed, the step and the rank alone, as the samples do. So a run that was killed
and resumed goes on as if it had not been.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from caaseg.config import OptimizerRecipe, Recipe
from caaseg.data.loader import EvaluationLoader, TrainingLoader, worthwhile
from caaseg.data.sample import IGNORE, Batch, SegmentationDataset
from caaseg.data.transforms import normalize
from caaseg.evaluation.metrics import ConfusionMatrix
from caaseg.models import Prediction, Segmenter
from caaseg.models.cuda_graphs import capture_coarse, preserve_state
from caaseg.models.fused_norm import fuse_batch_norm
from caaseg.torchvision_compat import declare_missing_operators
from caaseg.training.ema import MovingAverage
from caaseg.training.losses import learned_pixels, log_class_weights, part_of_loss
from caaseg.training.schedule import learning_rate

declare_missing_operators()  # lightning imports torchvision

import lightning as L  # noqa: E402
from lightning.pytorch.strategies import ParallelStrategy  # noqa: E402

DROPOUT_STREAM = 3  # data.loaders has the streams before


class NonFiniteLossError(ValueError):
    """The loss is infinite or not a number: nothing that follows would mean anything."""


class Outcome(NamedTuple):
    """What a step gave, still on the device: reading it at once would have the device wait for the processor."""

    step: int  # steps done, this one included
    loss: Tensor  # of all ranks
    own_loss: Tensor  # this rank's part of it
    names: tuple[str, ...]

    def check(self) -> None:
        """Stop if this rank's part of the loss is not finite."""
        value = float(self.own_loss)
        if not np.isfinite(value):
            raise NonFiniteLossError(
                f"step {self.step}: the loss is {value} on the files {', '.join(self.names)}; expected a finite one; "
                "look at these files, lower optimizer.lr, set optimizer.clip_grad_norm or a longer warm-up, or use "
                "precision 32"
            )


class TrainingModule(L.LightningModule):
    """A model in training. One call of training_step is one whole optimizer step, of all its accumulation parts."""

    def __init__(
        self,
        recipe: Recipe,
        model: Segmenter,
        train: SegmentationDataset,
        val: SegmentationDataset,
        *,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Keep what a run needs; nothing is moved to a device yet.

        Args:
            recipe: the run.
            model: the network, with as many classes as the data.
            train: what is learned from.
            val: what is scored.
            state: what `state` gave, to go on from there.
        """
        super().__init__()
        self.automatic_optimization = False
        self.recipe = recipe
        self.model = model.to(memory_format=torch.channels_last if recipe.channels_last else torch.contiguous_format)  # type: ignore[call-overload]
        self.train_data, self.val_data = train, val
        self.step = 0
        """Steps done."""
        self.outcome: Outcome | None = None
        """Of the last step."""
        self.stop_asked = False
        """Set from outside to stop after a step."""
        self.stopping = False
        """Whether all ranks stop after this step, because one was asked to."""
        self.ready = False
        """Whether the steps can begin: all is on the device, and a step was found to fit there."""
        self.average: MovingAverage | None = None
        self._votes: Tensor | None = None  # ranks asked to stop, one step ago
        self._class_weights: Tensor | None = None
        self._restored = state
        self._coarse: Callable[[Tensor], Prediction] = self.model.coarse

    # What lightning asks for, in its order.

    def configure_optimizers(self) -> Optimizer:
        # One launch for all weights. Not in 16 bits, whose scaled gradients it would keep from being clipped in time.
        fused = self.device.type == "cuda" and self.recipe.precision != "16"
        return make_optimizer(self.model, self.recipe.optimizer, fused=fused)

    def on_fit_start(self) -> None:
        recipe = self.recipe
        if self._restored is not None:
            self._restore(self._restored)
        if recipe.optimizer.ema is not None:
            self.average = MovingAverage(self.model, recipe.optimizer.ema)
            if self._restored is not None:
                self.average.model.load_state_dict(self._restored["average"])
        self._restored = None
        self.model.train()
        self._class_weights = self._weights_of_classes()
        if recipe.compile:
            self._coarse = torch.compile(self.model.coarse, dynamic=False)
        if recipe.fused_batch_norm and self.device.type == "cuda" and self.ranks == 1:
            fuse_batch_norm(self.model)
        if self.device.type == "cuda":  # where there is too little room a CPU has no error, and ends the process
            self.rehearse()
            if recipe.cuda_graph and self.ranks == 1:
                self.record()
        self.ready = True

    def train_dataloader(self) -> TrainingLoader:
        recipe, data = self.recipe, self.recipe.data
        return TrainingLoader(
            self.train_data,
            data,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            step=self.step,
            workers=data.workers,
            rank=self.global_rank,
            ranks=self.ranks,
            bad_files=data.bad_files,
        )

    def training_step(self, batch: Batch, index: int) -> None:
        recipe = self.recipe
        torch.manual_seed(step_seed(recipe.seed, self.step, self.global_rank))
        optimizer: Any = self.optimizers()
        rate = learning_rate(self.step, recipe.steps, recipe.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        pixels = self._over_ranks(learned_pixels(batch.labels, recipe.loss.ohem).sum())

        own_loss = torch.zeros((), device=self.device)
        parts = list(zip(batch.images.chunk(recipe.accumulate), batch.labels.chunk(recipe.accumulate), strict=True))
        for images, labels in parts:
            with nullcontext() if labels is parts[-1][1] else self._gradients_kept_here():
                prediction = self._coarse(self._prepared(images))  # logits, (N, K, h, w)
                loss = part_of_loss(prediction, labels, pixels, recipe.loss, self._class_weights)
                self.manual_backward(loss * self.ranks)  # gradients are averaged over ranks, the loss is a sum
            own_loss += loss.detach()
        optimizer.step()  # calls on_before_optimizer_step
        optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model, self.step)
        self.step += 1
        self._agree_on_stopping()
        self.outcome = Outcome(self.step, self._over_ranks(own_loss.clone()), own_loss, batch.names)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if (
            self.recipe.optimizer.clip_grad_norm is not None
        ):  # here gradients of 16-bit precision have their true size again
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip_grad_norm)

    def rehearse(self) -> None:
        """Compute a step of the real size, so that too little memory shows before the first: nothing is changed by it.

        Gradients are computed but belong to no weight, running statistics are put back, random numbers are drawn aside,
        and room is taken for what the optimizer will keep. All ranks do it together: statistics may be synchronized.
        """
        recipe, (height, width) = self.recipe, self.recipe.data.crop
        crops = recipe.batch_size // self.ranks // recipe.accumulate
        weights = list(self.model.parameters())
        kept = 2 if recipe.optimizer.name == "adamw" else int(recipe.optimizer.momentum > 0)
        if any(optimizer.state for optimizer in self.trainer.optimizers):  # it goes on from a checkpoint, and has it
            kept = 0
        room = [torch.empty_like(weight) for _ in range(kept) for weight in weights]
        with preserve_state(self.model), self.trainer.precision_plugin.forward_context():
            images = torch.zeros(crops, 3, height, width, dtype=torch.uint8, device=self.device)
            labels = torch.zeros(crops, height, width, dtype=torch.uint8, device=self.device)
            pixels = learned_pixels(labels, recipe.loss.ohem).sum()
            prediction = self._coarse(self._prepared(images))
            loss = part_of_loss(prediction, labels, pixels, recipe.loss, self._class_weights)
            torch.autograd.grad(loss, weights, allow_unused=True)
        del room

    def record(self) -> None:
        """Record forward and backward of the network, to replay them every step."""
        (height, width), precision = self.recipe.data.crop, self.trainer.precision_plugin
        images = torch.zeros(self.recipe.batch_size, 3, height, width, dtype=torch.uint8, device=self.device)
        self._coarse = capture_coarse(self.model, self._prepared(images), precision.forward_context)

    # What a run asks for.

    @property
    def ranks(self) -> int:
        return self.trainer.world_size

    @property
    def scored(self) -> Segmenter:
        """What is scored and saved: the running mean of the weights where there is one."""
        return self.model if self.average is None else self.average.model

    @torch.no_grad()
    def validate(self) -> ConfusionMatrix:
        """Score whole images of the validation split, each once over all ranks."""
        matrix = ConfusionMatrix(self.model.config.num_classes, self.device)
        loader = self._samples_of(self.val_data)
        self.scored.eval()
        for batch in loader:
            labels = batch.labels.to(self.device)
            with self.trainer.precision_plugin.forward_context():
                logits = self.scored(self._prepared(batch.images.to(self.device))).logits
            matrix.update(logits.argmax(1), labels)
        self.model.train()
        matrix.counts = self._over_ranks(matrix.counts)
        return matrix

    def state(self) -> dict[str, Any]:
        """All that decides how the run goes on: tensors and plain values alone."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": self.trainer.precision_plugin.state_dict(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.trainer.precision_plugin.load_state_dict(state["scaler"])
        self.step = state["step"]

    def _prepared(self, images: Tensor) -> Tensor:
        backbone = self.model.backbone
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        return normalize(images, backbone.mean, backbone.std).contiguous(memory_format=layout)

    def _weights_of_classes(self) -> Tensor | None:
        """One factor a class, on the device; "log" looks at every training label."""
        asked = self.recipe.loss.class_weights
        if asked == "none":
            return None
        if asked != "log":
            return torch.tensor(asked, device=self.device)
        counts = torch.zeros(IGNORE + 1, dtype=torch.int64)
        for batch in self._samples_of(self.train_data):
            counts += torch.bincount(batch.labels.flatten(), minlength=IGNORE + 1)
        return log_class_weights(self._over_ranks(counts[: self.model.config.num_classes].to(self.device)))

    def _samples_of(self, data: SegmentationDataset) -> EvaluationLoader:
        """This rank's share of a dataset, one by one; what is in memory needs no processes to read it."""
        workers = 0 if self.recipe.data.cache else worthwhile(self.recipe.data.workers, len(data) // self.ranks)
        return EvaluationLoader(data, workers=workers, rank=self.global_rank, ranks=self.ranks)

    def _over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.ranks > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def _gradients_kept_here(self) -> AbstractContextManager[None]:
        """Between the parts of a step ranks need not wait for each other: gradients are shared after the last."""
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _agree_on_stopping(self) -> None:
        """All ranks stop after the same step, although a signal reaches each at a moment of its own."""
        if self.ranks == 1:
            self.stopping = self.stop_asked
            return
        # Votes of the step before: they have long arrived, so that nothing waits for them.
        self.stopping = self._votes is not None and bool(self._votes)
        self._votes = self._over_ranks(torch.tensor(int(self.stop_asked), device=self.device))


def make_optimizer(model: Segmenter, recipe: OptimizerRecipe, *, fused: bool = False) -> Optimizer:
    """SGD or AdamW; weight decay on kernels alone, and a factor of the learning rate for all behind the backbone."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((name.startswith("backbone."), parameter.ndim > 1), []).append(parameter)
    settings = [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if is_kernel else 0.0,
            "factor": 1.0 if in_backbone else recipe.head_lr_factor,
        }
        for (in_backbone, is_kernel), parameters in groups.items()
    ]
    if recipe.name == "adamw":
        return AdamW(settings, lr=recipe.lr, fused=fused)
    return SGD(settings, lr=recipe.lr, momentum=recipe.momentum, fused=fused)


def step_seed(seed: int, step: int, rank: int) -> int:
    """What dropout is drawn from in a step of a rank."""
    return int(np.random.SeedSequence((seed, DROPOUT_STREAM, step, rank)).generate_state(1)[0])


def with_synchronized_statistics(model: Segmenter) -> Segmenter:
    """Batch normalization over the batches of all GPUs; there is none such for CPUs."""
    from timm.layers.norm_act import convert_sync_batchnorm  # torch's own loses the activation of timm's layers

    converted = convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    assert isinstance(converted, Segmenter)
    return converted
