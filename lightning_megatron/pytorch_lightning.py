"""``import lightning_megatron.pytorch_lightning``: ``pytorch_lightning`` is ``lightning.pytorch``.

For projects that import the package ``pytorch_lightning``, whose Trainer knows no strategy of this
package. The line stands before the first import of ``pytorch_lightning``, also before one that the
project makes, and holds for the process: both names then are the same modules with the same
classes, whether or not ``pytorch_lightning`` is installed, and ``lightning_fabric`` is
``lightning.fabric``. A message says so when one of them is imported. Names such as
``"megatron_zero_2"`` are known after it.

Raises:
    ConfigError: the other package has been imported before.
"""

import lightning_megatron.strategy.megatron  # noqa: F401 (registers the names)
from lightning_megatron._lightning.package_names import unite_names
from lightning_megatron.errors import ConfigError

if not unite_names():
    raise ConfigError(
        "import lightning_megatron.pytorch_lightning: pytorch_lightning or lightning_fabric has "
        "been imported before, by this script or by a package that it imports, and its classes are "
        "in use; nearest valid: this import as the first line of the script"
    )
