"""LightningCLI, in a file of its own, as only the command line needs jsonargparse."""

from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override


class BaseCLI(LightningCLI):
    """LightningCLI with public names for what a subclass needs."""

    @override
    def _parse_ckpt_path(self) -> None:
        # Private: `LightningCLI._parse_ckpt_path`. It reads hyper-parameters from a file, and
        # nothing from a directory.
        self.read_checkpoint_path()

    def read_checkpoint_path(self) -> None:
        """Take hyper-parameters into the configuration from the checkpoint at ``ckpt_path``."""
        super()._parse_ckpt_path()

    def parser_of(self, subcommand: str) -> LightningArgumentParser:
        """Return the parser of a subcommand's options.

        Private: `LightningCLI._subcommand_parsers`.
        """
        return self._subcommand_parsers[subcommand]

    def option(self, name: str) -> Any:
        """Return an option of the subcommand that runs, once classes were instantiated.

        Private: `LightningCLI._get`, on ``config_init``.
        """
        return self._get(self.config_init, name)
