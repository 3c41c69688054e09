"""Options of expert parallelism: over how many ranks, and how tokens travel.

Everything here is arithmetic and imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

ExpertDispatch = Literal["auto", "once", "gather"]
"""Ways in which tokens reach the ranks of their experts."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Expert parallelism: over how many ranks experts are spread, and how tokens reach them."""

    degree: int
    """Ranks over which the experts of every `MixtureOfExperts` are spread. They are some of the
    ranks there are: ep divides dp_shard x cp x tp, and the number of experts."""
    dispatch: ExpertDispatch = "auto"
    """``once`` sends each token once to every rank that holds any of its experts; ``gather`` gives
    every rank all tokens; ``auto`` chooses by arithmetic and logs its choice."""

    def text(self) -> str:
        """Options as a message gives them.

        >>> ExpertConfig(degree=4, dispatch="once").text()
        "4 (dispatch='once')"
        """
        return f"{self.degree}" + (
            "" if self.dispatch == "auto" else f" (dispatch={self.dispatch!r})"
        )

    def problems(self) -> list[str]:
        """Faults of the options among themselves."""
        if self.dispatch in ("auto", "once", "gather"):
            return []  # of a degree tells `degrees.degree_problems`
        return [
            f"ep.dispatch={self.dispatch!r}: must be 'auto', 'once' or 'gather'; nearest valid: "
            "dispatch='auto'"
        ]
