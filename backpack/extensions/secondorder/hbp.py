"""Kronecker-factored curvature: KFAC, KFLR, KFRA, and the family they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from backpack.core.engine.extracted import GRAMS, IDENTITY, INPUT_FACTORS, JOINT_FACTORS
from backpack.core.engine.products import Products
from backpack.core.engine.propagations import (
    BatchAveraged,
    EmpiricalFactor,
    ExactFactor,
    InputsAlone,
    Propagation,
    SampledFactor,
)
from backpack.core.engine.results import Factors
from backpack.extensions.curvature import Curvature
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.utils.warning import warn

Approximation = Literal["expand", "reduce"] | None
# Larger Kronecker factors than these, 1 GiB in single precision, are diagonal by default.
MAX_FACTOR_SIZE = 2**14
Fisher = Literal["sampled", "exact", "empirical", "inputs"]


class LossHessianStrategy:
    """What starts at the loss: the exact factor, sampled gradients, or the sum over the batch.

    ``EMPIRICAL`` are gradients at the targets, ``NONE`` goes with the backward strategy of
    that name. ``SUM`` is another name of ``AVERAGE``: the Hessian of a mean is the average.
    """

    EXACT = "EXACT"
    SAMPLING = "SAMPLING"
    EMPIRICAL = "EMPIRICAL"
    NONE = "NONE"
    AVERAGE = "AVERAGE"
    SUM = AVERAGE


class BackpropStrategy:
    """What travels back: a factor for each sample, a matrix averaged over the batch, or nothing."""

    SQRT = "SQRT"
    BATCH_AVERAGE = "BATCH_AVERAGE"
    NONE = "NONE"


class ExpectationApproximation:
    """How the expectation of a Kronecker product becomes one: a product of expectations."""

    BOTEV_MARTENS = "BOTEV_MARTENS"


STRATEGIES: dict[str, tuple[str, str]] = {
    "sampled": (LossHessianStrategy.SAMPLING, BackpropStrategy.SQRT),
    "exact": (LossHessianStrategy.EXACT, BackpropStrategy.SQRT),
    "empirical": (LossHessianStrategy.EMPIRICAL, BackpropStrategy.SQRT),
    "inputs": (LossHessianStrategy.NONE, BackpropStrategy.NONE),
}


def strategies(fisher: str, mc_samples: int) -> tuple[str, str]:
    """Return what starts at the loss and what travels back, for a kind of Fisher information.

    Raises:
        ValueError: If there is no such kind, or nothing is drawn but a number of draws is given.
    """
    if fisher not in STRATEGIES:
        raise ValueError(f"fisher is one of {', '.join(map(repr, STRATEGIES))}, got {fisher!r}.")
    if fisher != "sampled" and mc_samples != 1:
        raise ValueError(
            f"mc_samples={mc_samples!r} is for fisher='sampled': fisher={fisher!r} draws nothing."
        )
    return STRATEGIES[fisher]


class HBP(SecondOrderBackpropExtension):
    r"""Kronecker factors of the GGN, in the order of the parameter's axes; saved in ``hbp``.

    .. math:: \sum_n J_n^\top H_n J_n \approx B \otimes A

    A weight ``[O, I]`` has ``[B, A]``, with B from what travels back and A from the inputs. That of
    an embedding ``[W, D]`` has the input, W tokens, as its first axis: ``[A, B]``. Any other
    parameter has its whole block ``[B]`` or, if that is large, a factor for each axis.

    Of a factor ``[D, D]`` with D larger than ``max_factor_size`` (a vocabulary), there is the
    diagonal alone: a vector ``[D]`` stands for a diagonal matrix, here, in
    :mod:`backpack.utils.kroneckers` and in :class:`backpack.optim.KFAC`. That of an embedding is
    diagonal anyway, but for ``"reduce"``.

    Where a weight is used at T positions (pixels, tokens) of N samples, ``approximation`` chooses
    what they are to the Kronecker product. With ``a_nt`` the inputs and ``b_nt`` the columns that
    arrive (which carry the scale of the loss), summed over columns:

    - None: ``B = sum_n (sum_t b_nt) (sum_t b_nt)ᵀ``, ``A = 1/N sum_nt a_nt a_ntᵀ``. The convention
      of this interface; exact for a single position and a linear network.
    - ``"expand"``: ``B = sum_nt b_nt b_ntᵀ``, ``A = 1/(N T) sum_nt a_nt a_ntᵀ``. Positions are
      further samples. Exact for linear networks whose loss has a term (of the same curvature) for
      each position, which depends on that position of the input alone: the case of language
      models. A bias, which has no A, has ``[B]`` with this B. Positions of linear layers whose
      target the loss ignores (``ignore_index``, or rows that it does not choose) are no samples: A
      is the average over the others, and over those that others look at, so that something arrives
      there. A position counts at which nothing arrives for another reason, such as dead units. What
      cannot be known is an error: which positions of a layer belong to ignored targets, if there
      are not as many, or they are in another order. For ``fisher="inputs"``, which looks at no
      loss, all positions count, and so do those of other layers: embeddings, convolutions,
      recurrent layers and attention.
    - ``"reduce"``: ``B = sum_n (sum_t b_nt) (sum_t b_nt)ᵀ``,
      ``A = 1/(N T²) sum_n (sum_t a_nt) (sum_t a_nt)ᵀ``. Exact for linear networks that sum or
      average over the positions before the loss, such as an image classifier with global average
      pooling. Of a weight that is used several times, positions of all uses count together; where
      samples have different numbers of positions, T is that of the sample.

    With ``joint_bias=True``, a weight of a linear layer or a convolution and its bias have one pair
    of factors, saved at the weight: A is that of ``[a; 1]``, ``[I + 1, I + 1]``, so that the
    curvature between both is there. The bias has no factors, an empty list, then.

    :Shape: A list of matrices: ``[O, O]`` and ``[I, I]`` for a weight ``[O, I]``; the second is
        ``[I·k, I·k]`` for a convolution with k entries in its kernel. Vectors ``[D]`` instead of
        those with D larger than ``max_factor_size``.
        :func:`~backpack.utils.kroneckers.kfacs_to_mat` multiplies them out.
    :Scale: B carries the scale of the loss (with a mean, 1/N once), A is an average over samples.
    :Cost: That of what travels back, and a product of each factor's size squared with the number of
        samples (and positions).
    :Source: Dangel, Harmeling, Hennig, Modular block-diagonal curvature approximations for
        feedforward architectures (AISTATS 2020). Expand and reduce: Eschenhagen, Immer, Turner,
        Schneider, Hennig, Kronecker-factored approximate curvature for modern neural network
        architectures (NeurIPS 2023).
    """

    needs = ("gram",)
    saves_matrices = True
    tells_order = False  # whether an optimiser wants to know what the factors belong to

    def __init__(
        self,
        curv_type: str,
        loss_hessian_strategy: str,
        backprop_strategy: str,
        ea_strategy: str,
        savefield: str = "hbp",
        mc_samples: int = 1,
        subsampling: Sequence[int] | None = None,
        approximation: Approximation = None,
        joint_bias: bool = False,
        max_factor_size: int | None = None,
    ):
        """Choose a member of the family.

        Args:
            curv_type: ``Curvature.GGN``.
            loss_hessian_strategy: See :class:`LossHessianStrategy`.
            backprop_strategy: See :class:`BackpropStrategy`.
            ea_strategy: ``ExpectationApproximation.BOTEV_MARTENS``.
            savefield: Attribute of the parameter.
            mc_samples: Number of Monte-Carlo samples of the sampling strategy.
            subsampling: Samples of the batch to look at. Default: all.
            approximation: How weights are treated that are used at several positions: None,
                ``"expand"`` or ``"reduce"``; None alone if a batch average travels back.
            joint_bias: Whether a weight and its bias have one pair of factors. Transposed
                convolutions, recurrent layers, attention, and weights that are used several times
                are refused in the backward pass, if they have a bias.
            max_factor_size: Of factors with more rows there is the diagonal alone. None: of none;
                also if a batch average travels back.

        Raises:
            ValueError: If there is no such member.
        """
        members: dict[tuple[str, str], Propagation] = {
            (LossHessianStrategy.SAMPLING, BackpropStrategy.SQRT): SampledFactor(mc_samples),
            (LossHessianStrategy.EXACT, BackpropStrategy.SQRT): ExactFactor(),
            (LossHessianStrategy.EMPIRICAL, BackpropStrategy.SQRT): EmpiricalFactor(),
            (LossHessianStrategy.AVERAGE, BackpropStrategy.BATCH_AVERAGE): BatchAveraged(),
            (LossHessianStrategy.NONE, BackpropStrategy.NONE): InputsAlone(),
        }
        choice = (loss_hessian_strategy, backprop_strategy)
        known = curv_type == Curvature.GGN and ea_strategy == ExpectationApproximation.BOTEV_MARTENS
        if choice not in members or not known:
            raise ValueError(
                f"There is no Kronecker approximation with {curv_type=}, {loss_hessian_strategy=}, "
                f"{backprop_strategy=}, {ea_strategy=}. Curvature {Curvature.GGN!r} with "
                f"{ExpectationApproximation.BOTEV_MARTENS!r} goes with (loss, backprop) one of "
                f"{', '.join(map(str, members))}."
            )
        if approximation not in (None, "expand", "reduce"):
            raise ValueError(f"approximation is None, 'expand' or 'reduce', got {approximation!r}.")
        if approximation is not None and backprop_strategy == BackpropStrategy.BATCH_AVERAGE:
            raise ValueError(
                f"There is no approximation={approximation!r} of a matrix that is averaged over "
                "the batch: its positions cannot be told apart. Use KFAC or KFLR."
            )
        if max_factor_size is not None and backprop_strategy == BackpropStrategy.BATCH_AVERAGE:
            raise ValueError(
                f"There is no max_factor_size={max_factor_size!r} where a matrix is averaged over "
                "the batch: it is formed anyway. Use KFAC or KFLR."
            )
        if max_factor_size is not None and not max_factor_size >= 0:
            raise ValueError(f"max_factor_size is at least 0, or None, got {max_factor_size!r}.")
        self.max_factor_size = max_factor_size
        self.propagation = members[choice]
        self.approximation = approximation
        self.joint_bias = joint_bias
        gram = GRAMS[approximation]
        # the factor of what travels back
        self.needs = (IDENTITY if isinstance(self.propagation, InputsAlone) else gram,)  # type: ignore[misc]
        super().__init__(savefield, subsampling=subsampling)

    @property
    def _title(self) -> str:
        """What warnings call it."""
        return type(self).__name__

    @property
    def reads(self) -> tuple[str, ...]:
        """The factors of what travels back, and of the inputs."""
        inputs = JOINT_FACTORS if self.joint_bias else INPUT_FACTORS
        return (*self.needs, inputs[self.approximation])

    def extract(self, products: Products) -> list[Tensor]:
        """Return the list of Kronecker factors."""
        (first,) = self.needs
        factors = products.kronecker_factors(self.approximation, first, self.joint_bias)
        factors = self._limited(factors, products.parameter)
        return Factors(factors, products, self.joint_bias) if self.tells_order else factors

    def _limited(self, factors: list[Tensor], p: Tensor) -> list[Tensor]:
        """Return the diagonals of large factors of a parameter, and tell that they are ones."""
        most = self.max_factor_size
        if most is None or max(map(len, factors), default=0) <= most:
            return factors
        # another extension may have wanted them whole
        found = [f.diagonal().clone() if f.dim() > 1 and len(f) > most else f for f in factors]
        if most == MAX_FACTOR_SIZE:
            warn(
                f"{self._title}: of Kronecker factors with more than {most} rows there is the "
                f"diagonal alone, as for the parameter of shape {list(p.shape)}. Choose with "
                "max_factor_size; None keeps all.",
            )
        return found


class KFAC(HBP):
    r"""Kronecker factors of a Fisher information, by default with sampled gradients; in ``kfac``.

    .. math::
        B = \sum_n \sum_{m=1}^M \tilde b_{nm} \tilde b_{nm}^\top
        \qquad A = \frac1N \sum_n a_n a_n^\top

    For a linear layer :math:`z_n = W a_n`, with :math:`\tilde b_{nm}` what arrives at its output.
    What that is, ``fisher`` says:

    - ``"sampled"``: gradients for targets that are drawn from the model's prediction, divided by
      :math:`\sqrt M`. The loss has to be a negative log likelihood.
    - ``"exact"``: the columns of the exact factor of the loss Hessian. This is :class:`KFLR`.
    - ``"empirical"``: the gradients at the targets of the data. With the W terms that a mean of the
      loss divides by (W is 1 for a sum; :class:`~backpack.linalg.EmpiricalFisher` says more), and
      :math:`g_n` what arrives of the gradient of the loss, which has the factor 1/W,
      :math:`\tilde b_n = \sqrt W g_n`: for one term for each sample, B is the mean over the samples
      of the outer products of the gradients of their own losses. Any loss will do.
    - ``"inputs"``: nothing. B is the identity, without the scale of the loss, so that all there is
      to compute is A.

    :Shape: List of matrices, see :class:`HBP`.
    :Scale: B carries that of the loss, A is an average. The expectation of the sampled B is the
        exact one, and so is that of the empirical B if the targets follow the prediction.
    :Cost: M columns travel back where the gradient is one; C for ``"exact"``, one for
        ``"empirical"``, none for ``"inputs"``.
    :Source: Martens, Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature (ICML 2015). Convolutions: Grosse, Martens, A Kronecker-factored approximate
        Fisher matrix for convolution layers (ICML 2016). Exact: Botev, Ritter, Barber, Practical
        Gauss-Newton optimisation for deep learning (ICML 2017). Empirical: Kunstner, Balles,
        Hennig, Limitations of the empirical Fisher approximation for natural gradient descent
        (NeurIPS 2019). Inputs: Benzing, Gradient descent on neurons and its link to approximate
        second-order optimization (ICML 2022); Petersen et al., ISAAC Newton: input-based
        approximate curvature for Newton's method (ICLR 2023).
    """

    _optimiser = "KFAC"

    def __init__(
        self,
        mc_samples: int = 1,
        subsampling: Sequence[int] | None = None,
        approximation: Approximation = None,
        fisher: Fisher = "sampled",
        joint_bias: bool = False,
        max_factor_size: int | None = MAX_FACTOR_SIZE,
    ):
        """Store the options.

        Args:
            mc_samples: Number M of Monte-Carlo samples, for ``fisher="sampled"``.
            subsampling: Samples of the batch to look at. Default: all.
            approximation: For weights that are used at several positions, see :class:`HBP`.
            fisher: ``"sampled"``, ``"exact"``, ``"empirical"`` or ``"inputs"``.
            joint_bias: Whether a weight and its bias have one pair of factors, see :class:`HBP`.
            max_factor_size: Of factors with more rows there is the diagonal ``[D]`` alone, see
                :class:`HBP`. None: of none.

        Raises:
            ValueError: If an option is unknown, or ``mc_samples`` is given where nothing is drawn.
        """
        super().__init__(
            Curvature.GGN,
            *strategies(fisher, mc_samples),
            ExpectationApproximation.BOTEV_MARTENS,
            savefield="kfac",
            mc_samples=mc_samples,
            subsampling=subsampling,
            approximation=approximation,
            joint_bias=joint_bias,
            max_factor_size=max_factor_size,
        )


class KFLR(HBP):
    r"""Kronecker factors with the exact factor of the loss Hessian, saved in ``kflr``.

    .. math::
        B = \sum_n \sum_{c=1}^C b_{nc} b_{nc}^\top
        \qquad A = \frac1N \sum_n a_n a_n^\top

    As :class:`KFAC`, with :math:`b_{nc}` what arrives at the layer's output of column c of the
    exact factor.

    :Shape: List of matrices, see :class:`HBP`.
    :Scale: B carries that of the loss, A is an average.
    :Cost: C columns travel back where the gradient is one.
    :Source: Botev, Ritter, Barber, Practical Gauss-Newton optimisation for deep learning (ICML
        2017).
    """

    _optimiser = "KFAC(..., extension=KFLR())"

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        approximation: Approximation = None,
        joint_bias: bool = False,
        max_factor_size: int | None = MAX_FACTOR_SIZE,
    ):
        """Store the options.

        Args:
            subsampling: Samples of the batch to look at. Default: all.
            approximation: For weights that are used at several positions, see :class:`HBP`.
            joint_bias: Whether a weight and its bias have one pair of factors, see :class:`HBP`.
            max_factor_size: Of factors with more rows there is the diagonal ``[D]`` alone, see
                :class:`HBP`. None: of none.
        """
        super().__init__(
            Curvature.GGN,
            LossHessianStrategy.EXACT,
            BackpropStrategy.SQRT,
            ExpectationApproximation.BOTEV_MARTENS,
            savefield="kflr",
            subsampling=subsampling,
            approximation=approximation,
            joint_bias=joint_bias,
            max_factor_size=max_factor_size,
        )


class KFRA(HBP):
    r"""Kronecker factors with a batch-averaged matrix travelling back, saved in ``kfra``.

    .. math::
        B \leftarrow \frac1N \sum_n J_{x_n} z_n^\top \, B \, J_{x_n} z_n
        \qquad A = \frac1N \sum_n a_n a_n^\top

    B starts as the loss Hessian summed over the samples; every module :math:`z = z(x)` replaces it
    by the average over the batch.

    There is no ``max_factor_size``: the matrix that travels back is formed anyway, and all factors
    are whole, also those with more rows than ``KFAC`` and ``KFLR`` keep by default.

    :Shape: List of matrices of any size, see :class:`HBP`.
    :Scale: B carries that of the loss, A is an average.
    :Cost: One square matrix travels back, with as many rows as a sample has entries in the
        activation at hand: for convolutions on large images that is a lot.
    :Source: Botev, Ritter, Barber, Practical Gauss-Newton optimisation for deep learning (ICML
        2017).
    """

    _optimiser = "KFAC(..., extension=KFRA())"

    def __init__(self, subsampling: Sequence[int] | None = None):
        """Choose the samples.

        Args:
            subsampling: Indices of the samples of the batch to look at. Default: all.
        """
        super().__init__(
            Curvature.GGN,
            LossHessianStrategy.AVERAGE,
            BackpropStrategy.BATCH_AVERAGE,
            ExpectationApproximation.BOTEV_MARTENS,
            savefield="kfra",
            subsampling=subsampling,
        )
