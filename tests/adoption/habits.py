"""What users write around a model of transformers: one LightningModule for each habit."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron.adoption.adopt import adopt
from tests.adoption.families import FAMILIES
from tests.adoption.harness import BATCHES


class Habit(L.LightningModule):
    """Base: a Llama, a loss of its own, and what it notes."""

    family = "llama"
    options: dict[str, Any] = {}

    def __init__(self, adopted: bool, copies: int) -> None:
        super().__init__()
        self._copies = copies
        self.notes: list[float] = []
        self.lm = self.built(adopted)

    def built(self, adopted: bool) -> Any:
        model = FAMILIES[self.family].build(**self.options)
        return adopt(model) if adopted else model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        return self.lm(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-3, eps=1e-5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES["causal"](), batch_size=4 // self._copies)


class OwnLoss(Habit):
    """A loss with smoothed labels on the logits, and an accuracy by hand."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.lm(input_ids=batch["input_ids"]).logits
        targets = batch["labels"][:, 1:]
        guesses = logits[:, :-1].argmax(-1)
        self.log("accuracy", (guesses == targets).double().mean(), sync_dist=True)
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), targets.reshape(-1), label_smoothing=0.1
        )


class OfProbabilities(Habit):
    """A penalty on the entropy of what the model predicts."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.lm(**batch)
        log_p = out.logits.log_softmax(-1)
        return out.loss + 0.1 * (log_p.exp() * log_p).sum(-1).mean()


class AsTuple(Habit):
    """Outputs as a tuple."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        loss, logits = self.lm(**batch, return_dict=False)[:2]
        return loss + 1e-3 * logits.square().mean()


class Embedded(Habit):
    """Learned vectors in front of the prompt, given as embeddings."""

    def __init__(self, adopted: bool, copies: int) -> None:
        super().__init__(adopted, copies)
        generator = torch.Generator().manual_seed(1)
        self.prompt = nn.Parameter(torch.randn(3, 32, generator=generator, dtype=torch.float64))

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        own = self.lm.get_input_embeddings()(tokens)
        prompt = self.prompt.expand(len(tokens), -1, -1)
        out = self.lm(inputs_embeds=torch.cat((prompt, own), 1))
        logits = out.logits[:, 3:-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Hidden(Habit):
    """A penalty on the mean of the last hidden states."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.lm(**batch, output_hidden_states=True)
        return out.loss + 0.1 * out.hidden_states[-1].mean(1).square().mean()


class Hooked(Habit):
    """A hook on a block notes how large its output is and adds it to the loss."""

    def __init__(self, adopted: bool, copies: int) -> None:
        super().__init__(adopted, copies)
        self.sizes: list[Tensor] = []
        self.lm.model.layers[0].register_forward_hook(self._size)

    def _size(self, module: nn.Module, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        self.sizes.append(x.square().mean())

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        self.sizes.clear()
        return self.lm(**batch).loss + 0.1 * self.sizes[0]


class Frozen(Habit):
    """Embeddings and the first block are frozen."""

    options = {"num_hidden_layers": 4}

    def __init__(self, adopted: bool, copies: int) -> None:
        super().__init__(adopted, copies)
        for name, parameter in self.lm.named_parameters():
            if "embed" in name or "layers.0." in name:
                parameter.requires_grad_(False)


class Normalises(Habit):
    """Rows of the embedding are normalised after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.lm.get_input_embeddings().weight
        with torch.no_grad():
            weight.div_(weight.norm(dim=1, keepdim=True))


class NotesNorms(Habit):
    """Norms of weights and gradients are noted."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        q = self.lm.model.layers[0].self_attn.q_proj.weight
        self.notes += [float(q.norm()), float(q.grad.norm())]


class Twice(Habit):
    """The model is called twice in a step."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        first = self.lm(**batch)
        second = self.lm(input_ids=batch["input_ids"].flip(1), labels=batch["labels"].flip(1))
        return first.loss + second.loss


class Teacher(Habit):
    """A frozen copy teaches (and is called first)."""

    def __init__(self, adopted: bool, copies: int) -> None:
        super().__init__(adopted, copies)
        self.teacher = self.built(adopted).requires_grad_(False).eval()
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(0.9)

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids=batch["input_ids"]).logits
        out = self.lm(**batch)
        theirs, ours = wanted.softmax(-1), out.logits.log_softmax(-1)
        return out.loss + F.kl_div(ours, theirs, reduction="batchmean") / 12


class ValueHead(Habit):
    """A head of the user's own on the hidden states of the base model."""

    def __init__(self, adopted: bool, copies: int) -> None:
        super().__init__(adopted, copies)
        torch.manual_seed(4)
        self.head = nn.Linear(32, 1).double()

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.lm.model(input_ids=batch["input_ids"]).last_hidden_state
        return (self.head(hidden).squeeze(-1).mean(1) - 1).square().mean()


class ByHand(Habit):
    """Manual optimization with two optimizers."""

    def __init__(self, adopted: bool, copies: int) -> None:
        super().__init__(adopted, copies)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        head = list(self.lm.lm_head.parameters())
        rest = [p for n, p in self.lm.named_parameters() if "lm_head" not in n]
        return [torch.optim.AdamW(rest, 1e-3, eps=1e-5), torch.optim.SGD(head, 1e-1)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.lm(**batch).loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("loss", loss, sync_dist=True)


class Recomputes(Habit):
    """The model's own switch for recomputation."""

    def built(self, adopted: bool) -> Any:
        model = super().built(adopted)
        model.gradient_checkpointing_enable()
        return model


class Resized(Habit):
    """More tokens than the model had."""

    def built(self, adopted: bool) -> Any:
        torch.manual_seed(7)
        model = FAMILIES[self.family].build()
        model.resize_token_embeddings(72)
        return adopt(model) if adopted else model


class ResizedLate(Habit):
    """More tokens than the model had, after it was adopted."""

    def built(self, adopted: bool) -> Any:
        model = super().built(adopted)
        torch.manual_seed(7)
        model.resize_token_embeddings(72)
        return model


class Skips(Habit):
    """A step that leaves out the last two blocks."""

    options = {"num_hidden_layers": 4}

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        layers, self.lm.config.num_hidden_layers = self.lm.config.num_hidden_layers, 2
        try:
            return self.lm(**batch).loss
        finally:
            self.lm.config.num_hidden_layers = layers


class Evaluates(Habit):
    """Losses and perplexities of a validation, with metrics."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        out = self.lm(**batch)
        self.log("val_loss", out.loss, sync_dist=True)
        self.log("val_best", out.logits.max(-1).values.mean(), sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES["causal"]()[:8], batch_size=4 // self._copies)


class PartOfLogits(Habit):
    """Logits of the last two positions only."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.lm(input_ids=batch["input_ids"], logits_to_keep=2).logits
        return F.cross_entropy(logits[:, 0], batch["labels"][:, -1])


HABITS = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Habit) and kind is not Habit
}
