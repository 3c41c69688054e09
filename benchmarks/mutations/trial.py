"""What becomes of one mutation: the tests chosen for it, and whether a failure counts."""

import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.mutations.choice import Step, path_of
from benchmarks.mutations.lane import Lane, Outcome

SURVIVED = "survived"
_NO_LIMIT = 1e9


@dataclass
class Trial:
    """All runs that one mutation needs."""

    lane: Lane
    path: str
    """The mutated file."""
    source: str
    """What it reads then."""
    budget: float
    """Processor seconds."""
    controls: dict[str, bool]
    """Which tests pass without a mutation, as far as it is known."""
    ran: dict[str, str] = field(default_factory=dict)
    distrusted: list[str] = field(default_factory=list)
    """Tests that fail without the mutation too, or did not fail again with it."""
    spent: float = 0.0

    def run(self, steps: Sequence[Step]) -> dict[str, Any]:
        """What becomes of the mutation."""
        begun = time.monotonic()
        result: dict[str, Any] = {"outcome": SURVIVED}
        self.lane.put(self.path, self.source)
        try:
            for step in steps:
                if outcome := self._try(step):
                    result = {"outcome": outcome.kind, "by": outcome.failed}
                    result["how"] = outcome.how.replace(f"{self.lane.tree}/", "")
                    break
        finally:
            self.lane.put(self.path)
        result |= {"ran": self.ran, "distrusted": self.distrusted}
        result["processor seconds"] = round(self.spent, 1)
        return result | {"seconds": round(time.monotonic() - begun, 1)}

    def _try(self, step: Step) -> Outcome | None:
        """The failure of a step that counts, if there is one."""
        end = self.spent + max((self.budget - self.spent) * step.share, 1.0)
        passed: list[str] = []
        failed: list[str] = []
        while True:
            found = self.lane.run(step, end - self.spent, skip={*passed, *failed})
            self.spent += found.used
            before = collections.Counter(map(path_of, passed))
            passed += found.passed
            after = collections.Counter(map(path_of, passed))
            for path, count in found.of.items():
                self.ran[path] = f"{after[path]} of {before[path] + count}"
            if not found.failed:
                return None
            if self._counts(step, found):
                return found
            failed.append(found.failed)
            self.distrusted.append(found.failed)
            if "::" not in found.failed:  # nothing to leave out: the whole step is of no use
                return None

    def _counts(self, step: Step, found: Outcome) -> bool:
        """Whether the mutation, and nothing else, makes the test fail."""
        test = found.failed
        one = replace(step, only=test, files=(path_of(test),))
        if "::" not in test:  # what failed was to import or to collect
            one = replace(step, only="none")
        if test not in self.controls:
            self.lane.put(self.path)
            self.controls[test] = not self.lane.run(one, _NO_LIMIT).failed
            self.lane.put(self.path, self.source)
        if not self.controls[test]:
            return False
        again = self.lane.run(one, _NO_LIMIT, patience=1 if found.kind == "killed" else 2)
        found.kind = again.kind
        return bool(again.failed)
