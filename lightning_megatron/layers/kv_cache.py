"""Cache of the keys and values of earlier positions.

A decoder that writes one token at a time attends to all earlier ones. Their keys and values do not
change, so each is computed once and kept: ``2 * layers * kv_heads * head_dim`` numbers per token,
of which a tp rank keeps those of its own heads. `LatentAttention` keeps its latents in their place,
which are smaller and whole on every tp rank. Without the cache, writing ``n`` tokens costs
``n^2 / 2`` passes of a token through the network instead of ``n``.

Legend: b batch, s sequence, n heads, d head dim.
"""

from torch import Tensor, nn


class KeyValueCache:
    """Keys and values of each attention layer, for one batch of sequences.

    Args:
        length: number of positions for which memory is allocated, all at once.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._kept: dict[nn.Module, tuple[Tensor, Tensor, int]] = {}

    def extend(self, layer: nn.Module, k_bsnd: Tensor, v_bsnd: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new positions; return those of all positions so far.

        Args:
            layer: attention layer that computed them.
            k_bsnd: keys of the new positions, after the rotary embedding.
            v_bsnd: values of the new positions.
        """
        if layer not in self._kept:
            keys, values = (
                x.new_empty(x.shape[0], self._length, *x.shape[2:]) for x in (k_bsnd, v_bsnd)
            )
            self._kept[layer] = keys, values, 0
        keys, values, used = self._kept[layer]
        end = used + k_bsnd.shape[1]
        keys[:, used:end] = k_bsnd
        values[:, used:end] = v_bsnd
        self._kept[layer] = keys, values, end
        return keys[:, :end], values[:, :end]
