"""AdamW with decoupled weight decay, and the global norm of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

_UPDATE_COUNT = "global_step"
_CHUNK = 1 << 15


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    With ``c1 = 1 - beta1^t`` and ``c2 = 1 - beta2^t`` an update is
    ``p -= lr * (m / c1 / (sqrt(v / c2) + eps) + weight_decay * p)``. One fused operation a parameter computes it: the
    primitive knows no bias correction, but ``m / c1 / (sqrt(v / c2) + eps)`` equals
    ``sqrt(c2) / c1 * m / (sqrt(v) + eps * sqrt(c2))``, so the corrections go into its lr, eps and decay.

    Args:
        params: float32 parameters, with unique names.
        betas: decay of the first and second moment, 0 to below 1; 0 keeps nothing of earlier steps.
        eps: added to the root of the second moment.
        weight_decay: decay of the parameters that `decays` selects; the others get none.
        weight_decay_include: rules (name, part of a name, or shell pattern) of parameters that decay in any case.
        weight_decay_exclude: rules of parameters that do not decay, unless included.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        weight_decay_include: Sequence[str] | None = None,
        weight_decay_exclude: Sequence[str] | None = None,
    ) -> None:
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"optimizer.betas {list(betas)} must be two numbers from 0 to below 1")
        if not eps > 0.0:
            raise ValueError(f"optimizer.eps {eps} must be greater than 0")
        if not weight_decay >= 0.0:
            raise ValueError(f"optimizer.weight_decay {weight_decay} must be at least 0")
        self.params = list(params)
        self.betas = (float(betas[0]), float(betas[1]))
        self.eps = float(eps)
        self.weight_decay = float(weight_decay)
        self.updates = 0
        include, exclude = weight_decay_include or (), weight_decay_exclude or ()
        self._decays = [decays(param, include, exclude) for param in self.params]
        self._first = [_zeros(f"adam_m.{param.name}", param) for param in self.params]
        self._second = [_zeros(f"adam_v.{param.name}", param) for param in self.params]
        self._kernel = ops.AdamWeightDecay()
        self._beta1, self._beta2 = _scalar(self.betas[0]), _scalar(self.betas[1])
        self._no_decay = _scalar(0.0)

    def step(self, grads: Sequence[Tensor], lr: float) -> None:
        """Updates every parameter in place from its gradient; ``grads`` is in the order of ``params``."""
        self.updates += 1
        for beta, moments in zip(self.betas, (self._first, self._second), strict=True):
            # The primitive adds (1 - beta) * (new - moment), which would leave rounding errors of the old moment.
            for moment in moments if beta == 0.0 else ():
                moment.set_data(Tensor(np.zeros(moment.shape, np.float32)))
        correction1 = 1.0 - self.betas[0] ** self.updates
        root2 = math.sqrt(1.0 - self.betas[1] ** self.updates)
        rate, eps = _scalar(lr * root2 / correction1), _scalar(self.eps * root2)
        decay = _scalar(self.weight_decay * correction1 / root2)
        for param, first, second, decaying, grad in zip(
            self.params, self._first, self._second, self._decays, grads, strict=True
        ):
            self._kernel(
                param, first, second, rate, self._beta1, self._beta2, eps, decay if decaying else self._no_decay, grad
            )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns ``adam_m.<param>``, ``adam_v.<param>`` and ``global_step`` (int64 [1], updates so far).

        The moments share memory with the optimizer: copy what has to outlive the next `step`.
        """
        state = {_UPDATE_COUNT: np.array([self.updates], np.int64)}
        return state | {moment.name: moment.asnumpy() for moment in (*self._first, *self._second)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes over what `state_dict` gave; names that the optimizer does not know are left alone.

        Raises:
            ValueError: a moment or the update count is missing, or a shape differs.
        """
        moments = (*self._first, *self._second)
        missing = [name for name in (_UPDATE_COUNT, *(moment.name for moment in moments)) if name not in state]
        if missing:
            raise ValueError(f"the optimizer state lacks {len(missing)} tensors: {', '.join(missing[:10])}")
        for moment in moments:
            if state[moment.name].shape != moment.shape:
                raise ValueError(
                    f"optimizer state {moment.name} has shape {state[moment.name].shape}; expected {moment.shape}"
                )
        for moment in moments:
            moment.set_data(Tensor(state[moment.name].astype(np.float32)))
        self.updates = int(np.asarray(state[_UPDATE_COUNT]).reshape(-1)[0])


def decays(param: Parameter, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> bool:
    """Tells whether weight decay applies: include rules win over exclude rules, and those over the default.

    By default biases and one-dimensional parameters (norms) do not decay. A rule matches a parameter by its name, by
    a part of it, or as a shell pattern.
    """

    def matches(rules: Sequence[str]) -> bool:
        return any(rule in param.name or fnmatchcase(param.name, rule) for rule in rules)

    if matches(include):
        return True
    return not matches(exclude) and len(param.shape) > 1 and not param.name.endswith(".bias")


def global_norm(grads: Iterable[Tensor]) -> float:
    """Returns the Euclidean norm of all gradients together.

    Dot products over chunks on the host: ten times cheaper than device reductions on a CPU, and, summed in float64,
    exact enough for any size.
    """
    total = 0.0
    for grad in grads:
        flat = grad.asnumpy().reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            total += float(np.dot(chunk, chunk))
    return math.sqrt(total)


def clip_by_norm(grads: Sequence[Tensor], norm: float, max_norm: float) -> Sequence[Tensor]:
    """Scales gradients whose global norm is ``norm`` down to ``max_norm``; 0 or less means no clipping."""
    if max_norm <= 0 or norm <= max_norm:
        return grads
    factor = _scalar(max_norm / norm)
    return [grad * factor for grad in grads]


def _zeros(name: str, like: Parameter) -> Parameter:
    return Parameter(Tensor(np.zeros(like.shape, np.float32)), name=name, requires_grad=False)


def _scalar(value: float) -> Tensor:
    return Tensor(value, ms.float32)
