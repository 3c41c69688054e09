"""Templates of lines with a tensor ``x``; `tests.fuzz.grammar` fills their blanks.

One line here is one way in which users write something. Forms of a call are different lines, as an
argument by place and by name takes different ways through the rules. ``;;`` ends a line.
"""

from collections.abc import Mapping

TEMPLATES: Mapping[str, tuple[int, str]] = {
    "elementwise": (
        6,
        """
        x.{unary}()
        torch.{unary}(x)
        F.{activation}(x)
        x.abs().add(1).log()
        (x.abs() + {n}.__abs__()).rsqrt()
        x ** 2
        x.square().add(1).sqrt()
        torch.exp(-x.abs())
        x {op} {o}
        {o} {op} x
        x / ({o} + 3)
        torch.add(x, {o}, alpha={n})
        x.sub({o}, alpha=2)
        torch.rsub(x, {n})
        x.mul({o})
        torch.maximum(x, {t})
        torch.minimum({t}, x)
        x.fmax({t})
        torch.atan2(x, {t})
        torch.hypot(x, {t})
        torch.logaddexp(x, {t})
        torch.copysign(x, {t})
        torch.xlogy({t}, x.abs() + 1)
        x.remainder({n})
        torch.fmod(x, {n})
        torch.lerp(x, {like}, 0.3)
        x.lerp({like}, {like})
        torch.addcmul(x, {t}, {t}, value=0.5)
        torch.addcdiv({like}, x, {t}.abs() + 1)
        x.clamp({n})
        x.clamp(min=-0.5, max=0.5)
        x.clamp({t})
        x.clamp(min={t}, max={t}.abs() + 1)
        torch.clamp(x, max={n})
        torch.where({mask}, x, {n})
        torch.where({mask}, {t}, x)
        torch.where(x > 0, x, {like})
        x.where({mask}, {t})
        x.masked_fill({mask}, {n})
        x.masked_fill(x < 0, 0.25)
        torch.masked_fill(x, {mask}, torch.tensor(2.0, dtype=x.dtype))
        torch.heaviside(x, {t})
        torch.isclose(x, {t}).double()
        (x {comparison} {o}).double()
        ((x > 0) & (x < {n})).double()
        (~(x > 0)).double()
        torch.logical_or(x > 0, {mask}).double()
        x.pow({k})
        torch.pow(x.abs() + 0.5, {t})
        2.0 ** x.clamp(-3, 3)
        x * x.detach()
        x - x0.sum()
        x + x.{unary}()
        F.threshold(x, 0.1, 0.0)
        F.prelu(x, p(1))
        F.hardtanh(x, min_val=-0.4, max_val=0.4)
        F.leaky_relu(x, 0.2)
        F.gelu(x, approximate="tanh")
        F.softplus(x, beta=2)
        torch.nan_to_num(x.masked_fill({mask}, float("inf")), posinf=2.0)
        torch.polar(x.abs() + 1, x).real
        torch.special.entr(x.sigmoid())
        torch.lgamma(x.abs() + 1)
        torch.gradient(x, dim={d})[0]
        """,
    ),
    "formats": (
        1,
        """
        x.float().double()
        x.to(torch.float32) * 2
        x.double()
        x.type(torch.float64)
        x.round().long().double()
        x.to({like})
        x.type_as({like})
        x.int().to(torch.float64) + x
        torch.zeros_like(x) + x
        torch.ones_like(x, dtype=torch.float64) * x
        torch.full_like(x, {n}) - x
        x.new_zeros(x.shape) + x
        x.new_ones(len(x))
        x.new_full((2, 3), {n}) * x.sum()
        x.detach().requires_grad_() * 2 + x
        torch.tensor(x.detach().tolist(), dtype=torch.float64)
        torch.from_numpy(x.detach().numpy().copy()) + x
        torch.zeros(x.shape, dtype=x.dtype).copy_(x)
        torch.empty_like(x).fill_({n}) + x
        torch.is_tensor(x) * x
        torch.complex(x, x).abs()
        torch.view_as_real(torch.complex(x, -x)).sum(-1)
        """,
    ),
    "reductions": (
        6,
        """
        x.{reduction}({along})
        torch.{reduction}(x, {along})
        x.{pair}({d}{keep})[0]
        torch.{pair}(x, {d}{keep}).values
        x.{pair}(dim={d}{keep}).indices.double()
        x.{pair}()
        x.argmax({at}{keep}).double()
        torch.argmin(x, {at}{keep}).double()
        x.argmax().double()
        x.{spread}({correction})
        torch.{spread}(x, {correction})
        torch.{spread}_mean(x, {correction})[{bit}]
        (x > {n}).any({along}).double()
        (x > {n}).all({along}).double()
        (x > {n}).sum({along}).double()
        torch.norm(x, dim={ds})
        x.norm({order}, {ds})
        x.norm({order})
        x.norm(p={order}, dim={ds}, keepdim=True)
        torch.linalg.vector_norm(x, {order})
        torch.linalg.vector_norm(x, {order}, {ds}{keep})
        torch.linalg.norm(x)
        torch.linalg.norm(x, dim={ds})
        torch.linalg.matrix_norm(x)
        x.cumsum({d})
        torch.cumprod(x, dim={d})
        torch.cummax(x, {d})[0]
        x.cummin(dim={d}).values
        torch.logcumsumexp(x, {d})
        torch.diff(x, dim={d})
        torch.diff(x, n=1, dim={d}, prepend={like})
        torch.trapezoid(x, dim={d})
        torch.quantile(x, 0.4, dim={d}{keep})
        x.quantile(0.5)
        torch.aminmax(x, dim={d}{keep}).max
        torch.aminmax(x).min
        x.sort({d}).values
        x.sort({d}, True)[0]
        torch.sort(x, dim={d}, descending=True).indices.double()
        x.argsort({d}).double()
        torch.argsort(x, dim={d}, descending=True, stable=True).double()
        x.topk({k}).values
        x.topk({k}, {d})[0]
        torch.topk(x, {k}, dim={d}, largest=False).values
        x.topk({k}, -1).indices.double()
        x.kthvalue({k}, {d}{keep}).values
        torch.msort(x)
        x.softmax({d})
        F.softmax(x, dim={d})
        torch.softmax(x, {d}, dtype=torch.float64)
        F.log_softmax(x, {d})
        x.log_softmax(dim={d})
        F.softmin(x, dim={d})
        F.normalize(x)
        F.normalize(x, dim={d})
        F.normalize(x, p=1.0, dim={d})
        torch.renorm(x, 2, {d}, 0.5)
        x.logsumexp({ds}{keep})
        x.unique().sum()
        torch.bincount(x.round().abs().long().flatten(), minlength=4).double()
        torch.histc(x.detach(), 4, -1, 1)
        x.std(dim={d}, keepdim=True) + x.mean({d}, True)
        x.max() - x.min()
        torch.max(x, {like})
        torch.min(x, x.detach() * {n})
        """,
    ),
    "views": (
        5,
        """
        x.view({shape})
        x.view(({shape}))
        x.reshape({shape})
        torch.reshape(x, ({shape},))
        x.view(x.size(0), -1)
        x.reshape(-1, x.size(-1))
        x.reshape(x.shape[0] * x.shape[1], -1)
        x.view(*x.shape[:-1], -1, 2)
        x.view_as({like})
        x.flatten()
        x.flatten({d})
        torch.flatten(x, {d}, {d})
        x.flatten(start_dim={d})
        x.unflatten({d}, (-1, 2))
        x.unflatten(-1, (2, -1))
        x.ravel()
        x.transpose({d}, {d})
        torch.transpose(x, {d}, {d})
        x.mT
        x.T
        x.t()
        x.permute({perm})
        x.permute(*{perm})
        torch.permute(x, {perm})
        x.movedim({d}, {d})
        torch.moveaxis(x, {d}, {d})
        x.swapaxes({d}, {d})
        x.unsqueeze({d})
        x.unsqueeze(-1)
        torch.unsqueeze(x, dim={d})
        x.squeeze()
        x.squeeze({d})
        torch.squeeze(x, {ds})
        x.unsqueeze({d}).expand({grown})
        x.unsqueeze(0).expand(2, *x.shape)
        x.unsqueeze(0).expand(3, {keeps})
        x[None].expand(2, {keeps}).clone()
        x[:1].expand_as({like})
        torch.broadcast_to(x, (2, *x.shape))
        x.repeat({repeats})
        x.tile(2)
        torch.tile(x, ({repeats},))
        x.repeat_interleave(2, {d})
        x.repeat_interleave(2)
        torch.repeat_interleave(x, 2, dim={d})
        torch.cat([x, x], {d})
        torch.cat((x, {like}), dim={d})
        torch.cat([{like}, x * 2], {d})
        torch.concat([x.detach(), x], {d})
        torch.stack([x, x.{unary}()])
        torch.stack([x, {like}], {d})
        torch.stack((x, -x), dim=-1)
        torch.hstack([x, x])
        torch.vstack([x, {like}])
        torch.dstack([x, x])
        x.split({k}, {d})[0]
        x.split({k}, dim={d})[-1]
        torch.split(x, [1, x.size({d}) - 1], {d})[1]
        x.chunk(2, {d})[1]
        x.chunk(3, dim={d})[0]
        torch.chunk(x, 2, dim=-1)[0]
        x.tensor_split(2, {d})[1]
        x.tensor_split((1,), dim={d})[0]
        x.unbind({d})[0]
        torch.unbind(x)[-1]
        x.select({d}, {at_0})
        x.narrow({d}, 0, {k})
        torch.narrow(x, {d}, 1, 1)
        torch.roll(x, 1, {d})
        x.roll(1)
        torch.roll(x, (1, 2), dims=(0, {d}))
        x.flip({d})
        torch.flip(x, ({d},))
        torch.fliplr(x)
        torch.rot90(x, 1, (0, 1))
        x.unfold({d}, 2, 1)
        x.diagonal(dim1=0, dim2=-1)
        torch.diagonal(x, 0, -2, -1)
        torch.diag_embed(x)
        x.tril()
        torch.triu(x, diagonal=1)
        F.pad(x, (1, 1))
        F.pad(x, (0, 1), value={n})
        torch.atleast_3d(x)
        x.as_strided((2, 2), (2, 1))
        torch.block_diag(x, x)
        torch.meshgrid(x.flatten(), t(2), indexing="ij")[0]
        torch.broadcast_tensors(x, t())[0]
        sum(x)
        torch.stack(list(x))
        torch.cat([row * 2 for row in x])
        torch.stack(x.unbind({d}), {d})
        """,
    ),
    "indices": (
        5,
        """
        x[{index}]
        x[{index}, {index}]
        x[..., {index}]
        x[{index}, ..., None]
        x[:, {index}]
        x[{mask_index}]
        x[x > 0]
        x[x.argmax(0)[..., 0]]
        x.gather({d}, i(x.size({d_same}), *x.shape))
        x.gather({d}, i(2, *x[..., :1].shape))
        torch.gather(x, dim={d}, index=x.argsort({d}))
        torch.take_along_dim(x, x.argsort({d}), {d})
        torch.take_along_dim(x, i(2, *x.shape), dim={d})
        x.take(i(x.numel(), 3))
        x.index_select({d}, i(2, 3))
        torch.index_select(x, dim={d}, index=i(2, 2))
        x.scatter({d}, i(2, *x.shape), {n})
        x.scatter({d}, i(2, *x[:1].shape), {like})
        torch.scatter(x, {d}, x.argmax({d}, keepdim=True), {n})
        x.scatter_add({d}, i(2, *x.shape), {like})
        torch.zeros_like(x).scatter_add({d}, i(2, *x.shape), x)
        t(*x.shape).scatter({d}, i(2, *x.shape), x)
        x.scatter_reduce({d}, i(2, *x.shape), {like}, reduce="amax")
        x.index_add({d}, i(2, 1), x.narrow({d}, 0, 1))
        torch.zeros(x.shape, dtype=x.dtype).index_add(0, i(2, len(x)), x)
        x.index_fill({d}, i(2, 1), {n})
        x.index_copy({d}, i(2, 1), x.narrow({d}, 0, 1) * 2)
        x.masked_scatter({mask}, {like})
        x.masked_select({mask})
        x.masked_select(x > 0)
        x.index_put((i(2, 2),), torch.tensor({n}, dtype=x.dtype))
        x.put(i(x.numel(), 2), t(2))
        torch.searchsorted(x.detach().sort(-1).values, {like}).double()
        torch.searchsorted(t(4).sort().values, x.detach().contiguous()).double()
        torch.bucketize(x, t(3).sort().values).double()
        (x > 0).nonzero().double()
        torch.argwhere(x > 0).double()
        torch.nonzero(x > {n}, as_tuple=True)[0].double()
        F.one_hot(x.argmax({at})).double()
        F.embedding(x.argmax({at}), p(8, 2))
        p(8, 2)[x.argmax({at})]
        t(*x.shape)[x > 0]
        torch.isin(x.round(), torch.tensor([0.0, 1.0], dtype=x.dtype)).double()
        x.select_scatter(x.select({d}, 0) * 2, {d_same}, 0)
        x.slice_scatter(x.narrow(0, 0, 1) * 2, 0, 0, 1)
        x.diff(dim={d})
        """,
    ),
    "products": (
        4,
        """
        x @ {right}
        {left} @ x
        torch.matmul(x, {right})
        x @ x.mT
        x.mT @ x
        x @ x.detach().mT
        F.linear(x, {rows})
        F.linear(x, {rows}, p(3))
        torch.bmm(x, x.mT)
        torch.mm(x, {right})
        torch.einsum("...i,...i->...", x, {like})
        torch.einsum("...ij,...kj->...ik", x, x)
        torch.einsum("...i,ij->...j", x, {right})
        torch.einsum("b...->...", x)
        torch.einsum("i...,i...->...i", x, x)
        torch.tensordot(x, {like}, dims=([-1], [-1]))
        torch.inner(x, {like})
        torch.outer(x.flatten()[:3], t(2))
        torch.dot(x.flatten(), {like}.flatten())
        torch.mv(x, t(x.size(-1)))
        torch.addmm(t(3), x, t(x.size(-1), 3))
        torch.baddbmm(x @ x.mT, x, x.mT, alpha=0.5)
        torch.cdist(x, x.detach() + 1)
        torch.cdist(x, {like}, p=1)
        F.cosine_similarity(x, {like}, dim={d})
        F.pairwise_distance(x, {like})
        torch.kron(x, t(2))
        torch.linalg.multi_dot([x, {right}, t(3, 2)])
        torch.cov(x)
        torch.corrcoef(x)
        torch.linalg.cross(x[..., :3], t(3))
        F.layer_norm(x, x.shape[-1:])
        F.layer_norm(x, x.shape[-1:], p(x.size(-1)), p(x.size(-1)))
        F.layer_norm(x, x.shape[1:])
        F.rms_norm(x, (x.size(-1),))
        F.rms_norm(x, x.shape[-1:], weight=p(x.size(-1)))
        F.group_norm(x, x.size(1))
        F.batch_norm(x, None, None, training=True)
        F.instance_norm(x)
        F.glu(x)
        F.glu(x, {d})
        F.avg_pool1d(x, 2)
        F.max_pool1d(x, 2, stride=1)
        F.adaptive_avg_pool1d(x, 2)
        F.interpolate(x, scale_factor=2)
        F.conv1d(x, t(2, x.size(1), 1))
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, {like}, x, is_causal=True)
        F.bilinear(x, {like}, t(2, x.size(-1), x.size(-1)))
        F.dropout(x, 0.5, training=False)
        F.dropout(x, p=0.0)
        nn.Identity()(x)
        nn.Softmax(dim={d})(x)
        nn.Flatten()(x)
        nn.LayerNorm(x.size(-1), dtype=x.dtype)(x)
        """,
    ),
    "losses": (
        3,
        """
        F.cross_entropy(x, {classes}{options})
        F.cross_entropy(x.mT, i(x.size(-1), *x.shape[:-1]){options})
        F.cross_entropy(x.reshape(-1, x.size(-1)), i(x.size(-1), x.numel() // x.size(-1)){options})
        F.cross_entropy(x, {like}.softmax(1){reduced})
        F.cross_entropy(x, {like}.softmax(1), label_smoothing=0.1)
        F.cross_entropy(x, {classes}, weight=t(x.size(1)).abs(){reduced})
        F.cross_entropy(x, {classes}, t(x.size(1)).abs(), None, 0{reduced})
        F.nll_loss(x.log_softmax(1), {classes}{reduced})
        F.nll_loss(F.log_softmax(x, dim=1), {classes}, weight=t(x.size(1)).abs(), ignore_index=1)
        nn.CrossEntropyLoss(label_smoothing=0.2)(x, {classes})
        nn.NLLLoss(reduction="sum")(x.log_softmax(1), {classes})
        F.mse_loss(x, {like}{reduced})
        F.mse_loss({like}, x{reduced})
        F.l1_loss(x, {like}{reduced})
        F.smooth_l1_loss(x, {like}{reduced})
        F.huber_loss(x, {like}, delta=0.5{reduced})
        F.binary_cross_entropy_with_logits(x, {mask_like}.double(){reduced})
        F.binary_cross_entropy_with_logits(x, {like}.sigmoid(), weight={t}.abs())
        F.binary_cross_entropy_with_logits(x, {like}.sigmoid(), pos_weight=t(x.size(-1)).abs())
        F.binary_cross_entropy(x.sigmoid(), {like}.sigmoid(){reduced})
        F.kl_div(x.log_softmax(-1), {like}.softmax(-1){reduced})
        F.kl_div(x.log_softmax(-1), {like}.log_softmax(-1), log_target=True, reduction="batchmean")
        F.kl_div({like}.log_softmax(-1), x.softmax(-1), reduction="sum")
        F.cosine_embedding_loss(x, {like}, torch.ones(len(x)))
        F.margin_ranking_loss(x, {like}, {like}.sign())
        F.multi_margin_loss(x, {classes})
        F.multilabel_soft_margin_loss(x, {mask_like}.double())
        F.soft_margin_loss(x, {like}.sign(){reduced})
        F.hinge_embedding_loss(x, {like}.sign())
        F.triplet_margin_loss(x, {like}, x.detach() + 1)
        F.poisson_nll_loss(x, {like}.abs(){reduced})
        F.gaussian_nll_loss(x, {like}, {like}.abs() + 1)
        D.Categorical(logits=x).log_prob(i(x.size(-1), *x.shape[:-1]))
        D.Categorical(logits=x).entropy()
        D.Categorical(probs=x.softmax(-1)).log_prob(i(x.size(-1), *x.shape[:-1]))
        D.kl_divergence(D.Categorical(logits=x), D.Categorical(logits={like}))
        D.OneHotCategorical(logits=x).entropy()
        D.Normal(x, 1.0).log_prob({like})
        D.Normal({like}, x.exp()).entropy()
        D.kl_divergence(D.Normal(x, 1.0), D.Normal({n}, 2.0))
        D.Independent(D.Normal(x, 1.0), 1).log_prob({like})
        D.Bernoulli(logits=x).log_prob({mask_like}.double())
        D.Bernoulli(logits=x).entropy()
        D.Laplace(x, 1.5).log_prob({like})
        D.Beta(x.exp(), x.exp() + 1).log_prob({like}.sigmoid())
        D.Dirichlet(x.exp()).entropy()
        D.Gamma(x.exp(), 1.0).log_prob({like}.exp())
        D.Poisson(x.exp()).log_prob({like}.abs().round())
        D.MultivariateNormal(x, torch.eye(x.size(-1), dtype=x.dtype)).log_prob({like})
        """,
    ),
}
"""Expressions by groups, each with a weight; a line of the form ``x = ...`` is made of them."""

STATEMENTS: Mapping[str, tuple[int, str]] = {
    "in place": (
        4,
        """
        x = x * 1; x[{index}] = {n}
        x = x.clone(); x[{index}, {index}] = {n}
        x = x.clone(); x[..., {index}] = torch.tensor({n}, dtype=x.dtype)
        x = x.clone(); x[{index}] = t(*x[{index_same}].shape)
        x = x.clone(); x[{index}] = p(*x[{index_same}].shape)
        x = x.clone(); x[{index}] = x[{index_same}].detach() * 2
        x = x.clone(); x[{mask_index}] = {n}
        x = x.clone(); x[x > 0] = {n}
        x = x.clone(); x[{index}] += {n}
        x = x.clone(); x[..., {index}] *= {n}
        x = x.clone(); x[{index}] -= t(*x[{index_same}].shape)
        x = x.clone(); x += {o}
        x = x.clone(); x *= {t}
        x = x * 2; x -= {n}
        x = x * 2; x /= {n}
        x = x.clone(); x.mul_({t})
        x = x.clone(); x.add_({like}, alpha={n})
        x = x.clone(); x.clamp_({n})
        x = x.clone(); x.fill_({n})
        x = x.clone(); x.zero_()
        x = x.clone(); x.masked_fill_({mask}, {n})
        x = x.clone(); x.copy_({like})
        x = x.clone(); x.copy_(p(x.size(-1)))
        x = x * 1; x.relu_()
        x = x * 1; x.sigmoid_().mul_(2)
        x = x * 1; x.lerp_({like}, 0.5)
        x = x * 1; x.addcmul_({like}, {t}, value={n})
        x = x.clone(); x.cumsum_({d})
        x = x.clone(); x.index_fill_({d}, i(2, 1), {n})
        x = x.clone(); x.index_add_({d}, i(2, 1), t(*x.narrow({d_same}, 0, 1).shape))
        x = x.clone(); x.scatter_({d}, i(2, *x.shape), {n})
        x = x.clone(); x.index_copy_({d}, i(2, 1), t(*x.narrow({d_same}, 0, 1).shape))
        x = x.clone(); x.masked_scatter_({mask}, {like})
        x = x.clone(); x.transpose_({d}, {d})
        x = x.clone(); x.unsqueeze_({d})
        x = x.clone(); x.squeeze_()
        x = x.clone(); x.tril_()
        x = x.clone(); y = x[{index}]; y.mul_({n})
        x = x.clone(); y = x[..., {index}]; y += {n}
        x = x.clone(); y = x.view(-1); y[:2] = {n}
        x = x.clone(); y = x.view({shape}); y.mul_({n})
        x = x.clone(); y = x.mT; y[..., 0] = {n}
        x = x.clone(); y = x.select({d}, 0); y.zero_()
        x = x.clone(); y = x.detach().chunk(2, {d})[0]; y.add_({n})
        x = x.clone(); y = x.detach().unbind({d})[0]; y.fill_({n})
        x = x.clone(); y = x.detach(); y.mul_(2); x = x + y
        x = x.clone(); x.data.mul_({n})
        x = x.clone(); x.detach()[{index}] = {n}
        x = x.clone(); x.view(-1)[0] = {n}
        x = x.clone(); x.flatten()[:1].zero_()
        y = t(*x.shape); y[:1] = x[:1]; x = y
        y = t(*x.shape); y += x; x = y
        y = t(*x.shape); y.copy_(x); x = y
        y = x * 1; x = F.relu(y, inplace=True) + y
        x = F.leaky_relu(x * 1, 0.1, inplace=True)
        x = x.clone(); torch.nn.init.constant_(x.detach(), {n}); x = x * 2
        """,
    ),
    "numbers": (
        2,
        """
        x = x * x.sum().item()
        x = x / (1 + float(x.abs().max()))
        x = x + int(x.argmax())
        x = x * x.detach().flatten()[0].item()
        x = x / len(x)
        x = x / x.numel()
        x = x * x.size({d})
        x = x * x.shape[{d}]
        x = x + x.dim() + x.ndim + x.nelement()
        x = x if (x > {n}).any() else -x
        x = x if bool((x > 0).all()) else x * 2
        x = x * x.sum().tanh().tolist()
        x = x[:max(1, int((x > 0).sum()) % 2)]
        x = x * torch.equal(x, x0)
        x = x + x.allclose({like})
        x = x * (x.stride() == {like}.stride())
        x = x * x.is_contiguous()
        x = x * (x.mT.shape == {like}.mT.shape)
        x = torch.tensor([*x.shape, x.nbytes])
        x = torch.tensor(x.sum().item()) * x
        x = x * sum(v.item() for v in x.flatten()[:3])
        x = x + sum(x.shape)
        x = torch.ones(x.shape).double() * x.max()
        x = x * (0.5 in x.round())
        """,
    ),
    "detached": (
        2,
        """
        with torch.no_grad(): y = x.{unary}(); z = y.mean()
        y = x.detach().{reduction}({along}); x = x * y
        y = x.detach(); x = x - y.amax({d}, keepdim=True)
        with torch.no_grad(): y = x.softmax({d}) ;; x = x * y
        with torch.no_grad(): y = x.mean({d}, keepdim=True) ;; x = x - y
        y = x.{reduction}({along}); x = (y * t(*y.shape)).sum() + x
        y = x.{unary}(); x = x * y + y.detach()
        y = x.sum({d}, keepdim=True); x = x / (1 + y.abs())
        y = x; x = x * 2; x = torch.where(y > 0, x, y)
        y, z = x.{pair}({d}); x = y * z
        a, b = x.chunk(2, {d}); x = a * b.sigmoid()
        a, *b = x.split({k}, {d}); x = a + sum(part.sum() for part in b)
        y = x.reshape({shape}); x = y.sum() * x
        torch.manual_seed(3); x = x + torch.randn_like(x)
        torch.manual_seed(3); x = x * torch.rand_like(x)
        torch.manual_seed(4); x = x + torch.randn(x.shape, dtype=x.dtype)
        torch.manual_seed(5); x = x + torch.bernoulli(torch.full_like(x, 0.5))
        torch.manual_seed(6); x = x[torch.randperm(len(x))]
        torch.manual_seed(7); x = torch.multinomial(x.softmax(-1), 2).double()
        torch.manual_seed(8); x = x.clone(); x.detach().normal_()
        torch.manual_seed(9); x = x * torch.empty_like(x).uniform_(0, 1)
        torch.manual_seed(9); x = torch.normal(x.detach(), 1.0) + x
        torch.manual_seed(9); x = F.gumbel_softmax(x, dim={d})
        torch.manual_seed(9); x = D.Categorical(logits=x).sample().double()
        torch.manual_seed(9); x = D.Normal(x, 1.0).rsample()
        """,
    ),
}
"""Whole lines by groups."""
