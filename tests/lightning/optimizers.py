"""Cases of optimizers and schedulers, automatic and manual."""

from typing import Any

import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from tests.lightning.record import Base, Case, Run

DATA_ONLY = ("dp", "zero3", "tp")
NO_PIPELINE = "manual optimization needs the graph of the whole network in one process"


class Scheduled(Base):
    """A scheduler with options."""

    options: dict[str, Any] = {}

    def scheduler(self, optimizer: Any) -> Any:
        return StepLR(optimizer, step_size=1, gamma=0.5)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr)
        config = {"scheduler": self.scheduler(optimizer), **self.options}
        return {"optimizer": optimizer, "lr_scheduler": config}


class EachStep(Scheduled):
    options = {"interval": "step"}


class EachSecondStep(Scheduled):
    options = {"interval": "step", "frequency": 2}


class EachSecondEpoch(Scheduled):
    options = {"frequency": 2}


class Plateau(Scheduled):
    options = {"monitor": "val"}

    def scheduler(self, optimizer: Any) -> Any:
        return ReduceLROnPlateau(optimizer, patience=0, threshold=1.0, factor=0.5)


class PlateauByStep(Plateau):
    options = {"monitor": "loss", "interval": "step", "strict": False}


class PlateauOfNothing(Plateau):
    options = {"monitor": "nothing", "strict": True}


class PlateauWithoutMonitor(Plateau):
    options = {}


class Lists(Base):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.1)]


class TwoSchedulers(Base):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr)
        each = {"scheduler": LambdaLR(optimizer, lambda n: 0.9**n), "interval": "step"}
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.5), each]


class OneCycle(Base):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class NoOptimizer(Base):
    def configure_optimizers(self) -> Any:
        return None


class WrongOptimizer(Base):
    def configure_optimizers(self) -> Any:
        return {"scheduler": 3}


class TwoAutomatic(Base):
    def configure_optimizers(self) -> Any:
        return [SGD(self.parameters(), lr=0.1), Adam(self.parameters(), lr=0.1)]


class OwnSchedulerStep(EachStep):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.trainer.global_step)


class WarmsUp(Base):
    """Sets the learning rate in its own optimizer_step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (self.trainer.global_step + 1)


class StepsEachSecond(Base):
    """Computes gradients for each batch, and applies each second one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=closure)
        else:
            closure()


class ClipsItself(Base):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1 / (1 + self.current_epoch))


class KeepsZeros(Base):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Frozen(Base):
    """Trains its last block only."""

    def __init__(self) -> None:
        super().__init__()
        self.net.layers[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Groups(Base):
    def configure_optimizers(self) -> Any:
        first, second = self.net.layers
        groups = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.01}]
        return torch.optim.AdamW(groups, lr=0.1, eps=1e-4)


class Repeats(Base):
    """An optimizer that evaluates its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class ByHand(Base):
    """Two optimizers in turns, each with a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        optimizer = first if batch_idx % 2 else second
        self.toggle_optimizer(optimizer)
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.log("loss", loss.detach(), sync_dist=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first, second = self.net.layers
        optimizers = [SGD(first.parameters(), lr=0.1), Adam(second.parameters(), lr=0.01, eps=1e-4)]
        return optimizers, [StepLR(o, step_size=2, gamma=0.5) for o in optimizers]


class ByHandWithClosure(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def closure() -> Any:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        for optimizer in self.optimizers():
            optimizer.step(closure=closure)


class ByHandAccumulated(ByHand):
    """Steps for each second batch, with clipped gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if batch_idx % 2:
            for optimizer in (first, second):
                self.clip_gradients(optimizer, gradient_clip_val=0.05)
                optimizer.step()
                optimizer.zero_grad()
        return {"loss": loss, "extra": 1}


class ByHandEpochs(ByHand):
    """Schedulers that the user steps at the end of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            with optimizer.toggle_model(sync_grad=True):
                optimizer.step()

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()


def estimate(run: Run) -> None:
    trainer, module = run.trainer(), run.module()
    trainer.fit(module)
    run.note(estimated=trainer.estimated_stepping_batches, optimizers=len(trainer.optimizers))
    run.finish(trainer, module)


MANUAL: dict[str, Any] = {
    "layouts": ("dp",),
    "reason": NO_PIPELINE,
}

CASES = {
    "each epoch": Case(module=Scheduled, trainer={"max_epochs": 3}, layouts=()),
    "each step": Case(module=EachStep, layouts=(), others=("dp",)),
    "each second step": Case(module=EachSecondStep, layouts=()),
    "each second epoch": Case(module=EachSecondEpoch, trainer={"max_epochs": 4}, layouts=()),
    "each step, accumulated": Case(
        module=EachStep, trainer={"accumulate_grad_batches": 2}, layouts=(), others=("pp",)
    ),
    "plateau": Case(module=Plateau, trainer={"max_epochs": 4}, layouts=(), others=("pp",)),
    "plateau, interval": Case(module=Plateau, trainer={"val_check_interval": 1}, layouts=()),
    "plateau by step": Case(module=PlateauByStep),
    "plateau of nothing": Case(module=PlateauOfNothing, layouts=()),
    "plateau without monitor": Case(module=PlateauWithoutMonitor, layouts=()),
    "lists": Case(module=Lists, layouts=()),
    "two schedulers": Case(module=TwoSchedulers, layouts=(), others=("pp",)),
    "one cycle": Case(module=OneCycle, trainer={"accumulate_grad_batches": 2}, layouts=("dp",)),
    "no optimizer": Case(module=NoOptimizer, layouts=()),
    "wrong optimizer": Case(module=WrongOptimizer, layouts=()),
    "two optimizers, automatic": Case(module=TwoAutomatic, layouts=()),
    "own lr_scheduler_step": Case(module=OwnSchedulerStep, layouts=()),
    "own optimizer_step": Case(module=WarmsUp, layouts=(), others=("pp",)),
    "own optimizer_step that skips": Case(module=StepsEachSecond),
    "own clipping": Case(module=ClipsItself, layouts=("pp",)),
    "own zero_grad": Case(module=KeepsZeros),
    "frozen": Case(module=Frozen, layouts=("zero3",), others=("pp",)),
    "groups": Case(module=Groups, layouts=("pp",), others=("zero3",)),
    "closures repeat": Case(module=Repeats, layouts=()),
    "manual": Case(module=ByHand, layouts=(), others=("dp",), reason=NO_PIPELINE),
    "manual, closures": Case(module=ByHandWithClosure, **MANUAL),
    "manual, accumulated": Case(module=ByHandAccumulated, **MANUAL),
    "manual, epochs": Case(module=ByHandEpochs, layouts=(), others=("dp",), reason=NO_PIPELINE),
    "manual under a pipeline": Case(
        module=ByHand,
        layouts=("pp",),
        refused={"pp": "cannot call manual_backward; nearest valid"},
        reason=NO_PIPELINE,
    ),
    "estimated steps": Case(
        trainer={"accumulate_grad_batches": 2, "limit_train_batches": 3},
        script=estimate,
        layouts=(),
    ),
    "estimated steps, max_steps": Case(trainer={"max_steps": 5}, script=estimate, layouts=()),
}
