"""Sentences about options of optimizers that are out of range."""


def at_least(low: float, **values: float) -> list[str]:
    """Problems of ``values`` below ``low``.

    >>> at_least(0.0, lr=-1.0)
    ['lr=-1.0: must be at least 0.0; nearest valid: lr=0.0']
    """
    return [
        f"{name}={value}: must be at least {low}; nearest valid: {name}={low}"
        for name, value in values.items()
        if not value >= low
    ]


def below_one(**values: float) -> list[str]:
    """Problems of ``values`` outside of [0, 1).

    >>> below_one(momentum=1.0)
    ['momentum=1.0: must lie in [0, 1); nearest valid: momentum=0.99']
    """
    return [
        f"{name}={value}: must lie in [0, 1); "
        f"nearest valid: {name}={'0.0' if value < 0 else '0.99'}"
        for name, value in values.items()
        if not 0.0 <= value < 1.0
    ]
