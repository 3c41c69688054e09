"""Programs that once did not hold, by subject, with what ranks say now.

A line is what a failing test prints: the shape that the program begins with, and its lines.
"""

from collections.abc import Mapping, Sequence

from tests.fuzz.grammar import Program
from tests.fuzz.subjects import Shape

Case = tuple[Shape, Program]

RIGHT: Mapping[str, Sequence[Case]] = {
    "tp": [
        ((3, 4), ("x = x * (x.stride() == t(3, 4).stride())",)),
        ((2, 3, 4), ("x = x.mT * (x.mT.stride() == t(2, 3, 4).mT.stride())",)),
        ((3, 4), ("x = torch.var(x, False)",)),
        ((1, 2, 8), ("x = x.std(False)",)),
        ((4, 2), ("x = torch.kron(x, t(2))",)),
        ((4, 2), ("torch.manual_seed(8); x = x.clone(); x.detach().normal_()",)),
        ((4, 2), ("torch.manual_seed(9); x = x * torch.empty_like(x).uniform_(0, 1)",)),
        (
            (2, 2, 4),
            (
                "x = x.swapaxes(0, 1)",
                "torch.manual_seed(9); x = x * torch.empty_like(x).uniform_(0, 1)",
            ),
        ),
        ((2, 3, 4), ("torch.manual_seed(9); x = x.mT * torch.rand_like(x.mT)",)),
    ],
    "cp": [
        ((2, 1, 3), ("x = x[..., :-1]", "x = torch.norm(x, dim=(0, 2))")),
        ((3, 6, 2), ("x = x.detach().requires_grad_() * 2 + x",)),
        ((2, 4, 4), ("x = (x * 1).view(-1, 4); x /= 2", "x = x.view(2, -1)")),
    ],
}
"""Programs that give what they give in one process."""

REFUSED: Mapping[str, Sequence[Case]] = {
    "tp": [
        ((4, 2), ("x = x.clone(); x.flatten()[:1].zero_()",)),
        ((4, 2), ("y = x.view(-1); y[:2] = 1.5",)),
    ],
    "cp": [
        ((2, 4, 4), ("x = x.clone(); x.flatten()[:1].zero_()",)),
        ((1, 2, 4), ("x = x.clone(); x.view(-1)[0] = -0.25",)),
        ((2, 5, 3), ("x = x.clone(); y = x.select(2, 0); y.zero_()",)),
        ((1, 2, 4), ("x = x.clone(); y = x.view(8); y.mul_(1.5)",)),
        ((2, 3, 4), ("x = x.clone(); y = x.mT; y[..., 0] = 0.5",)),
        ((1, 2, 4), ("x = x.clone(); y = x.detach().chunk(2, -2)[0]; y.add_(-0.25)",)),
        ((2, 5, 3), ("torch.manual_seed(8); x = x.clone(); x.detach().normal_()",)),
        ((1, 2, 4), ("x = x.clone(); x.unsqueeze_(-3)",)),
        ((1, 2, 4), ("x = x.clone(); x.unsqueeze_(-1)",)),
        ((1, 2, 4), ("x = x.clone(); x.squeeze_()",)),
        ((1, 2, 4), ("y = x.detach(); y.mul_(2); x = x + y",)),
        ((2, 4, 4), ("x = x.clone(); y = x[..., :-1]; y += 0.5",)),
        ((2, 5, 3), ("x = x.clone(); y = x[1:]; y.mul_(3)",)),
        (
            (2, 4, 4),
            ("x = x.clone(); torch.nn.init.constant_(x.detach(), 1.5); x = x * 2",),
        ),
        ((2, 4, 4), ("x = x.clone(); y = x.view(-1, 4); x.mul_(2); x = y + 1",)),
    ],
}
"""Programs that end in an error of ours on every rank."""
